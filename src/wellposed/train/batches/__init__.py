"""The batches of every update and of a test, from a recipe and a set of images.

What batches need of the two is checked before any image is read, and whether the images are kept on the
device or streamed through workers is chosen by their size.

Mixup, CutMix and label smoothing are timm's, with draws that depend on (seed, update) alone. timm draws one
mixing weight (and one rectangle) for the batch it is given. Here every pass of an update, on every process,
draws the same, and the passes hold mirrored positions (see ``order.py``): together they are what timm makes
of the whole batch.

Every process gets the same number of test batches of the same size: with collective operations in the model
none may run short. The end is padded with the last image, of weight 0.

>>> indices, weights = shares(5, batch_size=2, rank=1, world=2)
>>> indices.tolist(), weights.tolist()
([[2, 3], [4, 4]], [[1.0, 1.0], [0.0, 0.0]])
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from timm.data.mixup import Mixup, one_hot
from torch import Tensor

from wellposed.train.batches.augment import NOISE_STARTS, Augmentation, augmented, draw, normalised
from wellposed.train.batches.order import Indices, Order, Pass, Purpose, generator, numpy_seeded
from wellposed.train.batches.sources import (
    Items,
    Loaded,
    Placement,
    Resident,
    Source,
    Streamed,
    eval_steps,
    train_steps,
    upload,
)
from wellposed.train.data.images import ImageData, Split, decode_all
from wellposed.train.recipe import Recipe


@dataclass(frozen=True)
class Batch:
    """One pass of one process: images (b, C, S, S), float32, normalised, on the device.

    The labels are (b,) int64, or (b, K) float32 with mixup, CutMix or label smoothing.
    """

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class EvalBatch:
    """Test images with labels (b,) int64 and weights (b,) float32: 1, or 0 for padding."""

    images: Tensor
    labels: Tensor
    weights: Tensor


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
    compile: bool = False,
) -> "tuple[TrainBatches, EvalBatches]":
    """The batches of a training run, and of its tests.

    Args:
        recipe: resolved: None for ``flip``, ``crop_padding`` and ``crop_scale`` means off.
        data: the images.
        image_size: side in pixels of the batches' images.
        mean, std: of each channel, for pixels from 0 to 1.
        device: where the batches go.
        rank, world: this process among how many.
        compile: compile the augmentation, on CUDA; a CPU does it as it is.
    """
    device = torch.device(device)
    check_share(recipe, rank, world)
    check_images(recipe, data, image_size, mean, std)
    check_batch_size(recipe, len(data.train))
    augmentation = Augmentation.of(recipe)
    if choose_placement(recipe, data, image_size, device) == "device":
        sources: list[Source] = [
            _resident(split, image_size, data.channels, device) for split in (data.train, data.test)
        ]
    else:
        steps = train_steps(recipe, image_size, mean), eval_steps(image_size)
        sources = [
            Streamed(Items(split, each, recipe.seed), device, recipe.workers)
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
    test = EvalBatches(sources[1], eval_size, mean=mean, std=std, device=device, rank=rank, world=world)
    return TrainBatches(sources[0], preparation), test


def _resident(split: Split, size: int, channels: int, device: torch.device) -> Resident:
    """The images of a split, decoded onto the device."""
    return Resident(upload(decode_all(split, size, channels), device), upload(split.labels, device))


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


class Mixing:
    """Makes the labels of a pass, and with mixup or CutMix mixes its images.

    Args:
        mixup, cutmix: alpha of each, 0 for none.
        smoothing: of the labels.
        classes: how many there are.
        seed: of the draws.
        probability: that an update is mixed.
    """

    def __init__(
        self,
        mixup: float,
        cutmix: float,
        smoothing: float,
        classes: int,
        seed: int,
        probability: float = 1.0,
    ) -> None:
        self.smoothing, self.classes, self.seed = smoothing, classes, seed
        self.mixes = mixup > 0 or cutmix > 0
        self._mixup = Mixup(
            mixup_alpha=mixup,
            cutmix_alpha=cutmix,
            prob=probability,
            label_smoothing=smoothing,
            num_classes=classes,
        )

    def __call__(self, update: int, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of one pass; the images are mixed in place."""
        if self.mixes:
            with numpy_seeded(self.seed, Purpose.MIX, update):
                images, labels = self._mixup(images, labels)
        elif self.smoothing > 0:
            off = self.smoothing / self.classes
            labels = one_hot(labels, self.classes, on_value=1.0 - self.smoothing + off, off_value=off)
        return images, labels


def scale(values: Sequence[float], device: torch.device) -> Tensor:
    """A mean or deviation of the channels, for pixels from 0 to 255, as (C, 1, 1)."""
    return (torch.tensor(values, dtype=torch.float32) * 255).view(-1, 1, 1).to(device)


class Preparation:
    """Augments, normalises and mixes the passes of an update, on the device.

    Args:
        augmentation: what is done here.
        mixing: mixup, CutMix and smoothing.
        order: of the run; shows which rows of an update's plan are this process's.
        mean, std: of the channels, for pixels from 0 to 1.
        size: side of the images.
        device: where they are.
        compile: compile the augmentation.
    """

    def __init__(
        self,
        augmentation: Augmentation,
        mixing: Mixing,
        order: Order,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        size: int,
        device: torch.device,
        compile: bool,
    ) -> None:
        self.augmentation, self.mixing, self.order = augmentation, mixing, order
        self.size, self.device = size, device
        self.mean, self.std = scale(mean, device), scale(std, device)
        self._noise: Tensor | None = None
        if augmentation.erase:
            count = NOISE_STARTS + len(mean) * size * size
            values = generator(order.seed, Purpose.NOISE).standard_normal(count, dtype=np.float32)
            self._noise = upload(values, device)
        self._augmented: Callable[..., Tensor] = augmented
        if compile:
            self._augmented = torch.compile(augmented, dynamic=False)

    def plans(self, update: int) -> list[Tensor | None]:
        """For each pass of this process what is done to its images."""
        if self.augmentation.is_nothing:
            return [None] * len(self.order.positions)
        order = self.order
        whole = draw(self.augmentation, order.seed, update, order.batch_size, self.size)
        return list(upload(whole[order.positions], self.device).unbind(0))

    def batch(self, update: int, plan: Tensor | None, loaded: Loaded) -> Batch:
        """One pass."""
        images = self._augmented(
            loaded.pixels, loaded.indices, plan, self.mean, self.std, self._noise, self.augmentation
        )
        return Batch(*self.mixing(update, images, loaded.labels))


class TrainBatches:
    """The batches of every update; the same whenever and however often they are asked for.

    Args:
        source: of the images.
        preparation: what is done to them on the device.
    """

    def __init__(self, source: Source, preparation: Preparation) -> None:
        self.source, self.placement, self.images = source, source.placement, source.images
        self.preparation = preparation
        self.updates_per_epoch = preparation.order.updates_per_epoch
        self._turn = 0

    def iterate(self, start: int, stop: int) -> Iterator[tuple[int, list[Batch]]]:
        """The updates from ``start`` up to ``stop``, each with this process's passes."""
        if not 0 <= start <= stop:
            raise ValueError(f"expected 0 <= start <= stop, got start={start} and stop={stop}.")
        self._turn += 1
        turn, order = self._turn, self.preparation.order
        loaded = self.source.read(one for update in range(start, stop) for one in order.passes(update))
        for update in range(start, stop):
            if turn != self._turn:
                raise RuntimeError(
                    f"iterate() was ended before update {update} by close() or another iterate(); "
                    "use one at a time."
                )
            yield update, self._prepared(update, [next(loaded) for _ in order.positions])

    def at(self, update: int) -> list[Batch]:
        """The passes of one update, bit for bit those that ``iterate`` gives."""
        return self._prepared(update, map(self.source.take, self.preparation.order.passes(update)))

    def close(self) -> None:
        """End the worker processes, if there are any."""
        self._turn += 1
        self.source.close()

    def _prepared(self, update: int, loaded: Iterable[Loaded]) -> list[Batch]:
        plans = self.preparation.plans(update)
        return [self.preparation.batch(update, *each) for each in zip(plans, loaded, strict=True)]


def shares(images: int, batch_size: int, rank: int, world: int) -> tuple[Indices, NDArray[np.float32]]:
    """(batches, batch_size) indices of images and their weights."""
    batches = -(-images // (batch_size * world))
    all_of_them = np.arange(batches * world * batch_size).reshape(batches, world, batch_size)[:, rank]
    return np.minimum(all_of_them, images - 1), (all_of_them < images).astype(np.float32)


class EvalBatches:
    """The test images in order, shared by the processes, in batches of one size.

    Args:
        source: of the images.
        batch_size: of each process.
        mean, std: of the channels, for pixels from 0 to 1.
        device: where the batches go.
        rank, world: this process among how many.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        rank: int,
        world: int,
    ) -> None:
        self.source, self.images, self.device = source, source.images, device
        self.mean, self.std = scale(mean, device), scale(std, device)
        self._indices, self._weights = shares(source.images, batch_size, rank, world)

    def __len__(self) -> int:
        """Batches of this process; every process has as many."""
        return len(self._indices)

    def __iter__(self) -> Iterator[EvalBatch]:
        passes = (Pass(0, indices, indices) for indices in self._indices)
        try:
            for loaded, weights in zip(self.source.read(passes), self._weights, strict=True):
                pixels = loaded.pixels if loaded.indices is None else loaded.pixels[loaded.indices]
                images = normalised(pixels, self.mean, self.std)
                yield EvalBatch(images, loaded.labels, upload(weights, self.device))
        finally:
            self.source.close()  # the memory of the workers is free until the next test
