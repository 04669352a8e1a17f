"""Batches for training and testing, from a recipe and a set of images.

What they need of the two is checked before any image is read, and whether the images are kept on the device
or streamed through workers is chosen by their size.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from wellposed.train.batches.augment import Augmentation
from wellposed.train.batches.batch import EvalBatches, Mixing, Preparation, TrainBatches
from wellposed.train.batches.order import Order
from wellposed.train.batches.sources import (
    Items,
    Placement,
    Resident,
    Source,
    Streamed,
    eval_steps,
    train_steps,
    upload,
)
from wellposed.train.data.images import ImageData, Split, counted, decode_all, decode_readable, nothing_left
from wellposed.train.recipe import Recipe

SHARE = 1 / 4
"""Of the memory that the images may take; the rest is for the model and what it computes."""
CPU_LIMIT = 8 * 2**30


def choose_placement(recipe: Recipe, data: ImageData, image_size: int, device: torch.device) -> Placement:
    """What ``recipe.placement`` means for this data and device.

    ``auto`` keeps the images on the device if their bytes, decoded, are at most a quarter of its free memory;
    on a CPU a quarter of the machine's, at most 8 GiB. What only workers can do is streamed.
    """
    if recipe.placement == "stream":
        return "stream"
    needed, budget = bytes_needed(data, image_size), bytes_allowed(device)
    if recipe.placement == "auto":
        return "device" if recipe.worker_policy is None and needed <= budget else "stream"
    if recipe.worker_policy is not None:
        raise ValueError(
            f"auto_augment={recipe.worker_policy} is done by workers, got placement=device; use "
            "placement=stream, or auto_augment=trivial, or no auto_augment."
        )
    if needed > budget:
        raise ValueError(
            f"placement=device: the images take {_size(needed)}, a quarter of the memory of {device} that "
            f"can be used is {_size(budget)}; use placement=stream, or lower image_size or limit."
        )
    return "device"


def bytes_needed(data: ImageData, image_size: int) -> int:
    """Pixels and labels of both splits."""
    return (len(data.train) + len(data.test)) * (data.channels * image_size**2 + 8)


def bytes_allowed(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(SHARE * free)
    # All of the machine's memory and not what is free: that changes with the cache of files, and with it the
    # images that a training run sees would.
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(int(SHARE * total), CPU_LIMIT)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def check_share(recipe: Recipe, rank: int, world: int) -> None:
    """An update must divide evenly among processes and passes."""
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, world), got rank={rank} and world={world}.")
    slots = world * recipe.accumulate
    size, rest = divmod(recipe.batch_size, slots)
    words = f"{world} processes x accumulate={recipe.accumulate}"
    if rest or not size:
        raise ValueError(
            f"batch_size must be a multiple of {words} = {slots}, got {recipe.batch_size}; use "
            f"{max(size, 1) * slots} or {(size + 1) * slots}."
        )
    if (recipe.mixup or recipe.cutmix) and size % 2:
        raise ValueError(
            f"mixup and cutmix pair the images of a pass, so it needs an even number, got batch_size="
            f"{recipe.batch_size} over {words} = {size} in a pass; use batch_size={(size + 1) * slots}."
        )


def check_batch_size(recipe: Recipe, images: int) -> None:
    """An epoch has at least one update."""
    if recipe.batch_size > images:
        raise ValueError(
            f"batch_size must be at most the number of training images, {images}, got {recipe.batch_size}; "
            "lower batch_size."
        )


def with_batch_size(recipe: Recipe, images: int, world: int) -> tuple[Recipe, list[str]]:
    """The recipe with batches no larger than the set, so that an epoch has an update, and a note of that."""
    if recipe.batch_size <= images:
        return recipe, []
    step = world * recipe.accumulate * (2 if recipe.mixup or recipe.cutmix else 1)
    if images < step:
        raise ValueError(
            f"expected at least {step} training images, for one batch of the recipe, got {images}; add some."
        )
    lowered = replace(recipe, batch_size=images // step * step)
    return lowered, [
        f"batch_size is {lowered.batch_size}, not {recipe.batch_size}: there are {images} training images."
    ]


def check_images(
    recipe: Recipe, data: ImageData, size: int, mean: Sequence[float], std: Sequence[float]
) -> None:
    """The images, their normalisation, and augmentation that would do nothing."""
    if recipe.task != "mae" and len(data.classes) < 2:
        raise ValueError(
            f"expected at least two classes to tell apart in {data.name}, got {len(data.classes)} "
            f"({', '.join(data.classes)}); add images of another class, or pre-train with task=mae."
        )
    if not len(data.test):
        raise ValueError(f"expected test images in {data.name}, got none; add some, or raise holdout.")
    if len(mean) != data.channels or len(std) != data.channels or min(std) <= 0:
        raise ValueError(
            f"mean and std must have {data.channels} values each, as {data.name} has channels, those of std "
            f"positive, got mean={tuple(mean)} and std={tuple(std)}."
        )
    if recipe.crop_padding is not None and recipe.crop_padding >= size:
        raise ValueError(
            f"crop_padding must be less than the image's side of {size} pixels, got {recipe.crop_padding}; "
            "an eighth of the side is usual."
        )
    policy = recipe.worker_policy
    if policy is not None and recipe.color_jitter and "3a" not in policy:
        raise ValueError(
            f"timm leaves color_jitter out beside auto_augment={policy}, got color_jitter="
            f"{recipe.color_jitter}; drop one of them."
        )


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
    augmentation = Augmentation.of(recipe)
    notes: list[str] = []
    if choose_placement(recipe, data, image_size, device) == "device":
        sources: list[Source] = [
            _resident(split, recipe, data, image_size, device, notes) for split in (data.train, data.test)
        ]
        check_batch_size(recipe, sources[0].images)
    else:
        steps = train_steps(recipe, image_size, mean), eval_steps(image_size)
        sources = [
            Streamed(Items(split, each, recipe.seed, replaces=recipe.skip_unreadable), device, recipe.workers)
            for split, each in zip((data.train, data.test), steps, strict=True)
        ]
        augmentation = augmentation.after_workers()
    order = Order(
        sources[0].images,
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
    preparation = Preparation(
        augmentation,
        mixing,
        order,
        mean=mean,
        std=std,
        size=image_size,
        device=device,
        compile=compile and device.type == "cuda",
    )
    # As large as a pass of training, so that a compiled model sees one shape.
    eval_size = recipe.batch_size // (world * recipe.accumulate)
    test = EvalBatches(
        sources[1], eval_size, mean=mean, std=std, device=device, rank=rank, world=world, notes=notes
    )
    return TrainBatches(sources[0], preparation, notes), test


def _resident(
    split: Split, recipe: Recipe, data: ImageData, size: int, device: torch.device, notes: list[str]
) -> Resident:
    """The images of a split, decoded onto the device."""
    if not recipe.skip_unreadable:
        return Resident(upload(decode_all(split, size, data.channels), device), upload(split.labels, device))
    pixels, indices, unreadable = decode_readable(split, size, data.channels)
    if not len(indices):
        raise nothing_left(len(split), unreadable[0])
    if unreadable:
        notes.append(f"{counted(data.name, unreadable, len(split))} They were skipped.")
    return Resident(upload(pixels, device), upload(split.labels[indices], device))
