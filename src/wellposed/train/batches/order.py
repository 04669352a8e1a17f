"""Which images an update takes, and which of them a process takes.

Epoch e visits the images in a permutation drawn from (seed, e, rollbacks); images that fill no whole batch
are left out. The B positions of an update are cut into slots, one for each process and pass.

A slot takes its positions from both ends of the batch. timm's Mixup pairs an image with the one at the
mirrored position; with such slots these are the same two images however many slots there are:

>>> slot_positions(0, 1, 8).tolist()
[0, 1, 2, 3, 4, 5, 6, 7]
>>> slot_positions(0, 2, 8).tolist(), slot_positions(1, 2, 8).tolist()
([0, 1, 6, 7], [2, 3, 4, 5])
"""

import numpy as np
from numpy.typing import NDArray

from wellposed.train.batches.draws import Purpose, generator

Indices = NDArray[np.int64]


def permutation(images: int, seed: int, epoch: int, rollbacks: int = 0) -> Indices:
    """The order in which an epoch visits the images."""
    return generator(seed, Purpose.ORDER, epoch, rollbacks).permutation(images)


def slot_positions(slot: int, slots: int, batch_size: int) -> Indices:
    """Positions in the batch, ascending; contiguous ones where a slot has no two equal ends."""
    size = batch_size // slots
    if size % 2:
        return np.arange(slot * size, (slot + 1) * size)
    half = size // 2
    front = np.arange(slot * half, (slot + 1) * half)
    return np.concatenate([front, batch_size - 1 - front[::-1]])


class Order:
    """The images of every update, as this process sees them.

    Args:
        images: number of training images.
        batch_size: images in one update, over all processes and passes.
        accumulate: passes of one update.
        rank, world: this process among how many; pass a of process r has slot a * world + r.
        seed: of the permutations.
        rollbacks: another number gives another order.
    """

    def __init__(
        self,
        images: int,
        batch_size: int,
        *,
        accumulate: int = 1,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        rollbacks: int = 0,
    ) -> None:
        self.images, self.batch_size, self.seed, self.rollbacks = images, batch_size, seed, rollbacks
        self.updates_per_epoch = images // batch_size
        slots = world * accumulate
        self.positions: Indices = np.stack(
            [slot_positions(a * world + rank, slots, batch_size) for a in range(accumulate)]
        )
        """(passes, images of a pass): this process's positions in any update."""

    def place(self, update: int) -> tuple[int, int]:
        """The epoch of an update, and which of the epoch's updates it is."""
        return divmod(update, self.updates_per_epoch)

    def table(self, epoch: int) -> Indices:
        """(updates of the epoch, passes, images of a pass): indices of images."""
        kept = self.updates_per_epoch * self.batch_size
        order = permutation(self.images, self.seed, epoch, self.rollbacks)[:kept]
        return order.reshape(self.updates_per_epoch, self.batch_size)[:, self.positions]
