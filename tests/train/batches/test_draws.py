import random

import numpy as np
import torch

from wellposed.train.order import Purpose, all_seeded, generator, numpy_seeded


def _state() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def _three() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_purposes_and_places_draw_different_numbers() -> None:
    places = [(0, Purpose.ORDER, 1), (1, Purpose.ORDER, 1), (0, Purpose.MIX, 1), (0, Purpose.ORDER, 2)]
    places += [(0, Purpose.ORDER, 1, 0), (0, Purpose.ORDER, 0, 1)]
    assert len({float(generator(*place).random()) for place in places}) == len(places)


def test_all_seeded_repeats_and_leaves_the_generators_as_they_were() -> None:
    before = _state()
    with all_seeded(5, Purpose.ITEM, 2, 3):
        first = _three()
    assert _state() == before
    _three()
    with all_seeded(5, Purpose.ITEM, 2, 3):
        assert _three() == first
    with all_seeded(5, Purpose.ITEM, 2, 4):
        assert all(a != b for a, b in zip(_three(), first, strict=True))


def test_generators_are_put_back_after_an_error() -> None:
    before = _state()
    for context in (all_seeded, numpy_seeded):
        try:
            with context(5, Purpose.ITEM, 0):
                _three() if context is all_seeded else np.random.rand()
                raise KeyError
        except KeyError:
            pass
        assert _state() == before
