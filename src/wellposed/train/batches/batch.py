"""What a training loop gets: the batches of every update, and those of a test.

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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from timm.data.mixup import Mixup, one_hot
from torch import Tensor

from wellposed.train.batches.augment import NOISE_STARTS, Augmentation, augmented, draw, normalised
from wellposed.train.batches.order import Indices, Order, Pass, Purpose, generator, numpy_seeded
from wellposed.train.batches.sources import Loaded, Placement, Source, upload


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
        notes: sentences for a report, at the start: images that could not be read.
    """

    def __init__(self, source: Source, preparation: Preparation, notes: list[str]) -> None:
        self.source, self.preparation, self.notes = source, preparation, notes
        self.placement: Placement = source.placement
        self.updates_per_epoch = preparation.order.updates_per_epoch
        self._turn = 0

    @property
    def images(self) -> int:
        """Without those that could not be read, as far as they are known."""
        return self.source.images

    @property
    def unreadable(self) -> list[str]:
        """A message for each streamed image that was met and could not be read; it grows."""
        return self.source.unreadable

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
                    f"iterate() was ended before update {update} by close(), reorder() or another iterate(); "
                    "use one at a time."
                )
            yield update, self._prepared(update, [next(loaded) for _ in order.positions])

    def at(self, update: int) -> list[Batch]:
        """The passes of one update, bit for bit those that ``iterate`` gives."""
        return self._prepared(update, map(self.source.take, self.preparation.order.passes(update)))

    def reorder(self, rollbacks: int) -> None:
        """Visit the images in another order from now on; 0 is the first one."""
        self._turn += 1
        self.preparation.order.rollbacks = rollbacks

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

    An image that cannot be read, where others stand for such, has weight 0.

    Args:
        source: of the images.
        batch_size: of each process.
        mean, std: of the channels, for pixels from 0 to 1.
        device: where the batches go.
        rank, world: this process among how many.
        notes: as of :class:`TrainBatches`.
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
        notes: list[str],
    ) -> None:
        self.source, self.device, self.notes = source, device, notes
        self.mean, self.std = scale(mean, device), scale(std, device)
        self._indices, self._weights = shares(source.images, batch_size, rank, world)

    @property
    def images(self) -> int:
        """As of :class:`TrainBatches`."""
        return self.source.images

    @property
    def unreadable(self) -> list[str]:
        """As of :class:`TrainBatches`."""
        return self.source.unreadable

    def __len__(self) -> int:
        """Batches of this process; every process has as many."""
        return len(self._indices)

    def __iter__(self) -> Iterator[EvalBatch]:
        passes = (Pass(0, indices, indices) for indices in self._indices)
        try:
            for loaded, weights in zip(self.source.read(passes), self._weights, strict=True):
                pixels = loaded.pixels if loaded.indices is None else loaded.pixels[loaded.indices]
                images = normalised(pixels, self.mean, self.std)
                read = weights if loaded.was_read is None else weights * loaded.was_read
                yield EvalBatch(images, loaded.labels, upload(read, self.device))
        finally:
            self.source.close()  # the memory of the workers is free until the next test
