"""Gradients of graying as a whole, by finite differences in float64.

Repeated, clustered and vanishing singular values are in ``tests/linalg/test_svd_power.py``.
"""

import pytest
import torch
from torch import Tensor

from reference.spectra import generator
from wellposed.nn.functional import gray

METHODS = ("svd", "spectral", "dct")
SHAPES = {
    "wide": (4, 6),
    "tall": (6, 4),
    "square": (5, 5),
    "one token": (1, 5),
    "one channel": (5, 1),
    "batch": (2, 2, 3, 4),
}

over_methods = pytest.mark.parametrize("method", METHODS)
over_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
both_scales = pytest.mark.parametrize("rescale", [True, False], ids=["rescaled", "literal"])


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(2)).to(dtype).requires_grad_()


@pytest.mark.pairwise
@over_methods
@over_shapes
@both_scales
@pytest.mark.parametrize("eps", [0.5, 0.95])
def test_gradient(method, shape, eps, rescale):
    assert torch.autograd.gradcheck(
        lambda x: gray(x, eps, method, rescale=rescale), random(*shape), atol=1e-6, rtol=1e-5
    )


@over_methods
@both_scales
def test_gradient_with_values_on_both_sides_of_a_large_floor(method, rescale):
    assert torch.autograd.gradcheck(
        lambda x: gray(x, 0.5, method, rescale=rescale, floor=0.3), random(4, 6), atol=1e-6, rtol=1e-5
    )


@over_methods
def test_gradient_of_tokens_that_are_all_the_same(method):
    # Rank one, and all but a few DCT coefficients zero.
    x = random(1, 6).detach().expand(5, 6).clone().requires_grad_()
    gray(x, 0.5, method).square().sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() > 0


@over_methods
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradient_has_the_dtype_of_the_tokens_and_the_digits_of_float32(method, dtype):
    narrow = random(6, 9, dtype=dtype)
    wide = narrow.detach().double().requires_grad_()
    # One floor for all: that of "spectral" is another one for float64.
    gray(narrow, 0.7, method, floor=1e-2).sum().backward()
    gray(wide, 0.7, method, floor=1e-2).sum().backward()
    assert narrow.grad.dtype == dtype
    # One rounding to the dtype; a little more where that is as fine as the arithmetic.
    unit = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(
        narrow.grad.double(), wide.grad, rtol=0, atol=unit * wide.grad.abs().max().item()
    )


@over_methods
@pytest.mark.parametrize("rescale", [True, False], ids=["rescaled", "literal"])
@pytest.mark.parametrize("size", [2.0**-130, 2.0**-140])
def test_gradient_of_subnormal_tokens_is_that_of_normal_ones(method, rescale, size):
    x = torch.randint(-64, 64, (6, 9), generator=generator(4)).float()
    upstream = torch.randn(6, 9, generator=generator(5))
    slopes = []
    for factor in (1.0, size):
        leaf = (factor * x).requires_grad_()
        out = gray(leaf, 0.7, method, rescale=rescale)
        # The literal form's is larger by 1 / factor, which a small upstream takes back.
        (slope,) = torch.autograd.grad(out, leaf, upstream * (2.0**-60 if not rescale else 1))
        slopes.append(slope.double() * (1 if rescale else 2.0**60 * factor))
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-3, atol=3e-3)


@pytest.mark.parametrize("method", ["svd", "spectral", "dct"])
def test_a_power_gets_no_gradient(method):
    eps = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    x = random(4, 6)
    gray(x, eps, method).sum().backward()
    assert eps.grad is None
    assert x.grad is not None
