"""One bad image must not touch its batch, and zero tokens must not touch anything."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from reference.spectra import generator
from wellposed.nn import ContextBroadcast, PixelGraying, TokenGraying
from wellposed.nn.functional import gray

METHODS = ("svd", "spectral", "dct")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
IMAGES, TOKENS, CHANNELS = 4, 16, 12
BAD = 1

GRAYINGS: dict[str, Callable[[], torch.nn.Module]] = {
    f"{method} {form}": functools.partial(TokenGraying, 0.7, method, rescale=form == "rescaled")
    for method in METHODS
    for form in ("rescaled", "literal")
} | {
    "condition": functools.partial(TokenGraying, method="condition"),
    "target": functools.partial(TokenGraying, target_kappa=2.0),
}
BROADCASTS: dict[str, Callable[[], torch.nn.Module]] = {
    "cb": ContextBroadcast,
    "cb_s": functools.partial(ContextBroadcast, CHANNELS),
    "cb_s identity": functools.partial(ContextBroadcast, CHANNELS, init="identity"),
}
PIXEL_GRAYINGS: dict[str, Callable[[], torch.nn.Module]] = {
    f"pixels {method}": functools.partial(PixelGraying, (2, 4), 0.7, method) for method in METHODS
}
MODULES = GRAYINGS | BROADCASTS | PIXEL_GRAYINGS

over_modules = pytest.mark.parametrize("name", MODULES)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
over_bad_values = pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)


def shape_for(name: str) -> tuple[int, ...]:
    return (IMAGES, 3, 8, 16) if name in PIXEL_GRAYINGS else (IMAGES, TOKENS, CHANNELS)


def good_batch(name: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape_for(name), generator=generator(11)).to(dtype)


def with_bad_value(batch: Tensor, value: float) -> Tensor:
    batch = batch.clone()
    batch[BAD].view(-1)[5] = value
    return batch


def others(batch: Tensor) -> Tensor:
    return torch.cat((batch[:BAD], batch[BAD + 1 :]))


def forward_and_gradient(module: torch.nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    batch = batch.clone().requires_grad_()
    out = module(batch)
    weight = torch.randn(batch.shape, generator=generator(12)).to(batch.dtype)
    (grad,) = torch.autograd.grad(out, batch, weight)
    return out.detach(), grad


@pytest.mark.every_value
@over_modules
@over_dtypes
@over_bad_values
def test_only_the_bad_image_suffers(name, dtype, value):
    module, good = MODULES[name](), good_batch(name, dtype)
    expected, expected_grad = forward_and_gradient(module, good)
    actual, grad = forward_and_gradient(module, with_bad_value(good, value))
    assert not actual[BAD].isfinite().all()
    assert torch.equal(others(actual), others(expected))
    assert torch.equal(others(grad), others(expected_grad))


@pytest.mark.every_value
@pytest.mark.parametrize("name", GRAYINGS | PIXEL_GRAYINGS)
@over_bad_values
def test_graying_leaves_nothing_of_the_bad_image(name, value):
    # Every element of a grayed matrix depends on every other, so none can be trusted.
    actual, _ = forward_and_gradient(MODULES[name](), with_bad_value(good_batch(name, torch.float32), value))
    assert not actual[BAD].isfinite().any()


@over_modules
def test_batch_of_bad_images_does_not_raise(name):
    batch = torch.full(shape_for(name), float("nan"))
    actual, _ = forward_and_gradient(MODULES[name](), batch)
    assert actual.isnan().all()


@pytest.mark.every_value
@over_modules
@over_dtypes
def test_zeros_give_zeros_and_a_finite_gradient(name, dtype):
    actual, grad = forward_and_gradient(MODULES[name](), torch.zeros(shape_for(name), dtype=dtype))
    assert torch.equal(actual, torch.zeros_like(actual))
    assert grad.isfinite().all()


@pytest.mark.every_value
@over_modules
@over_dtypes
def test_zero_image_does_not_touch_the_others(name, dtype):
    module, good = MODULES[name](), good_batch(name, dtype)
    with_zero = good.clone()
    with_zero[BAD] = 0
    expected, expected_grad = forward_and_gradient(module, good)
    actual, grad = forward_and_gradient(module, with_zero)
    assert torch.equal(actual[BAD], torch.zeros_like(actual[BAD]))
    assert torch.equal(others(actual), others(expected))
    assert torch.equal(others(grad), others(expected_grad))


@pytest.mark.pairwise
@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_zeros_pass_their_gradient_on_at_the_steepest_power(method, dtype, rescale):
    x = torch.zeros(2, 3, 4, dtype=dtype, requires_grad=True)
    upstream = torch.linspace(-1, 1, 24).reshape(2, 3, 4).to(dtype)
    gray(x, 1e-3, method, rescale=rescale).backward(upstream)
    torch.testing.assert_close(x.grad, upstream)


@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_of_one_zero_image_leaves_the_others(method):
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[1] = 0
    alone = x[[0, 2]].clone().requires_grad_()
    gray(alone, 0.5, method).sum().backward()
    together = x.clone().requires_grad_()
    gray(together, 0.5, method).sum().backward()
    torch.testing.assert_close(together.grad[[0, 2]], alone.grad)


@over_modules
def test_empty_batch_gives_an_empty_batch(name):
    shape = (0, *shape_for(name)[1:])
    actual, grad = forward_and_gradient(MODULES[name](), torch.empty(shape))
    assert actual.shape == grad.shape == shape
