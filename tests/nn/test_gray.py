"""The values of graying in every dtype, against matrices whose factors are known."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from reference.spectra import (
    Factored,
    clustered,
    generator,
    geometric,
    gray_by_dct,
    gray_by_svd,
    power_law,
    rank_deficient,
    repeated,
    values,
    with_singular_values,
)
from wellposed.linalg import spectral_plan
from wellposed.nn import TokenGraying
from wellposed.nn.functional import gray


class Bound(NamedTuple):
    """Largest errors, in units of the dtype's eps."""

    singular_value: float
    matrix: float


# float64 and float32 compute in themselves. An SVD finds s_i up to a small multiple of eps * s_max, so:
#   |g_i' - g_i| <= singular_value * eps * (s_max / s_i) * g_i
# and graying can stretch a perturbation by the gain of the smallest value, kappa^(1 - e):
#   |Y' - Y| <= matrix * eps * kappa^(1 - e) * g_max, for every element, e being the power.
# The half types compute in float32 and round the result once, an error of eps / 2 times the element,
# which is at most g_max. They are compared with float64 graying of the rounded input:
#   |Y' - Y| <= matrix * eps * g_max and |g_i' - g_i| <= singular_value * eps * g_max.
# The comments say what was seen; the bounds leave a factor of two to three to other LAPACKs.
WIDE_BOUNDS = {
    torch.float64: Bound(singular_value=40, matrix=40),  # 13 and 15, the reference's own rounding included
    torch.float32: Bound(singular_value=30, matrix=10),  # 9 and 4.1
}
HALF_BOUNDS = {
    torch.float16: Bound(singular_value=1.5, matrix=1),  # 0.61 and 0.33
    torch.bfloat16: Bound(singular_value=1.5, matrix=1),  # 0.37 and 0.33
}

# What "spectral" gives is right to its tolerance, which is in tests/linalg/test_spectral_power.py.
METHODS = ("svd",)
EPSILONS = (0.1, 0.5, 0.7, 0.95)
SHAPES = {
    "wide": (8, 13),
    "tall": (13, 8),
    "square": (9, 9),
    "one token": (1, 7),
    "one channel": (7, 1),
}
BATCHES = ((), (3,), (2, 3))
LARGEST = 3.0

over_methods = pytest.mark.parametrize("method", METHODS)
over_eps = pytest.mark.parametrize("eps", EPSILONS)
over_shapes = pytest.mark.parametrize(("tokens", "channels"), SHAPES.values(), ids=SHAPES.keys())
over_kappas = pytest.mark.parametrize("kappa", [1, 10, 1e3, 1e6])
over_batches = pytest.mark.parametrize("batch", BATCHES)
over_wide_dtypes = pytest.mark.parametrize("dtype", WIDE_BOUNDS.keys(), ids=str)
over_half_dtypes = pytest.mark.parametrize("dtype", HALF_BOUNDS.keys(), ids=str)
both_scales = pytest.mark.parametrize("rescale", [True, False], ids=["rescaled", "literal"])


def assert_wide_result(actual: Tensor, factors: Factored, eps: float, rescale: bool) -> None:
    unit, bound = torch.finfo(actual.dtype).eps, WIDE_BOUNDS[actual.dtype]
    relative = factors.s / factors.s[0]
    expected = factors.grayed(eps, rescale=rescale)

    errors = (torch.linalg.svdvals(actual.double()) - expected.s).abs()
    assert (errors <= bound.singular_value * unit * expected.s / relative).all()

    stretch = relative[-1] ** (eps - 1)
    assert (actual - expected.matrix()).abs().max() <= bound.matrix * unit * stretch * expected.s[0]


def assert_half_result(actual: Tensor, expected: Tensor) -> None:
    unit, bound = torch.finfo(actual.dtype).eps, HALF_BOUNDS[actual.dtype]
    g, g_expected = torch.linalg.svdvals(actual.double()), torch.linalg.svdvals(expected)
    largest = g_expected[..., :1]
    assert ((g - g_expected).abs() <= bound.singular_value * unit * largest).all()
    assert ((actual - expected).abs() <= bound.matrix * unit * largest[..., None]).all()


@pytest.mark.pairwise
@over_methods
@over_wide_dtypes
@over_kappas
@over_shapes
@over_batches
def test_prescribed_spectrum(method, dtype, kappa, tokens, channels, batch):
    factors = with_singular_values(geometric(min(tokens, channels), kappa, LARGEST), tokens, channels, batch)
    x = factors.matrix().to(dtype)
    for eps in EPSILONS:
        for rescale in (True, False):
            actual = gray(x, eps, method, rescale=rescale)
            assert (actual.dtype, actual.shape) == (dtype, x.shape)
            assert_wide_result(actual, factors, eps, rescale)


@pytest.mark.pairwise
@over_methods
@over_half_dtypes
@over_kappas
@over_shapes
@over_batches
def test_prescribed_spectrum_in_half_precision(method, dtype, kappa, tokens, channels, batch):
    factors = with_singular_values(geometric(min(tokens, channels), kappa, LARGEST), tokens, channels, batch)
    x = factors.matrix().to(dtype)
    for eps in EPSILONS:
        for rescale in (True, False):
            actual = gray(x, eps, method, rescale=rescale)
            assert (actual.dtype, actual.shape) == (dtype, x.shape)
            assert_half_result(actual, gray_by_svd(x, eps, rescale=rescale))


@over_methods
@over_wide_dtypes
@over_kappas
def test_prescribed_spectrum_of_many_tokens(method, dtype, kappa):
    factors = with_singular_values(geometric(49, kappa, LARGEST), 49, 96)
    for eps in EPSILONS:
        assert_wide_result(gray(factors.matrix().to(dtype), eps, method), factors, eps, rescale=True)


SPECTRA = {
    "power law": power_law(8, 2, LARGEST),
    "repeated": repeated(geometric(4, 100, LARGEST)),
    "clustered": clustered(geometric(4, 100, LARGEST), 1e-7),
    "all equal": values(*[LARGEST] * 8),
}


@pytest.mark.pairwise
@over_methods
@over_wide_dtypes
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize(("tokens", "channels"), [(8, 13), (13, 8), (8, 8)])
def test_difficult_spectrum(method, dtype, name, tokens, channels):
    factors = with_singular_values(SPECTRA[name], tokens, channels)
    for eps in EPSILONS:
        for rescale in (True, False):
            actual = gray(factors.matrix().to(dtype), eps, method, rescale=rescale)
            assert_wide_result(actual, factors, eps, rescale)


@over_methods
@both_scales
@pytest.mark.parametrize(("tokens", "channels"), [(8, 13), (13, 8), (8, 8)])
def test_values_that_vanish_stay_small(method, tokens, channels, rescale):
    factors = with_singular_values(rank_deficient(geometric(5, 100, LARGEST), zeros=3), tokens, channels)
    actual = gray(factors.matrix(), 0.5, method, rescale=rescale)
    # Zero is 1e-16 after rounding, and the slope below the floor is 1e-7^(-1/2) = 3e3.
    torch.testing.assert_close(actual, factors.grayed(0.5, rescale=rescale).matrix(), rtol=0, atol=1e-11)


@over_methods
def test_literal_form_makes_the_largest_value_one(method):
    factors = with_singular_values(geometric(8, 50, LARGEST), 8, 13)
    actual = torch.linalg.svdvals(gray(factors.matrix(), 0.6, method, rescale=False))
    torch.testing.assert_close(actual, (factors.s / LARGEST) ** 0.6, rtol=1e-12, atol=0)


@over_methods
def test_values_below_the_floor_are_scaled_linearly(method):
    factors = with_singular_values(values(2.0, 1.0, 0.2, 0.02), 4, 6)
    actual = torch.linalg.svdvals(gray(factors.matrix(), 0.5, method, floor=0.3))
    torch.testing.assert_close(actual[2:], 0.3**-0.5 * factors.s[2:], rtol=1e-13, atol=0)


# A DCT coefficient is off by a small multiple of eps * c_max, and the slope of the power at the smallest
# coefficients stretches that. Largest error over largest element, in units of the dtype's eps, for each
# power. Seen in float64 15, 7, 5, 5; in float32 4, 2, 2, 2.
DCT_BOUNDS = {0.1: 45, 0.5: 20, 0.7: 15, 0.95: 15}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error over the largest element, matrix by matrix, in units of eps."""
    error = (actual - expected).abs().amax((-2, -1)) / expected.abs().amax((-2, -1))
    return error.max().item() / torch.finfo(actual.dtype).eps


@pytest.mark.pairwise
@over_wide_dtypes
@both_scales
@over_eps
@over_batches
@over_shapes
def test_dct_equals_scipy(dtype, tokens, channels, batch, eps, rescale):
    x = torch.randn(*batch, tokens, channels, dtype=torch.float64, generator=generator(1)).to(dtype)
    actual = gray(x, eps, "dct", rescale=rescale)
    assert (actual.dtype, actual.shape) == (dtype, x.shape)
    assert relative_error(actual, gray_by_dct(x, eps, rescale=rescale)) <= DCT_BOUNDS[eps]


@pytest.mark.pairwise
@over_half_dtypes
@both_scales
@over_batches
@over_shapes
def test_dct_in_half_precision_equals_scipy(dtype, tokens, channels, batch, rescale):
    x = torch.randn(*batch, tokens, channels, dtype=torch.float64, generator=generator(1)).to(dtype)
    actual = gray(x, 0.7, "dct", rescale=rescale)
    assert (actual.dtype, actual.shape) == (dtype, x.shape)
    # The one rounding of the result is half a unit.
    assert relative_error(actual, gray_by_dct(x, 0.7, rescale=rescale)) <= 0.6


@both_scales
def test_dct_coefficients_below_a_large_floor(rescale):
    x = torch.randn(6, 9, dtype=torch.float64, generator=generator(1))
    expected = gray_by_dct(x, 0.5, rescale=rescale, floor=0.3)
    torch.testing.assert_close(gray(x, 0.5, "dct", rescale=rescale, floor=0.3), expected)


@pytest.mark.parametrize(("tokens", "channels"), SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("kappa", [1, 10, 300])
def test_spectral_is_svd_to_its_tolerance(tokens, channels, kappa):
    factors = with_singular_values(geometric(min(tokens, channels), kappa, LARGEST), tokens, channels)
    x = factors.matrix().float()
    for eps in EPSILONS:
        for rescale in (True, False):
            g = torch.linalg.svdvals(gray(x, eps, "spectral", rescale=rescale))
            expected = torch.linalg.svdvals(gray(x, eps, "svd", rescale=rescale))
            torch.testing.assert_close(g, expected, rtol=spectral_plan(x).error, atol=0)


@pytest.mark.parametrize("method", ["svd", "spectral", "dct"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tokens_given_are_left_alone(method, dtype):
    x = torch.randn(2, 5, 7, generator=generator(1)).to(dtype)
    before = x.clone()
    gray(x, 0.5, method)
    assert torch.equal(x, before)


@pytest.mark.parametrize("method", ["svd", "spectral", "dct"])
def test_module_equals_function(method):
    x = torch.randn(2, 5, 7, generator=generator(1))
    settings = {"rescale": False, "floor": 1e-2}
    assert torch.equal(TokenGraying(0.6, method, **settings)(x), gray(x, 0.6, method, **settings))


@pytest.mark.parametrize(("method", "eps"), [("svd", 0.7), ("spectral", 0.7), ("dct", 0.95)])
def test_module_takes_the_choice_of_the_paper(method, eps):
    module = TokenGraying(method=method)
    x = torch.randn(2, 5, 7, generator=generator(1))
    assert torch.equal(module(x), gray(x, eps, method))
    assert torch.equal(module(x), gray(x, method=method))
    assert not module.state_dict()


@pytest.mark.parametrize("method", ["svd", "spectral", "dct"])
def test_an_eps_of_one_number_may_have_another_dtype(method: str) -> None:
    x = torch.randn(2, 4, 5, generator=generator(0))
    given = gray(x, torch.tensor([0.7], dtype=torch.float64), method)
    torch.testing.assert_close(given, gray(x, torch.tensor([0.7]), method), rtol=1e-4, atol=1e-5)


def test_energy_has_the_norm_of_graying_and_the_spectrum_of_the_tokens():
    x = torch.randn(3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[2] = 0
    scaled, grayed = gray(x, 0.5, "energy"), gray(x, 0.5, "svd")
    norms = [torch.linalg.matrix_norm(each[:2]) for each in (scaled, grayed)]
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    kappas = [torch.linalg.cond(each[:2]) for each in (scaled, x)]
    torch.testing.assert_close(*kappas, rtol=1e-9, atol=0)
    assert torch.equal(scaled[2], x[2])
