"""The fitted chains against the power itself, far below the floor and above 1 too."""

import subprocess
import sys
import time

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from wellposed.linalg.spectral_fit import (
    LARGEST_DELTA,
    MARGIN,
    REACH,
    Fit,
    _fit_power,
    family_table,
    fit_family,
    fit_power,
    series_at,
)

FLOORS = (1e-5, 1e-4, 1e-3, 1 / 300, 1e-2)
POWERS = (0.0, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999)
TOLERANCE = 7e-4

quick = settings(derandomize=True, deadline=None, max_examples=25)
over_floors = pytest.mark.parametrize("floor", FLOORS)
over_powers = pytest.mark.parametrize("eps", POWERS)


def evenly_in_log(low: float, high: float, count: int = 10_001) -> Tensor:
    return torch.logspace(*torch.tensor([low, high]).double().log10().tolist(), count, dtype=torch.float64)


def chain_gain(x: Tensor, coefficients: Tensor, steps: int, delta: float) -> Tensor:
    """The definition, one member at a time."""
    b = (1 + delta) * x / MARGIN
    gain = coefficients[0] + coefficients[1] * b
    for k in range(steps):
        b = (1 + delta) * (2 * b - b**2)
        gain = gain + coefficients[k + 2] * b
    return gain


def worst(gain: Tensor, x: Tensor, eps: float) -> float:
    return (gain * x ** ((1 - eps) / 2) - 1).abs().max().item()


def assert_graceful(gain: Tensor, sigma: Tensor, floor: float, eps: float, error: float) -> None:
    """How the gain of sigma^2, with sigma ascending from far below the floor to 1, must end at zero."""
    floor /= REACH
    below = gain[sigma < floor]
    assert (below.diff() <= 1e-12 * gain[0]).all()
    assert (gain <= gain[0] * (1 + 1e-12)).all()
    # Below the floor the gain goes on to at most about twice what it is there (seen: 2.20).
    assert floor ** (eps - 1) * (1 - error) <= gain[0] <= 2.3 * floor ** (eps - 1)
    grayed = sigma * gain
    assert (grayed[sigma < floor].diff() > 0).all()
    if eps >= 0.3:
        assert (grayed.diff() > 0).all()
    else:  # flat above the floor, up to the error
        assert (grayed.cummax(0).values - grayed).max() <= 2 * error


# One power


@pytest.mark.every_value
@over_floors
@over_powers
def test_meets_the_tolerance_and_says_how_well(floor: float, eps: float) -> None:
    fit = fit_power(eps, floor)
    x = evenly_in_log(floor**2, 1)
    seen = worst(
        chain_gain(x, torch.tensor(fit.coefficients, dtype=torch.float64), fit.steps, fit.delta), x, eps
    )
    assert seen <= 1.01 * fit.error
    assert fit.error <= TOLERANCE
    torch.testing.assert_close(worst(fit.gain(x), x, eps), seen, atol=1e-10, rtol=0)


@pytest.mark.every_value
@over_floors
@over_powers
def test_below_the_floor_it_levels_off(floor: float, eps: float) -> None:
    fit = fit_power(eps, floor)
    sigma = evenly_in_log(1e-4 * floor, 1)
    assert_graceful(fit.gain(sigma**2), sigma, floor, eps, fit.error)
    assert fit.gain(torch.zeros(())).item() == fit.coefficients[0]
    # Linear at the end: the gain changes by a part of it that shrinks with x.
    assert fit.gain(sigma[:1] ** 2).item() == pytest.approx(fit.coefficients[0], rel=1e-6)


@pytest.mark.every_value
@over_floors
@over_powers
def test_bears_a_largest_eigenvalue_that_was_found_too_small(floor: float, eps: float) -> None:
    fit = fit_power(eps, floor)
    x = torch.linspace(1, MARGIN, 1001, dtype=torch.float64)
    assert worst(fit.gain(x), x, eps) <= 1.2 * TOLERANCE
    gain = fit.gain(torch.linspace(MARGIN, 1.3, 1001, dtype=torch.float64))
    assert (gain > 0).all()
    assert (gain <= fit.coefficients[0]).all()
    assert fit.delta <= LARGEST_DELTA


@pytest.mark.parametrize(
    ("floor", "steps_half", "steps_nine_tenths"),
    [(1e-2, 11, 9), (1 / 300, 13, 12), (1e-3, 16, 14), (1e-4, 21, 18), (1e-5, 26, 23)],
)
def test_as_short_as_known(floor: float, steps_half: int, steps_nine_tenths: int) -> None:
    """Against a slow search, over a fine grid of delta with many rounds, that allowed 1e-3."""
    assert fit_power(0.5, floor * REACH, 1e-3).steps <= steps_half
    assert fit_power(0.9, floor * REACH, 1e-3).steps <= steps_nine_tenths


@quick
@given(
    st.floats(0, 1), st.floats(-6, -0.05).map(lambda power: 10**power), st.sampled_from([2e-4, 7e-4, 1e-2])
)
@example(eps=0.999, floor=1e-5, tolerance=7e-4)
@example(eps=1 - 1e-12, floor=1e-4, tolerance=7e-4)
@example(eps=1e-300, floor=1e-6, tolerance=2e-4)
@example(eps=0.5, floor=1 - 1e-9, tolerance=7e-4)
def test_holds_for_any_arguments(eps: float, floor: float, tolerance: float) -> None:
    fit = fit_power(eps, floor, tolerance)
    x = evenly_in_log(floor**2, 1, 5001)
    assert worst(fit.gain(x), x, eps) <= 1.01 * tolerance
    assert len(fit.coefficients) == fit.steps + 2
    assert max(fit.coefficients[1:]) <= 0  # no step up: it levels off


@over_floors
def test_power_one_leaves_everything(floor: float) -> None:
    fit = fit_power(1.0, floor)
    assert fit.steps == 1
    assert worst(fit.gain(evenly_in_log(1e-20, 1.3)), torch.ones(1), 1.0) < 1e-6


def test_is_quick_and_made_once() -> None:
    fit_power(0.61)  # torch's own first use
    _fit_power.cache_clear()
    begun = time.process_time()
    first = fit_power(0.62)
    assert time.process_time() - begun < 1  # seen: 0.06 s
    assert fit_power(0.62) is first
    _fit_power.cache_clear()
    assert fit_power(0.62) == first


def test_takes_no_notice_of_the_callers_modes() -> None:
    expected = fit_power(0.63, 1e-2)
    _fit_power.cache_clear()
    with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu"):
        found = fit_power(0.63, 1e-2)
    assert found == expected
    assert all(type(value) is float for value in found.coefficients)


@pytest.mark.slow
def test_import_fits_nothing() -> None:
    code = (
        "import wellposed.linalg.spectral_fit as m; "
        "assert m._fit_power.cache_info().misses == m._fit_family.cache_info().misses == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Every power with one chain


@over_floors
def test_family_meets_the_tolerance_at_every_power(floor: float) -> None:
    family = fit_family(floor)
    assert family.error <= TOLERANCE
    x = evenly_in_log(floor**2, 1, 5001)
    powers = torch.cat([torch.linspace(0, 1, 101), torch.tensor([1e-6, 0.999, 1 - 1e-6])]).double()
    coefficients = family.coefficients(powers)
    assert coefficients.shape == (len(powers), family.steps + 2)
    seen = [
        worst(chain_gain(x, v, family.steps, family.delta), x, eps.item())
        for v, eps in zip(coefficients, powers, strict=True)
    ]
    assert max(seen) <= 1.02 * family.error


@over_floors
def test_family_is_no_longer_than_its_hardest_power(floor: float) -> None:
    assert fit_family(floor).steps <= fit_power(0.0, floor).steps + 1


@pytest.mark.every_value
@pytest.mark.parametrize("eps", [0.0, 0.3, 0.77, 0.99])
@over_floors
def test_family_levels_off_below_the_floor(floor: float, eps: float) -> None:
    family = fit_family(floor)
    v = family.coefficients(torch.tensor(eps, dtype=torch.float64))
    sigma = evenly_in_log(1e-4 * floor, 1)
    assert_graceful(chain_gain(sigma**2, v, family.steps, family.delta), sigma, floor, eps, family.error)


def test_family_takes_any_shape_and_keeps_within_range() -> None:
    family = fit_family(1e-2)
    powers = torch.tensor([[0.0, 0.25, 0.5], [0.75, 1.0, 0.1]], requires_grad=True)
    together = family.coefficients(powers)
    assert together.shape == (2, 3, family.steps + 2)
    assert together.dtype == torch.float64
    assert not together.requires_grad
    torch.testing.assert_close(together[0, 1], family.coefficients(torch.tensor(0.25)))
    outside, ends = torch.tensor([-1.0, 2.0]), torch.tensor([0.0, 1.0])
    assert torch.equal(family.coefficients(outside), family.coefficients(ends))


def test_family_first_used_in_inference_serves_training() -> None:
    family = fit_family(2e-2)
    with torch.inference_mode():
        family.coefficients(torch.tensor(0.5))
    assert not family_table(family, torch.device("cpu")).is_inference()


@torch.compiler.assume_constant_result
def constant_fit(eps: float) -> Fit:
    return fit_power(eps, 1e-2)


@torch.compiler.assume_constant_result
def constant_table(device: torch.device) -> Tensor:
    return family_table(fit_family(1e-2), device)


def test_serve_as_constants_of_compiled_code() -> None:
    def weighted(x: Tensor, eps: Tensor) -> Tensor:
        fit = constant_fit(0.5)
        return x * fit.delta + sum(fit.coefficients) + series_at(eps, constant_table(eps.device)).sum()

    x, eps = torch.arange(3.0), torch.tensor([0.2, 0.8])
    compiled = torch.compile(weighted, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, eps), weighted(x, eps))


# Errors


@pytest.mark.parametrize("eps", [-0.1, 1.5, float("nan")])
def test_power_out_of_range(eps: float) -> None:
    with pytest.raises(ValueError, match=r"eps must be in \[0, 1\], got"):
        fit_power(eps)


@pytest.mark.parametrize("floor", [0.0, 1e-7, 1.0, 2.0, -1e-4, float("nan")])
def test_floor_out_of_range(floor: float) -> None:
    with pytest.raises(ValueError, match=r"floor must be in \[1e-06, 1\), got"):
        fit_power(0.5, floor)
    with pytest.raises(ValueError, match=r"floor must be in \[1e-06, 1\), got"):
        fit_family(floor)


@pytest.mark.parametrize("tolerance", [0.0, -1.0, float("nan")])
def test_tolerance_is_positive(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance must be positive, got"):
        fit_power(0.5, tolerance=tolerance)


def test_unreachable_tolerance_names_a_reachable_one() -> None:
    with pytest.raises(
        ValueError, match=r"tolerance must be at least \S+ for floor 0.0001, got 1e-09"
    ) as raised:
        fit_power(0.0, tolerance=1e-9)
    reachable = float(str(raised.value).split("at least ")[1].split()[0])
    assert fit_power(0.0, tolerance=1.05 * reachable).error <= 1.05 * reachable
    times = float(str(raised.value).split("raise the tolerance ")[1].split()[0])
    assert fit_power(0.0, tolerance=times * 1e-9).error <= times * 1e-9
    with pytest.raises(ValueError, match="tolerance must be at least"):
        fit_family(tolerance=1e-9)
