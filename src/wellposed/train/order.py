"""Which images an update takes, and random numbers that depend on nothing but what they are for.

Every draw starts from (seed, purpose, where), mixed by numpy's SeedSequence; ``where`` is an epoch, an update
or a position. So nothing depends on what was drawn before, and a resumed run needs no state of a generator.

>>> int(generator(0, Purpose.ORDER, 3).integers(100)) == int(generator(0, Purpose.ORDER, 3).integers(100))
True

Epoch e visits the images in a permutation drawn from (seed, e); images that fill no whole batch
are skipped. The B positions of an update are cut into slots, one for each process and pass.

A slot takes its positions from both ends of the batch. timm's Mixup pairs an image with the one at the
mirrored position; with such slots these are the same two images however many slots there are:

>>> slot_positions(0, 1, 8).tolist()
[0, 1, 2, 3, 4, 5, 6, 7]
>>> slot_positions(0, 2, 8).tolist(), slot_positions(1, 2, 8).tolist()
([0, 1, 6, 7], [2, 3, 4, 5])
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class Purpose(IntEnum):
    """What is drawn; two purposes never share numbers. A value, once used, keeps its meaning."""

    ORDER = 0
    AUGMENT = 1
    ITEM = 2
    MIX = 3
    NOISE = 4
    MODEL = 5
    MASK = 6
    TEST_MASK = 7


def sequence(seed: int, purpose: Purpose, *where: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(int(purpose), *where))


def generator(seed: int, purpose: Purpose, *where: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(sequence(seed, purpose, *where)))


@contextmanager
def numpy_seeded(seed: int, purpose: Purpose, *where: int) -> Iterator[None]:
    """Numpy's global generator seeded, and afterwards as it was: for libraries that draw from it."""
    before = np.random.get_state()
    np.random.seed(sequence(seed, purpose, *where).generate_state(4))
    try:
        yield
    finally:
        np.random.set_state(before)


@contextmanager
def all_seeded(seed: int, purpose: Purpose, *where: int) -> Iterator[None]:
    """The global generators of Python, numpy and torch's CPU seeded, and afterwards as they were."""
    python_words, torch_words = sequence(seed, purpose, *where).generate_state(2, np.uint64)
    # Not by fork_rng: this is done for every image that a worker reads.
    python_before, torch_before = random.getstate(), torch.get_rng_state()
    random.seed(int(python_words))
    # torch.manual_seed would reseed the accelerators too.
    torch.default_generator.manual_seed(int(torch_words >> np.uint64(1)))
    try:
        with numpy_seeded(seed, purpose, *where):
            yield
    finally:
        random.setstate(python_before)
        torch.set_rng_state(torch_before)


@contextmanager
def generators_kept() -> Iterator[None]:
    """The caller's global generators are afterwards as they were."""
    python_before, numpy_before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python_before)
            np.random.set_state(numpy_before)


def seed_update(seed: int, update: int, rank: int) -> None:
    """Seed the global generators of torch, on all devices, of numpy and of Python.

    Randomness inside the model, such as dropout, then depends on the seed, the update and the process alone.
    """
    (word,) = sequence(seed, Purpose.MODEL, update, rank).generate_state(1)
    torch.default_generator.manual_seed(int(word))
    # torch.manual_seed would note, at every call again, what to do should a GPU of another kind wake up.
    kinds: tuple[Any, ...] = (torch.cuda, torch.xpu)
    for kind in kinds:
        if kind.is_initialized():
            kind.manual_seed_all(int(word))
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(int(word))
    np.random.seed(word)
    random.seed(int(word))


def permutation(images: int, seed: int, epoch: int) -> Indices:
    """The order in which an epoch visits the images."""
    # The 0 is of earlier versions, whose runs resume in the same order.
    return generator(seed, Purpose.ORDER, epoch, 0).permutation(images)


def slot_positions(slot: int, slots: int, batch_size: int) -> Indices:
    """Positions in the batch, ascending; contiguous ones where a slot has no two equal ends."""
    size = batch_size // slots
    if size % 2:
        return np.arange(slot * size, (slot + 1) * size)
    half = size // 2
    front = np.arange(slot * half, (slot + 1) * half)
    return np.concatenate([front, batch_size - 1 - front[::-1]])


class Key(NamedTuple):
    """Which image, and where it stands; all that a worker needs to know."""

    epoch: int
    position: int
    image: int


class Pass(NamedTuple):
    """The images (b,) of one pass of one process, and their positions (b,) in the epoch."""

    epoch: int
    positions: Indices
    images: Indices

    @property
    def keys(self) -> list[Key]:
        pairs = zip(self.positions.tolist(), self.images.tolist(), strict=True)
        return [Key(self.epoch, position, image) for position, image in pairs]


class Order:
    """The images of every update, as this process sees them.

    Args:
        images: number of training images.
        batch_size: images in one update, over all processes and passes.
        accumulate: passes of one update.
        rank, world: this process among how many; pass a of process r has slot a * world + r.
        seed: of the permutations.
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
    ) -> None:
        self.images, self.batch_size, self.seed = images, batch_size, seed
        self.updates_per_epoch = images // batch_size
        slots = world * accumulate
        self.positions: Indices = np.stack(
            [slot_positions(a * world + rank, slots, batch_size) for a in range(accumulate)]
        )
        """(passes, images of a pass): this process's positions in any update."""
        self._newest: tuple[int, Indices] | None = None

    def place(self, update: int) -> tuple[int, int]:
        """The epoch of an update, and which of the epoch's updates it is."""
        return divmod(update, self.updates_per_epoch)

    def table(self, epoch: int) -> Indices:
        """(updates of the epoch, passes, images of a pass): indices of images."""
        if self._newest is None or self._newest[0] != epoch:
            kept = self.updates_per_epoch * self.batch_size
            order = permutation(self.images, self.seed, epoch)[:kept]
            self._newest = epoch, order.reshape(-1, self.batch_size)[:, self.positions]
        return self._newest[1]

    def passes(self, update: int) -> list[Pass]:
        """What this process does in an update."""
        epoch, step = self.place(update)
        positions = self.positions + step * self.batch_size
        return [Pass(epoch, *each) for each in zip(positions, self.table(epoch)[step], strict=True)]
