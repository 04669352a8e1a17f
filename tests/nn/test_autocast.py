"""Autocast must not lower the precision of graying and broadcasting, forward or backward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from reference.spectra import generator
from wellposed.nn import ContextBroadcast
from wellposed.nn.functional import broadcast, gray

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CHANNELS = 24


def _scaled_broadcast(x: Tensor) -> Tensor:
    return broadcast(x, torch.linspace(0, 1, CHANNELS))


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "svd": lambda x: gray(x, 0.7, "svd"),
    "spectral": lambda x: gray(x, 0.7, "spectral", floor=1e-2),  # the same for float32 and float64
    "condition": lambda x: gray(x, method="condition", floor=1e-2),
    "dct": lambda x: gray(x, 0.7, "dct"),
    "cb": broadcast,
    "cb_s": _scaled_broadcast,
}
over_operations = pytest.mark.parametrize("name", OPERATIONS)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tokens(dtype: torch.dtype, seed: int = 4) -> Tensor:
    return torch.randn(2, 16, CHANNELS, generator=generator(seed)).to(dtype)


def forward_and_backward(operation: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = tokens(dtype).requires_grad_()
    out = operation(x)
    out.backward(tokens(dtype, seed=5))
    return out.detach(), x.grad


@over_operations
def test_forward_keeps_dtype_and_digits(name):
    for dtype in DTYPES:
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = forward_and_backward(OPERATIONS[name], dtype)
        expected, _ = forward_and_backward(OPERATIONS[name], dtype)
        assert out.dtype == dtype
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@over_operations
def test_backward_inside_autocast_keeps_dtype_and_digits(name):
    for dtype in DTYPES:
        with torch.autocast("cpu", torch.bfloat16):
            _, grad = forward_and_backward(OPERATIONS[name], dtype)
        _, expected = forward_and_backward(OPERATIONS[name], dtype)
        assert grad.dtype == dtype
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


@over_operations
def test_backward_after_autocast_keeps_dtype_and_digits(name):
    def operation(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return OPERATIONS[name](x)

    for dtype in DTYPES:
        _, grad = forward_and_backward(operation, dtype)
        _, expected = forward_and_backward(OPERATIONS[name], dtype)
        assert grad.dtype == dtype
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["svd", "spectral", "condition", "dct"])
def test_float32_under_autocast_has_the_digits_of_float32(name):
    x = tokens(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = OPERATIONS[name](x)
    torch.testing.assert_close(out.double(), OPERATIONS[name](x.double()), rtol=0, atol=1e-4)


@over_dtypes
def test_broadcast_module_under_autocast(dtype):
    module = ContextBroadcast(CHANNELS)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(tokens(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out, module(tokens(dtype)), rtol=1e-6, atol=1e-6)
    assert module.scale.dtype == torch.float32
