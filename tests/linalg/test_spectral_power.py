"""The values of spectral_power against matrices whose singular values are known, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference.spectra import (
    clustered,
    generator,
    geometric,
    orthogonal,
    power_law,
    rank_deficient,
    repeated,
    values,
    with_singular_values,
)
from wellposed.linalg import spectral_condition, spectral_plan, spectral_power

TOKENS, CHANNELS = 48, 80
EPSILONS = (0.3, 0.5, 0.7, 0.9, 0.99)
KAPPAS = (1e1, 1e2, 1e3, 1e4)

# Of every singular value above the floor of 1e-4, relative. Seen 6.4e-4, also for 196 x 768.
FLOAT64_BOUND = 1e-3
# The same above 1/300, in float32: rounding of X X^T adds to the fit. Seen 1.3e-3, for 196 x 768 7.6e-4.
FLOAT32_BOUND = 2e-3
FLOAT32_FLOOR = 1 / 300

pytestmark = pytest.mark.usefixtures("engine")


def spectra(kappa: float, n: int = TOKENS) -> dict[str, Tensor]:
    return {
        "geometric": geometric(n, kappa),
        "clustered": clustered(geometric(n // 2, kappa / (1 + 1e-5)), 1e-5),
        "repeated": repeated(geometric(n // 4, kappa), 4),
        "power law": power_law(n, math.log(kappa) / math.log(n)),
    }


def largest_error(y: Tensor, s: Tensor, eps: float, above: float) -> float:
    """Of the singular values that are above this part of the largest, relative to the formula."""
    expected = s[..., :1] * (s / s[..., :1]) ** eps
    error = (torch.linalg.svdvals(y.double()) - expected).abs() / expected
    return error[s >= above * s[..., :1] * (1 - 1e-6)].max().item()


@pytest.mark.every_value
@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize("name", spectra(10))
def test_prescribed_spectrum_in_float64(name, kappa):
    s = spectra(kappa)[name]
    x = with_singular_values(s, TOKENS, CHANNELS, (2,)).matrix()
    for eps in EPSILONS:
        y = spectral_power(x, eps, precision="float64")
        assert largest_error(y, s.expand(2, -1), eps, 1e-4) <= FLOAT64_BOUND
        assert largest_error(spectral_power(x.mT, eps), s.expand(2, -1), eps, 1e-4) <= FLOAT64_BOUND


@pytest.mark.every_value
@pytest.mark.parametrize("kappa", [*KAPPAS[:2], 300, *KAPPAS[2:]])
@pytest.mark.parametrize("name", spectra(10))
def test_prescribed_spectrum_of_float32_tokens(name, kappa):
    x = with_singular_values(spectra(kappa)[name], TOKENS, CHANNELS, (2,)).matrix().float()
    s = torch.linalg.svdvals(x.double())
    for eps in EPSILONS:
        # float32 whatever the true kappa, and float64 down to 1e-4
        assert largest_error(spectral_power(x, eps), s, eps, FLOAT32_FLOOR) <= FLOAT32_BOUND
        wide = spectral_power(x, eps, precision="float64")
        assert wide.dtype == torch.float32
        assert largest_error(wide, s, eps, 1e-4) <= FLOAT64_BOUND


@pytest.mark.every_value
@pytest.mark.parametrize(("tokens", "channels"), [(8, 16), (48, 80), (100, 100)])
@pytest.mark.parametrize("eps", EPSILONS)
def test_hardest_spectrum_for_float32(tokens, channels, eps):
    # One large value, and all others where float32 can just see them.
    s = torch.cat((values(1.0), torch.full((tokens - 1,), FLOAT32_FLOOR, dtype=torch.float64)))
    x = with_singular_values(s, tokens, channels, (8,)).matrix().float()
    error = largest_error(spectral_power(x, eps), torch.linalg.svdvals(x.double()), eps, FLOAT32_FLOOR)
    assert error <= spectral_plan(x).error  # seen 4.1e-3 for eps = 0.3


@pytest.mark.parametrize(("tokens", "channels"), [(196, 768), (64, 64), (30, 20), (20, 30)])
def test_flat_gaussian(tokens, channels):
    x = torch.randn(2, tokens, channels, generator=generator(1))
    s = torch.linalg.svdvals(x.double())
    for eps in (0.3, 0.7, 0.99):
        assert largest_error(spectral_power(x, eps), s, eps, FLOAT32_FLOOR) <= FLOAT32_BOUND
        wide = spectral_power(x.double(), eps)
        assert largest_error(wide, s, eps, 1e-4) <= FLOAT64_BOUND


def natural_patches(images: int = 4, size: int = 64, patch: int = 8) -> Tensor:
    """Patch matrices (images, N, D) of images with the 1/f spectrum of photographs, three like channels."""
    frequency = torch.fft.fftfreq(size, dtype=torch.float64)
    radius = (frequency[:, None].square() + frequency.square()).sqrt().clamp(min=1 / size)
    noise = torch.randn(images, 3, size, size, dtype=torch.float64, generator=generator(2))
    noise = noise.mean(1, keepdim=True) + 0.2 * noise
    pixels = torch.fft.ifft2(torch.fft.fft2(noise) / radius**2).real
    grid = size // patch
    pieces = pixels.reshape(images, 3, grid, patch, grid, patch)
    return pieces.permute(0, 2, 4, 1, 3, 5).reshape(images, grid**2, -1)


@pytest.mark.parametrize("eps", EPSILONS)
def test_patches_of_images(eps):
    x = natural_patches().float()
    s = torch.linalg.svdvals(x.double())
    assert (s[:, 0] / s[:, -1]).max() > 300  # hard enough to be worth testing
    assert largest_error(spectral_power(x, eps), s, eps, FLOAT32_FLOOR) <= FLOAT32_BOUND
    assert largest_error(spectral_power(x, eps, floor=1e-4), s, eps, 1e-4) <= FLOAT64_BOUND


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("eps", [0.3, 0.7, 0.99])
def test_below_the_floor_monotone_and_bounded(eps, precision):
    s = values(*(10 ** (-0.1 * k) for k in range(90)))  # down to 1e-9
    x = torch.diag(s).to(getattr(torch, precision))
    floor = spectral_plan(x, precision=precision).floor
    g = spectral_power(x, eps, precision=precision).diagonal().double()
    assert (g > 0).all()
    assert (g.diff() < 0).all()
    gain = g / s
    # Off by no more than the power at the floor, and constant well below it.
    assert gain.max() <= 2.2 * floor ** (eps - 1)
    assert (gain[-20:] / gain[-1] - 1).abs().max() <= 1e-3


@pytest.mark.parametrize("tolerance", [1e-2, 1e-3, 2e-4])
def test_tolerance_is_kept(tolerance):
    s = geometric(TOKENS, 1e4)
    x = with_singular_values(s, TOKENS, CHANNELS).matrix()
    y = spectral_power(x, 0.5, tolerance=tolerance)
    assert largest_error(y, s, 0.5, 1e-4) <= tolerance


def test_singular_vectors_are_kept():
    factors = with_singular_values(geometric(TOKENS, 1e3), TOKENS, CHANNELS)
    y = spectral_power(factors.matrix(), 0.6)
    core = factors.U.mT @ y @ factors.V
    torch.testing.assert_close(core.diagonal(), factors.grayed(0.6).s, rtol=FLOAT64_BOUND, atol=0)
    torch.testing.assert_close(core, torch.diag(core.diagonal()), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_literal_form_has_a_largest_value_of_one(dtype):
    factors = with_singular_values(geometric(20, 100, largest=7), 20, 30)
    g = torch.linalg.svdvals(spectral_power(factors.matrix().to(dtype), 0.6, rescale=False).double())
    torch.testing.assert_close(g, (factors.s / 7) ** 0.6, rtol=FLOAT32_BOUND, atol=0)


@pytest.mark.every_value
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (1, 7), (7, 1), (1, 1), (2, 3, 4, 5), (0, 3, 4)])
def test_shape_and_dtype_are_kept(dtype, shape):
    x = torch.randn(shape, generator=generator(3)).to(dtype)
    y = spectral_power(x, 0.7)
    assert (y.shape, y.dtype) == (shape, dtype)
    assert y.isfinite().all()


def test_single_token_is_left_as_it_is():
    x = torch.randn(3, 1, 20, generator=generator(3), dtype=torch.float64)
    torch.testing.assert_close(spectral_power(x, 0.5), x, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once(dtype):
    x = with_singular_values(geometric(20, 30), 20, 40, (2,)).matrix().to(dtype)
    expected = spectral_power(x.float(), 0.7)
    assert torch.equal(spectral_power(x, 0.7), expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_zeros_give_zeros(dtype):
    x = torch.zeros(2, 5, 7, dtype=dtype)
    for rescale in (True, False):
        assert torch.equal(spectral_power(x, 0.5, rescale=rescale), x)
    assert torch.equal(spectral_condition(x), x)


@pytest.mark.parametrize(("tokens", "channels"), [(20, 30), (30, 20)])
def test_rank_deficient(tokens, channels):
    s = rank_deficient(geometric(12, 100), zeros=8)
    factors = with_singular_values(s, tokens, channels)
    y = spectral_power(factors.matrix(), 0.5)
    g = torch.linalg.svdvals(y)
    torch.testing.assert_close(g[:12], s[:12] ** 0.5, rtol=1e-3, atol=0)
    # Zero is 1e-16 after rounding, and the gain there is about 1e-4^(-1/2).
    assert g[12:].max() <= 1e-13


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_bad_image_stays_alone(value, precision):
    x = torch.randn(4, 16, 32, generator=generator(4))
    expected = spectral_power(x, 0.7, precision=precision)
    x[1, 2, 3], x[2] = value, 0
    y = spectral_power(x, 0.7, precision=precision)
    assert y[1].isnan().all()
    assert not y[2].any()
    assert torch.equal(y[[0, 3]], expected[[0, 3]])


@pytest.mark.parametrize("size", [1e-36, 1e-30, 1e-12, 1e12, 1e30, 1e36])
def test_tokens_of_any_size_in_float32(size):
    x = torch.randn(2, 8, 12, generator=generator(4))
    y = spectral_power(x * size, 0.5)
    torch.testing.assert_close(y / size, spectral_power(x, 0.5), rtol=1e-4, atol=1e-5)
    literal = spectral_power(x * size, 0.5, rescale=False)
    torch.testing.assert_close(literal, spectral_power(x, 0.5, rescale=False), rtol=1e-4, atol=1e-5)


def test_powers_of_single_images():
    x = torch.randn(2, 3, 8, 12, dtype=torch.float64, generator=generator(4))
    eps = torch.linspace(0, 1, 6, dtype=torch.float64).reshape(2, 3)
    y = spectral_power(x, eps)
    s = torch.linalg.svdvals(x)
    for place in [(i, j) for i in range(2) for j in range(3)]:
        assert largest_error(y[place], s[place], eps[place].item(), 1e-4) <= FLOAT64_BOUND


def test_one_power_as_a_tensor():
    x = torch.randn(2, 8, 12, dtype=torch.float64, generator=generator(4))
    one = spectral_power(x, torch.tensor(0.6))
    torch.testing.assert_close(one, spectral_power(x, torch.tensor([0.6, 0.6])))
    torch.testing.assert_close(one, spectral_power(x, 0.6), rtol=0, atol=2e-3 * x.abs().max().item())


quick = settings(derandomize=True, deadline=None, max_examples=40)
seeds = st.integers(0, 2**16)
sizes = st.sampled_from(range(1, 40))


@quick
@given(seed=seeds, tokens=sizes, channels=sizes, eps=st.sampled_from([0.0, 0.3, 0.7, 0.95]))
def test_rotations_pass_through(seed, tokens, channels, eps):
    s = geometric(min(tokens, channels), 1e3)
    x = with_singular_values(s, tokens, channels, seed=seed).matrix()
    Q, W = orthogonal(tokens, seed=seed + 1), orthogonal(channels, seed=seed + 2)
    actual, expected = spectral_power(Q @ x @ W, eps), Q @ spectral_power(x, eps) @ W
    # Rounding (1e-16) of X X^T, over its smallest eigenvalue (1e-6), and Lanczos from another start.
    assert torch.linalg.matrix_norm(actual - expected, 2) <= 1e-4


@quick
@given(seed=seeds, tokens=sizes, channels=sizes, c=st.sampled_from([1e-10, 3e-4, 0.7, 5.0, 1e10]))
def test_scale_passes_through(seed, tokens, channels, c):
    x = torch.randn(tokens, channels, dtype=torch.float64, generator=generator(seed))
    assert torch.linalg.matrix_norm(spectral_power(c * x, 0.5) / c - spectral_power(x, 0.5), 2) <= 1e-6
    literal = spectral_power(c * x, 0.5, rescale=False) - spectral_power(x, 0.5, rescale=False)
    assert torch.linalg.matrix_norm(literal, 2) <= 1e-6


@pytest.mark.parametrize("size", [1e-310, 1e-200, 1e-160, 1e160, 1e200, 1e300])
def test_float64_tokens_whose_squares_are_out_of_range(size):
    x, upstream = (torch.randn(2, 8, 12, dtype=torch.float64, generator=generator(k)) for k in (4, 5))
    leaf = x.clone().requires_grad_()
    y = spectral_power(leaf, 0.7)
    (slope,) = torch.autograd.grad(y, leaf, upstream)
    sized = (size * x).requires_grad_()
    y_sized = spectral_power(sized, 0.7)
    (slope_sized,) = torch.autograd.grad(y_sized, sized, upstream)
    torch.testing.assert_close(y_sized / size, y, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(slope_sized, slope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1e-200, 1e-160, 1e160, 1e200, 1e300])
def test_the_literal_form_of_such_tokens(size):
    x, upstream = (torch.randn(2, 8, 12, dtype=torch.float64, generator=generator(k)) for k in (4, 5))
    leaf, sized = x.clone().requires_grad_(), (size * x).requires_grad_()
    y, y_sized = (spectral_power(each, 0.7, rescale=False) for each in (leaf, sized))
    torch.testing.assert_close(y_sized, y, rtol=1e-9, atol=1e-9)
    (slope,) = torch.autograd.grad(y, leaf, upstream)
    (slope_sized,) = torch.autograd.grad(y_sized, sized, upstream)
    torch.testing.assert_close(slope_sized * size, slope, rtol=1e-9, atol=1e-9)


def test_float16_is_rounded_after_the_division():
    x = (torch.tensor([[1.0, 1.0], [1.0, 0.5]]) * 6e4).half()
    expected = spectral_power(x.double() / 6e4, 0.3, rescale=False)
    torch.testing.assert_close(spectral_power(x, 0.3, rescale=False).double(), expected, rtol=0, atol=2e-3)
    small = (torch.tensor([[1.0, 1.0], [1.0, 0.5]]) * 2**-22).half()
    torch.testing.assert_close(
        spectral_power(small, 0.3, rescale=False).double(), expected, rtol=0, atol=2e-3
    )


@pytest.mark.parametrize("size", [2.0**-130, 2.0**-140])
def test_subnormal_float32_tokens(size):
    x = torch.randint(-64, 64, (6, 9), generator=generator(4)).float()
    upstream = torch.randn(6, 9, generator=generator(5))
    results = []
    for factor in (1.0, size):
        leaf = (factor * x).requires_grad_()
        y = spectral_power(leaf, 0.7)
        results.append((y.detach().double() / factor, torch.autograd.grad(y, leaf, upstream)[0]))
    # The result is subnormal too, and has as few digits.
    spacing = 8 * 2.0**-149 / size
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-6, atol=spacing)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-3, atol=1e-3)
    literal = spectral_power(size * x, 0.7, rescale=False)
    torch.testing.assert_close(literal, spectral_power(x, 0.7, rescale=False), rtol=1e-5, atol=1e-5)
