"""Random numbers that depend on nothing but what they are for.

Every draw starts from (seed, purpose, where), mixed by numpy's SeedSequence; ``where`` is an epoch, an update
or a position. So nothing depends on what was drawn before, and a resumed run needs no state of a generator.

>>> int(generator(0, Purpose.ORDER, 3).integers(100)) == int(generator(0, Purpose.ORDER, 3).integers(100))
True
"""

import contextlib
import random
from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import torch


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


@contextlib.contextmanager
def numpy_seeded(seed: int, purpose: Purpose, *where: int) -> Iterator[None]:
    """Numpy's global generator seeded, and afterwards as it was: for libraries that draw from it."""
    before = np.random.get_state()
    np.random.seed(sequence(seed, purpose, *where).generate_state(4))
    try:
        yield
    finally:
        np.random.set_state(before)


@contextlib.contextmanager
def all_seeded(seed: int, purpose: Purpose, *where: int) -> Iterator[None]:
    """The global generators of Python, numpy and torch's CPU seeded, and afterwards as they were."""
    python_words, torch_words = sequence(seed, purpose, *where).generate_state(2, np.uint64)
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
