"""Batches for training and testing, from a recipe and a set of images."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.train.batches.batch import EvalBatches, TrainBatches
from wellposed.train.batches.checks import check_batch_size, check_images, check_share
from wellposed.train.batches.evaluation import ResidentEval, StreamedEval
from wellposed.train.batches.items import Items, eval_steps, train_steps
from wellposed.train.batches.mixing import Mixing
from wellposed.train.batches.order import Order
from wellposed.train.batches.placement import choose_placement
from wellposed.train.batches.plan import Augmentation
from wellposed.train.batches.preparation import Preparation
from wellposed.train.batches.resident import ResidentBatches
from wellposed.train.batches.streamed import StreamedBatches
from wellposed.train.batches.upload import upload
from wellposed.train.data.decoding import decode_all, decode_readable
from wellposed.train.data.headers import counted, nothing_left
from wellposed.train.data.split import ImageData, Split
from wellposed.train.recipe import Recipe


def make_batches(
    recipe: Recipe,
    data: ImageData,
    *,
    image_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | str,
    rank: int = 0,
    world: int = 1,
    rollbacks: int = 0,
    compile: bool = False,
) -> tuple[TrainBatches, EvalBatches]:
    """The batches of a training run, and of its tests.

    Args:
        recipe: resolved: None for ``flip``, ``crop_padding`` and ``crop_scale`` means off.
        data: the images.
        image_size: side in pixels of the batches' images.
        mean, std: of each channel, for pixels from 0 to 1.
        device: where the batches go.
        rank, world: this process among how many.
        rollbacks: another number gives another order of the images.
        compile: compile the augmentation, on CUDA; a CPU does it as it is.
    """
    device = torch.device(device)
    check_share(recipe, rank, world)
    check_images(recipe, data, image_size, mean, std)
    check_batch_size(recipe, len(data.train))
    placement = choose_placement(recipe, data, image_size, device)
    notes: list[str] = []

    def preparation(images: int, augmentation: Augmentation) -> Preparation:
        order = Order(
            images,
            recipe.batch_size,
            accumulate=recipe.accumulate,
            rank=rank,
            world=world,
            seed=recipe.seed,
            rollbacks=rollbacks,
        )
        mixing = Mixing(
            recipe.mixup or 0.0,
            recipe.cutmix,
            recipe.smoothing,
            classes=len(data.classes),
            seed=recipe.seed,
            probability=recipe.mix_probability,
        )
        compiles = compile and device.type == "cuda"
        return Preparation(
            augmentation, mixing, order, mean=mean, std=std, size=image_size, device=device, compile=compiles
        )

    # As large as a pass of training, so that a compiled model sees one shape.
    eval_size = recipe.batch_size // (world * recipe.accumulate)
    train: TrainBatches
    test: EvalBatches
    if placement == "device":
        pixels, labels = resident(data.train, recipe, data, image_size, device, notes)
        check_batch_size(recipe, len(pixels))
        prepared = preparation(len(pixels), Augmentation.of(recipe))
        train = ResidentBatches(pixels, labels, prepared, notes=notes)
        pixels, labels = resident(data.test, recipe, data, image_size, device, notes)
        test = ResidentEval(
            pixels, labels, eval_size, mean=mean, std=std, rank=rank, world=world, notes=notes
        )
    else:
        replaces, seed = recipe.skip_unreadable, recipe.seed
        items = Items(data.train, train_steps(recipe, image_size, mean), seed, replaces=replaces)
        prepared = preparation(len(data.train), Augmentation.of(recipe).after_workers())
        train = StreamedBatches(items, prepared, workers=recipe.workers, notes=notes)
        test = StreamedEval(
            Items(data.test, eval_steps(image_size), seed, replaces=replaces),
            eval_size,
            mean=mean,
            std=std,
            device=device,
            workers=recipe.workers,
            rank=rank,
            world=world,
            notes=notes,
        )
    return train, test


def resident(
    split: Split, recipe: Recipe, data: ImageData, size: int, device: torch.device, notes: list[str]
) -> tuple[Tensor, Tensor]:
    """Pixels and labels of a split, decoded onto the device."""
    if not recipe.skip_unreadable:
        pixels = decode_all(split, size, data.channels)
        return upload(pixels, device), upload(split.labels, device)
    pixels, indices, unreadable = decode_readable(split, size, data.channels)
    if not len(indices):
        raise nothing_left(len(split), unreadable[0])
    if unreadable:
        notes.append(f"{counted(data.name, list(unreadable), len(split))} They were left out.")
    return upload(pixels, device), upload(split.labels[indices], device)
