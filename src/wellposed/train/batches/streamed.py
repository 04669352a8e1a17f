"""Training images that are read and augmented by worker processes, ahead of their use."""

from collections.abc import Iterator
from typing import Any, Literal

from torch.utils.data import DataLoader

from wellposed.train.batches.batch import Batch, updates
from wellposed.train.batches.items import Item, Items, Key, Loaded, refuse_missing, together
from wellposed.train.batches.loader import loader, read_by
from wellposed.train.batches.order import Indices, Order
from wellposed.train.batches.preparation import Preparation
from wellposed.train.batches.upload import Uploads


class KeysOfUpdates:
    """The keys of every pass of the updates in ``span``, one list a pass."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.span = range(0)
        self._epoch: tuple[int, int, Indices] | None = None

    def __iter__(self) -> Iterator[list[Key]]:
        for update in self.span:
            yield from self.of(update)

    def of(self, update: int) -> list[list[Key]]:
        epoch, step = self.order.place(update)
        indices = self._table(epoch)[step]
        positions = self.order.positions + step * self.order.batch_size
        return [
            [Key(epoch, position, image) for position, image in zip(*one_pass, strict=True)]
            for one_pass in zip(positions.tolist(), indices.tolist(), strict=True)
        ]

    def _table(self, epoch: int) -> Indices:
        now = epoch, self.order.rollbacks
        if self._epoch is None or self._epoch[:2] != now:
            self._epoch = *now, self.order.table(epoch)
        return self._epoch[2]


class StreamedBatches:
    """Batches of images that workers make; normalised, erased and mixed on the device.

    Args:
        items: the training images.
        preparation: what is done on the device.
        workers: processes that read; 0 reads in this one.
        notes: sentences for a report.
    """

    placement: Literal["device", "stream"] = "stream"

    def __init__(self, items: Items, preparation: Preparation, *, workers: int, notes: list[str]) -> None:
        self.items, self.preparation, self.workers, self.notes = items, preparation, workers, notes
        self.unreadable: list[str] = []
        self.updates_per_epoch = preparation.order.updates_per_epoch
        self._keys = KeysOfUpdates(preparation.order)
        self._upload = Uploads(preparation.device)
        self._loader: DataLoader[Item] | None = None
        self._batches: Iterator[Any] = iter(())
        self._turn = 0

    @property
    def images(self) -> int:
        return len(self.items.split) - len(self.unreadable)

    def iterate(self, start: int, stop: int) -> Iterator[tuple[int, list[Batch]]]:
        self._turn += 1
        turn = self._turn
        self._keys.span = updates(start, stop)
        if self._loader is None:
            device = self.preparation.device
            self._loader = loader(self.items, self._keys, self.workers, device, persistent=True)
        # Kept here and not by this generator, so that close() can let go of it.
        self._batches = read_by(self._loader)
        for update in range(start, stop):
            if turn != self._turn:
                raise RuntimeError(
                    f"iterate() was ended before update {update} by close(), reorder() or another iterate(); "
                    "use one at a time."
                )
            passes = self._keys.order.positions
            yield update, self._prepared(update, [next(self._batches) for _ in passes])

    def at(self, update: int) -> list[Batch]:
        loaded = [together([self.items[key] for key in keys]) for keys in self._keys.of(update)]
        return self._prepared(update, loaded)

    def reorder(self, rollbacks: int) -> None:
        self._turn += 1
        self.preparation.order.rollbacks = rollbacks

    def close(self) -> None:
        self._turn += 1
        self._batches, self._loader = iter(()), None

    def _prepared(self, update: int, loaded: list[Loaded]) -> list[Batch]:
        batches = []
        for plan, one_pass in zip(self.preparation.plans(update), loaded, strict=True):
            refuse_missing(one_pass, self.items)
            collect_unreadable(one_pass, self.unreadable)
            images, labels = self._upload([one_pass.images, one_pass.labels])
            batches.append(self.preparation.batch(update, plan, images, None, labels))
        return batches


def collect_unreadable(loaded: Loaded, unreadable: list[str]) -> None:
    """Add a message for each image that could not be read, once."""
    for problem in filter(None, loaded.problems):
        if problem not in unreadable:
            unreadable.append(problem)
