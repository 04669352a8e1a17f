"""Randomness inside the model, such as dropout: a pure function of the seed, the update and the process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from wellposed.train.batches.draws import Purpose, sequence


def seed_update(seed: int, update: int, rank: int) -> None:
    """Seed the global generators of torch, on all devices, of numpy and of Python."""
    (word,) = sequence(seed, Purpose.MODEL, update, rank).generate_state(1)
    torch.default_generator.manual_seed(int(word))
    # torch.manual_seed would note, at every call anew, what to do should a GPU of another kind wake up.
    kinds: tuple[Any, ...] = (torch.cuda, torch.xpu)
    for kind in kinds:
        if kind.is_initialized():
            kind.manual_seed_all(int(word))
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(int(word))
    np.random.seed(word)
    random.seed(int(word))


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
