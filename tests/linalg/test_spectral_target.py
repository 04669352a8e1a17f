"""A chosen condition number, and tokens conditioned to at most 2 (arXiv 2505.12789)."""

import math

import pytest
import torch

from reference.spectra import generator, geometric, power_law, rank_deficient, repeated, with_singular_values
from wellposed.linalg import power_for_kappa, spectral_condition
from wellposed.nn import TokenGraying
from wellposed.nn.functional import gray

SPECTRA = {
    "geometric": lambda kappa: geometric(40, kappa),
    "power law": lambda kappa: power_law(40, math.log(kappa) / math.log(40)),
    "repeated": lambda kappa: repeated(geometric(20, kappa)),
}
over_spectra = pytest.mark.parametrize("name", SPECTRA)
SHAPES = [(40, 60), (60, 40)]


def tokens(name: str, kappa: float, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return with_singular_values(SPECTRA[name](kappa), *shape, batch=(2,)).matrix().to(dtype)


@pytest.mark.pairwise
@over_spectra
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kappa", [20, 300, 9e3])
def test_kappa_becomes_the_target(name, shape, dtype, kappa):
    x = tokens(name, kappa, shape, dtype)
    for target in (1.5, 10.0):
        got = torch.linalg.cond(gray(x, target_kappa=target).double())
        torch.testing.assert_close(got, torch.full_like(got, target), rtol=1e-2, atol=0)  # seen 2e-3


@over_spectra
def test_kappa_below_the_target_stays(name):
    x = tokens(name, 5, (40, 60), torch.float32)
    assert torch.equal(power_for_kappa(x, 10, floor=1e-4), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(gray(x, target_kappa=10), x, rtol=0, atol=2e-3 * x.abs().max().item())


def test_each_image_has_its_own_power():
    x = torch.stack([tokens("geometric", kappa, (40, 60), torch.float64)[0] for kappa in (100, 1e4)])
    powers = power_for_kappa(x.reshape(2, 1, 40, 60), 10, floor=1e-5)
    torch.testing.assert_close(powers, torch.tensor([[0.5], [0.25]]).double(), rtol=1e-3, atol=0)


def test_rank_deficient_zero_and_bad_images():
    missing = with_singular_values(rank_deficient(geometric(30, 50), zeros=10), 40, 60).matrix()
    x = torch.stack([missing, torch.zeros(40, 60).double(), torch.full((40, 60), torch.nan).double()])
    powers = power_for_kappa(x, 10, floor=1e-4)
    torch.testing.assert_close(powers, torch.tensor([0.25, 1.0, 1.0]).double())
    y = gray(x, target_kappa=10)
    s = torch.linalg.svdvals(y[0])
    assert s[0] / s[29] < 10
    assert not y[1].any()
    assert y[2].isnan().all()


def test_gradient_takes_the_power_for_a_constant():
    x = tokens("geometric", 200, (40, 60), torch.float64).requires_grad_()
    upstream = torch.randn(x.shape, dtype=torch.float64, generator=generator(1))
    (actual,) = torch.autograd.grad(gray(x, target_kappa=10), x, upstream)
    powers = power_for_kappa(x, 10, floor=1e-4)
    assert not powers.requires_grad
    (expected,) = torch.autograd.grad(gray(x, powers), x, upstream)
    torch.testing.assert_close(actual, expected)


@pytest.mark.pairwise
@over_spectra
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kappa", [1.5, 20, 300, 1e4])
def test_condition_makes_kappa_at_most_two(name, shape, kappa):
    x = tokens(name, kappa, shape, torch.float64)
    s, y = torch.linalg.svdvals(x), spectral_condition(x)
    torch.testing.assert_close(torch.linalg.svdvals(y), s + s[:, :1], rtol=1e-3, atol=0)
    assert torch.linalg.cond(y).max() <= 2 * (1 + 1e-3)
    assert torch.equal(gray(x, method="condition"), y)


@pytest.mark.parametrize("kappa", [20, 300])
def test_condition_in_float32(kappa):
    x = tokens("geometric", kappa, (40, 60), torch.float32)
    assert torch.linalg.cond(gray(x, method="condition").double()).max() <= 2 * (1 + 2e-3)


def test_condition_adds_the_orthogonal_factor():
    x = tokens("geometric", 50, (40, 60), torch.float64)
    U, s, Vh = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(spectral_condition(x), x + s[:, :1, None] * U @ Vh, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps": 0.5, "method": "condition"}, "eps must be None with method='condition'"),
        ({"method": "condition", "rescale": False}, "rescale=False goes with a power"),
        ({"eps": 0.5, "target_kappa": 10}, "target_kappa stands instead of eps, got both"),
        ({"method": "svd", "target_kappa": 10}, "target_kappa goes with method='spectral', got 'svd'"),
        ({"target_kappa": 0.5}, r"target_kappa must be at least 1 and finite, got 0\.5"),
        ({"method": "dct", "tolerance": 1e-2}, "tolerance and precision go with spectral and condition"),
        ({"method": "svd", "precision": "float64"}, "tolerance and precision go with spectral and condition"),
        ({"tolerance": 0.0}, r"tolerance must be in \(0, 1\], got 0\.0"),
        ({"tolerance": 1e-12}, "tolerance must be at least"),
        ({"eps": torch.ones(3)}, r"one number or one for each matrix \(\), got a tensor of shape \(3,\)"),
    ],
)
def test_what_does_not_go_together(settings, message):
    for make in (lambda: gray(torch.ones(3, 4), **settings), lambda: TokenGraying(**settings)):
        with pytest.raises(ValueError, match=message):
            make()


def test_target_of_the_wrong_type():
    with pytest.raises(TypeError, match="target_kappa must be a number, got str"):
        gray(torch.ones(3, 4), target_kappa="10")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "eps=0.7, method='spectral'"),
        ({"method": "condition"}, "method='condition'"),
        ({"target_kappa": 10}, "target_kappa=10, method='spectral'"),
        ({"eps": 0.5, "tolerance": 1e-2, "precision": "float64", "floor": 1e-3, "rescale": False},
         "eps=0.5, method='spectral', rescale=False, floor=0.001, tolerance=0.01, precision='float64'"),
    ],
)  # fmt: skip
def test_settings_of_a_module_are_shown(settings, text):
    module = TokenGraying(**settings)
    assert repr(module) == f"TokenGraying({text})"
    assert not module.state_dict()
