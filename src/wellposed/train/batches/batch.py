"""What a training loop gets: batches, and the two kinds of sources that give them.

From the host to the device without waiting for either.

Mixup, CutMix and label smoothing: timm's, with draws that depend on (seed, update) alone.

timm draws one mixing weight (and one rectangle) for the batch it is given. Here every pass of an update, on
every process, draws the same, and the passes hold mirrored positions (see ``order.py``): together they are
what timm makes of the whole batch.

From pixels to a batch: what resident and streamed images have in common.

Training images that all lie on the device, decoded once.

An update is a few kernels: nothing is read, and nothing waits for the device. The order of an epoch goes
there once; what an update needs of it is a view.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from timm.data.mixup import Mixup, one_hot
from torch import Tensor

from wellposed.train.batches.augment import NOISE_STARTS, Augmentation, augmented, draw
from wellposed.train.batches.order import Order, Purpose, generator, numpy_seeded


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


class TrainBatches(Protocol):
    """The batches of every update; the same whenever and however often they are asked for."""

    updates_per_epoch: int
    placement: Literal["device", "stream"]
    notes: list[str]
    """Sentences for a report, at the start: images that could not be read."""
    unreadable: list[str]
    """A message for each streamed image that was met and could not be read; it grows."""

    @property
    def images(self) -> int:
        """Without those that could not be read, as far as they are known."""
        ...

    def iterate(self, start: int, stop: int) -> Iterator[tuple[int, list[Batch]]]:
        """The updates from ``start`` up to ``stop``, each with this process's passes."""
        ...

    def at(self, update: int) -> list[Batch]:
        """The passes of one update, bit for bit those that ``iterate`` gives."""
        ...

    def reorder(self, rollbacks: int) -> None:
        """Visit the images in another order from now on; 0 is the first one."""
        ...

    def close(self) -> None:
        """End the worker processes, if there are any."""
        ...


class EvalBatches(Protocol):
    """The test images in order, shared by the processes, in batches of one size."""

    notes: list[str]
    unreadable: list[str]
    """As of :class:`TrainBatches`."""

    @property
    def images(self) -> int:
        """As of :class:`TrainBatches`."""
        ...

    def __len__(self) -> int:
        """Batches of this process; every process has as many."""
        ...

    def __iter__(self) -> Iterator[EvalBatch]: ...


def updates(start: int, stop: int) -> range:
    """The updates that ``iterate`` is asked for."""
    if not 0 <= start <= stop:
        raise ValueError(f"expected 0 <= start <= stop, got start={start} and stop={stop}.")
    return range(start, stop)


PINNED_LIMIT = 64 * 2**20
"""Bytes; a whole set of images should not be locked in the host's memory."""


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device; on CUDA the copy of a small one is queued and the host goes on."""
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    if device.type == "cuda" and tensor.nbytes <= PINNED_LIMIT:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Uploads:
    """Copies of pinned batches; on CUDA beside the computation that is still going on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        if self._stream is None:
            return [tensor.to(self.device) for tensor in tensors]
        with torch.cuda.stream(self._stream):
            copies = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for copy in copies:
            # Made on one stream, used on another: its memory must not be given away before that use.
            copy.record_stream(current)
        return copies


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


class Preparation:
    """Augments, normalises and mixes the passes of an update, on the device.

    Args:
        augmentation: what is done here.
        mixing: mixup, CutMix and smoothing.
        order: of the run; tells which rows of an update's plan are this process's.
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

    def batch(
        self, update: int, plan: Tensor | None, pixels: Tensor, indices: Tensor | None, labels: Tensor
    ) -> Batch:
        """One pass: the images at ``indices`` of ``pixels``, with their labels (b,)."""
        images = self._augmented(pixels, indices, plan, self.mean, self.std, self._noise, self.augmentation)
        return Batch(*self.mixing(update, images, labels))


def scale(values: Sequence[float], device: torch.device) -> Tensor:
    """A mean or deviation of the channels, for pixels from 0 to 255, as (C, 1, 1)."""
    return (torch.tensor(values, dtype=torch.float32) * 255).view(-1, 1, 1).to(device)


class ResidentBatches:
    """Batches from pixels (n, C, S, S), uint8, and labels (n,), int64, on the device."""

    placement: Literal["device", "stream"] = "device"

    def __init__(self, pixels: Tensor, labels: Tensor, preparation: Preparation, *, notes: list[str]) -> None:
        self.pixels, self.labels, self.preparation, self.notes = pixels, labels, preparation, notes
        self.images, self.unreadable = len(pixels), list[str]()
        self.updates_per_epoch = preparation.order.updates_per_epoch
        self._epoch: tuple[int, Tensor] | None = None

    def iterate(self, start: int, stop: int) -> Iterator[tuple[int, list[Batch]]]:
        for update in updates(start, stop):
            yield update, self.at(update)

    def at(self, update: int) -> list[Batch]:
        epoch, step = self.preparation.order.place(update)
        passes = self._table(epoch)[step].unbind(0)
        plans = self.preparation.plans(update)
        return [
            self.preparation.batch(update, plan, self.pixels, indices, self.labels[indices])
            for plan, indices in zip(plans, passes, strict=True)
        ]

    def reorder(self, rollbacks: int) -> None:
        self.preparation.order.rollbacks = rollbacks
        self._epoch = None

    def close(self) -> None:
        """There are no workers."""

    def _table(self, epoch: int) -> Tensor:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, upload(self.preparation.order.table(epoch), self.pixels.device)
        return self._epoch[1]
