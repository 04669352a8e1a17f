"""What a training loop gets: batches, and the two kinds of sources that give them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


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
