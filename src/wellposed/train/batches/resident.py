"""Training images that all lie on the device, decoded once.

An update is a few kernels: nothing is read, and nothing waits for the device. The order of an epoch goes
there once; what an update needs of it is a view.
"""

from collections.abc import Iterator
from typing import Literal

from torch import Tensor

from wellposed.train.batches.batch import Batch, updates
from wellposed.train.batches.preparation import Preparation
from wellposed.train.batches.upload import upload


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
