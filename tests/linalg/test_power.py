"""The scalar map t -> t^eps with its straight line below the floor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.linalg import DEFAULT_FLOOR, power_gain

quick = settings(derandomize=True, deadline=None, max_examples=50)
fractions = st.floats(0.01, 1)
floors = st.floats(1e-10, 0.9)


def _power(t: float, eps: float, floor: float) -> float:
    value = torch.tensor(t, dtype=torch.float64)
    return float(value * power_gain(value, eps, floor))


@quick
@given(t=st.floats(0, 1), eps=fractions, floor=floors)
def test_exact_above_the_floor_and_linear_below(t, eps, floor):
    expected = t**eps if t >= floor else t * floor ** (eps - 1)
    assert _power(t, eps, floor) == pytest.approx(expected, rel=1e-14)


@quick
@given(t=st.floats(0, 1), step=st.floats(1e-6, 1), eps=fractions, floor=floors)
def test_monotone(t, step, eps, floor):
    assert _power(t, eps, floor) < _power(t + step, eps, floor)


@quick
@given(eps=fractions, floor=floors)
def test_continuous_at_the_floor(eps, floor):
    below, above = _power(floor * (1 - 1e-12), eps, floor), _power(floor * (1 + 1e-12), eps, floor)
    assert below == pytest.approx(above, rel=1e-11)


def test_gain_at_zero_is_the_steepest_slope():
    zero = torch.zeros((), dtype=torch.float64)
    assert power_gain(zero, 0.5).item() == pytest.approx(DEFAULT_FLOOR**-0.5)
