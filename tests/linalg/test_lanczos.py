"""Singular values from products alone, against spectra that are known by construction."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from reference.spectra import (
    clustered,
    generator,
    geometric,
    power_law,
    rank_deficient,
    repeated,
    values,
    with_singular_values,
)
from wellposed.linalg.lanczos import (
    ROUNDING,
    Bidiagonal,
    Estimates,
    SpectralDensity,
    extreme_singular_values,
    golub_kahan,
    random_unit,
    spectral_density,
)

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])

SPECTRA = {
    "geometric 1e1": geometric(80, 10),
    "geometric 1e3": geometric(80, 1e3),
    "power law": power_law(80, 1.5, largest=7.0),
    "flat": torch.linspace(2, 1, 80, dtype=torch.float64),
    "outlier": torch.cat((values(100.0), torch.linspace(2, 1, 79, dtype=torch.float64))),
    "small outlier": torch.cat((torch.linspace(2, 1, 79, dtype=torch.float64), values(0.01))),
    "clustered": clustered(geometric(40, 10), 1e-4),
}


def square(s: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return with_singular_values(s, len(s), len(s)).matrix().to(dtype)


def extremes(A: Tensor, **options: object):
    return extreme_singular_values(A.mv, A.mT.mv, A.shape[1], dtype=A.dtype, **options)


def bidiagonal(A: Tensor, steps: int, seed: int = 0) -> Bidiagonal:
    draw = generator(seed)
    start = random_unit(A.shape[1], like=A, generator=draw)
    *_, B = itertools.islice(golub_kahan(A.mv, A.mT.mv, start, generator=draw), steps)
    return B


def contains(part: Estimates, s: Tensor) -> bool:
    """Whether every error bar holds the value of its rank."""
    return bool(((part.low <= s) & (s <= part.high)).all())


@both_dtypes
@pytest.mark.parametrize("s", SPECTRA.values(), ids=SPECTRA.keys())
def test_both_ends_to_the_tolerance(s, dtype):
    found = extremes(square(s, dtype), k=3, tolerance=1e-2, max_steps=80)
    assert found.largest.converged.all()
    assert found.smallest.converged.all()
    torch.testing.assert_close(found.largest.values, s[:3], rtol=1e-2, atol=0)
    torch.testing.assert_close(found.smallest.values, s[-3:], rtol=1e-2, atol=0)
    assert contains(found.largest, s[:3])
    assert contains(found.smallest, s[-3:])


def test_kappa_of_a_million_in_float64():
    s = geometric(60, 1e6, largest=5.0)
    found = extremes(square(s), k=2, tolerance=1e-6, max_steps=60)
    torch.testing.assert_close(found.smallest.values, s[-2:], rtol=1e-6, atol=0)
    assert found.smallest.converged.all()


def test_kappa_of_a_million_in_float32_is_a_bound():
    # The smallest value is half of float32's rounding here: nobody could tell it.
    s = geometric(60, 1e6, largest=5.0)
    found = extremes(square(s, torch.float32), k=2, max_steps=60)
    assert found.largest.converged.all()
    assert not found.smallest.converged.any()
    assert contains(found.smallest, s[-2:])


@pytest.mark.parametrize("s", SPECTRA.values(), ids=SPECTRA.keys())
def test_stops_early_where_it_can_and_says_when_it_could_not(s):
    A = square(s)
    for steps in (5, 10, 20, 40):
        found = extremes(A, k=3, max_steps=steps)
        assert found.steps <= steps
        # Bounds at any number of steps, on the side that is promised.
        assert (found.largest.low <= s[:3]).all()
        assert (found.smallest.high >= s[-3:]).all()
        for part, true in ((found.largest, s[:3]), (found.smallest, s[-3:])):
            within = (part.values - true).abs() <= 1e-2 * true
            assert (within | ~part.converged).all()


def test_few_steps_are_not_enough_and_known_not_to_be():
    # The control of the tests above: without the flags one would take these for the answer.
    s = geometric(80, 1e3)
    found = extremes(square(s), k=1, max_steps=8)
    assert found.smallest.values[0] > 2 * s[-1]
    assert not found.smallest.converged[0]


def test_an_isolated_value_needs_few_of_many_steps():
    s = torch.cat((values(100.0), torch.linspace(1.1, 1, 499, dtype=torch.float64)))
    found = extremes(square(s), k=1, max_steps=300)
    assert found.steps <= 20
    torch.testing.assert_close(found.largest.values, s[:1], rtol=1e-8, atol=0)


@both_dtypes
@pytest.mark.parametrize("zeros", [1, 2, 30])
def test_vanishing_values_are_at_most_rounding(zeros, dtype):
    s = rank_deficient(torch.linspace(2, 1, 50, dtype=torch.float64), zeros)
    found = extremes(square(s, dtype), k=1, max_steps=200)
    assert not found.smallest.converged.any()
    assert found.smallest.low[-1] == 0
    assert found.smallest.high[-1] <= 2 * found.rounding
    assert found.rounding == pytest.approx(2 * ROUNDING * torch.finfo(dtype).eps, rel=1e-3)
    # It does not go on for what cannot be told.
    assert found.steps < 50


BREAKDOWNS = {
    "identity": torch.ones(12, dtype=torch.float64),
    "rank one": rank_deficient(values(3.0), 11),
    "zero": torch.zeros(12, dtype=torch.float64),
    "two values": repeated(values(2.0, 0.5), 6),
    "pairs": repeated(geometric(6, 100)),
}


@both_dtypes
@pytest.mark.parametrize("s", BREAKDOWNS.values(), ids=BREAKDOWNS.keys())
def test_goes_on_through_breakdowns_to_the_whole_spectrum(s, dtype):
    B = bidiagonal(square(s, dtype), steps=100)
    assert B.steps == 12
    torch.testing.assert_close(B.ritz().values, s, rtol=0, atol=30 * torch.finfo(dtype).eps * s.max().item())


@pytest.mark.parametrize("s", BREAKDOWNS.values(), ids=BREAKDOWNS.keys())
def test_the_ends_survive_breakdowns(s):
    found = extremes(square(s), k=1)
    torch.testing.assert_close(found.largest.values, s[:1], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(found.smallest.values, s[-1:], rtol=1e-10, atol=1e-14)
    assert found.largest.converged.item() == bool(s[0] > 0)
    assert found.smallest.converged.item() == bool(s[-1] > 0)


def test_a_diagonal_operator_breaks_down_exactly():
    # No rounding to hide behind: after two steps nothing new is left.
    A = torch.diag(values(2.0, 2.0, 2.0, 1.0, 1.0))
    assert bidiagonal(A, 5).above[1] == 0.0
    torch.testing.assert_close(bidiagonal(A, 5).ritz().values, values(2.0, 2.0, 2.0, 1.0, 1.0))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tiny_operators(size):
    s = geometric(size, 10, largest=3.0)
    found = extremes(square(s), k=size)
    assert found.steps == size
    torch.testing.assert_close(found.largest.values, s)
    torch.testing.assert_close(found.smallest.values, s)
    assert found.largest.converged.all()


def test_a_tall_operator_and_a_wide_one():
    s = geometric(10, 50)
    A = with_singular_values(s, 25, 10).matrix()
    torch.testing.assert_close(bidiagonal(A, 10).ritz().values, s)
    with pytest.raises(ValueError, match="got 10 x 25; swap apply"):
        bidiagonal(A.mT, 10)


@both_dtypes
def test_the_bases_stay_orthonormal_and_the_recurrence_holds(dtype):
    A = square(geometric(150, 1e6), dtype)
    V, U = [], []

    def apply(v: Tensor) -> Tensor:
        V.append(v)
        return A @ v

    def apply_adjoint(u: Tensor) -> Tensor:
        U.append(u)
        return A.mT @ u

    draw = generator(0)
    steps = golub_kahan(apply, apply_adjoint, random_unit(150, like=A, generator=draw), generator=draw)
    *_, B = itertools.islice(steps, 120)
    V, U = torch.stack(V[:120], 1), torch.stack(U, 1)
    eps, eye = torch.finfo(dtype).eps, torch.eye(120, dtype=dtype)
    assert (V.mT @ V - eye).abs().max() <= 10 * eps
    assert (U.mT @ U - eye).abs().max() <= 10 * eps
    matrix = torch.diag(values(*B.diagonal)) + torch.diag(values(*B.above[:-1]), 1)
    assert (A @ V - U @ matrix.to(dtype)).abs().max() <= 10 * eps


def test_a_seed_decides_and_the_global_generator_is_left_alone():
    A = square(geometric(80, 100))
    state = torch.random.get_rng_state()
    first, again, other = (extremes(A, k=1, max_steps=10, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.smallest.values, again.smallest.values)
    assert not torch.equal(first.smallest.values, other.smallest.values)
    density = spectral_density(A.mv, A.mT.mv, 80, dtype=A.dtype)
    assert len(density.nodes) == 4
    assert torch.equal(torch.random.get_rng_state(), state)


def test_values_scale_with_the_operator():
    A = square(geometric(40, 100))
    one, large = extremes(A, k=2), extremes(1e12 * A, k=2)
    torch.testing.assert_close(1e12 * one.smallest.values, large.smallest.values, rtol=1e-6, atol=0)
    assert one.steps == large.steps


def test_every_step_is_told():
    seen = []
    extremes(square(geometric(40, 1e5)), k=1, max_steps=17, on_step=lambda *at: seen.append(at))
    assert seen == [(step, 17) for step in range(1, 18)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be within 1 and the size 4 of the operator, got 0"),
        ({"k": 5}, "k must be within 1 and the size 4 of the operator, got 5"),
        ({"k": 3, "max_steps": 2}, "max_steps must be at least k = 3, got 2"),
        ({"k": 1, "tolerance": 0.0}, "tolerance must be positive, got 0.0"),
        ({"k": 1, "tolerance": math.nan}, "tolerance must be positive, got nan"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        extremes(torch.eye(4), **options)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_product_that_is_not_finite(bad):
    with pytest.raises(ValueError, match="expected finite values"):
        extremes(torch.full((4, 4), bad), k=1)


def test_quadrature_of_a_known_start():
    # To the end, nodes are the singular values and weights the squared components of the start.
    factors = with_singular_values(geometric(12, 100), 12, 12)
    A, draw = factors.matrix(), generator(3)
    start = random_unit(12, like=A, generator=draw)
    *_, B = golub_kahan(A.mv, A.mT.mv, start, generator=draw)
    nodes, _, weights = B.ritz()
    torch.testing.assert_close(nodes, factors.s)
    torch.testing.assert_close(weights, (factors.V.mT @ start).square())


def density_of(s: Tensor, **options: int) -> SpectralDensity:
    A = square(s)
    return spectral_density(A.mv, A.mT.mv, len(s), dtype=A.dtype, **options)


def test_even_moments_are_those_of_the_probes_exactly():
    # A rule of six nodes integrates polynomials in sigma^2 of degree 11: the same as with all nodes.
    s = geometric(40, 10)
    few, all_of_them = density_of(s, steps=6), density_of(s, steps=40)
    for power in (2, 8, 22):
        got, expected = (density.average(lambda s, p=power: s**p) for density in (few, all_of_them))
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=0)
    got, expected = (density.average(lambda s: s**26).value.item() for density in (few, all_of_them))
    assert got != pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("s", SPECTRA.values(), ids=SPECTRA.keys())
def test_moments_within_the_standard_error(s):
    density = density_of(s, probes=16, steps=20)
    mean, error = density.average(torch.square)
    assert (mean - s.square().mean()).abs() <= 4 * error
    assert density.average(torch.ones_like).value == pytest.approx(1)


@pytest.mark.parametrize("s", SPECTRA.values(), ids=SPECTRA.keys())
def test_the_share_below_lies_in_its_bracket(s):
    density = density_of(s, probes=16, steps=20)
    at = torch.linspace(0, 1.1 * s.max().item(), 60, dtype=torch.float64)
    true = (s <= at[:, None]).double().mean(1)
    low, high = density.bracket(at)
    share, error = density.cumulative(at)
    assert (low <= share + 1e-12).all()
    assert (share <= high + 1e-12).all()
    # Chance: each probe weighs 80 values at random.
    chance = 4 * (2 * true * (1 - true) / 80 / 16).sqrt() + 1e-9
    assert (low - chance <= true).all()
    assert (true <= high + chance).all()
    assert error.shape == at.shape
    assert share[-1] == pytest.approx(1)


def test_a_smooth_spectrum_is_seen_sharply():
    s = torch.linspace(3, 1, 500, dtype=torch.float64)
    density = density_of(s, probes=8, steps=40)
    at = torch.linspace(1, 3, 41, dtype=torch.float64)
    assert (density.cumulative(at).value - (at - 1) / 2).abs().max() <= 0.05
    # Eight nodes are coarse steps; halfway between them the curve is right.
    coarse = density_of(s, probes=8, steps=8).quantiles(21)
    torch.testing.assert_close(coarse, torch.linspace(3, 1, 21, dtype=torch.float64), rtol=0, atol=0.08)


def test_histogram_and_quantiles():
    s = rank_deficient(geometric(60, 10, largest=4.0), 20)
    density = density_of(s, probes=8, steps=30)
    share, error = density.histogram(torch.tensor([-1.0, 0.2, 1.0, 4.1]))
    assert share.sum() == pytest.approx(1)
    true = torch.stack([(s <= 0.2).sum(), ((s > 0.2) & (s <= 1)).sum(), (s > 1).sum()]) / 80
    assert ((share - true).abs() <= 4 * error + 0.02).all()
    curve = density.quantiles(50)
    assert (curve.diff() <= 0).all()
    assert curve[0] == pytest.approx(4, rel=1e-3)
    assert curve[-1] == pytest.approx(0, abs=0.01)


def test_density_of_the_identity():
    density = density_of(torch.ones(10, dtype=torch.float64))
    assert density.cumulative(1.1).value == pytest.approx(1)
    assert density.cumulative(0.9).value == pytest.approx(0)
    torch.testing.assert_close(density.quantiles(5), torch.ones(5, dtype=torch.float64))


def test_one_probe_has_no_standard_error():
    assert density_of(geometric(20, 10), probes=1).cumulative(0.5).standard_error.isnan()


def test_a_bidiagonalisation_is_used_again():
    A = square(geometric(60, 100))
    found = extremes(A, k=1, max_steps=15, seed=4)
    products = 0

    def apply(v: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return A @ v

    options = {"probes": 3, "steps": 15, "dtype": A.dtype, "seed": 4}
    reused = spectral_density(apply, A.mT.mv, 60, known=[found.bidiagonal], **options)
    assert products == 2 * 15
    afresh = spectral_density(A.mv, A.mT.mv, 60, **options)
    for got, expected in zip(reused.nodes, afresh.nodes, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("options", [{"probes": 0}, {"steps": 0}])
def test_wrong_density_options(options):
    with pytest.raises(ValueError, match="probes and steps must be positive"):
        density_of(geometric(4, 10), **options)


def test_zeros_that_repeat_make_no_false_claims() -> None:
    s = torch.cat((torch.linspace(4, 0.5, 30, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)))
    A = torch.diag(s)
    found = extreme_singular_values(A.mv, A.mT.mv, 36, k=4, dtype=torch.float64)
    assert not found.smallest.converged.any()
    assert (found.smallest.low == 0).all()
    lost = torch.eye(36, dtype=torch.float64)[-4:]
    known = extreme_singular_values(A.mv, A.mT.mv, 36, k=4, dtype=torch.float64, lost=lost)
    assert (known.smallest.high <= known.rounding).all()
    assert known.steps <= found.steps
    # Directions of which one is not lost prove nothing.
    wrong = torch.eye(36, dtype=torch.float64)[-7:-3]
    assert (
        extreme_singular_values(A.mv, A.mT.mv, 36, k=4, dtype=torch.float64, lost=wrong).steps == found.steps
    )
