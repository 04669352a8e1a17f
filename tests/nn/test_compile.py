"""Compiled, exported and on the meta device: the same results and shapes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from reference.spectra import generator
from wellposed.nn import ContextBroadcast, PixelGraying, TokenGraying
from wellposed.nn.functional import broadcast, gray

pytestmark = pytest.mark.slow

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "svd": lambda x: gray(x, 0.7, "svd"),
    "svd literal": lambda x: gray(x, 0.7, "svd", rescale=False),
    "spectral": lambda x: gray(x, 0.7, "spectral", floor=0.1),  # few steps, which are quickly traced
    "dct": lambda x: gray(x, 0.7, "dct"),
    "dct literal": lambda x: gray(x, 0.7, "dct", rescale=False),
    "cb": broadcast,
    "cb_s": lambda x: broadcast(x, torch.linspace(0, 1, x.shape[-1], device=x.device)),
}
MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "svd": lambda: TokenGraying(0.7, "svd"),
    "spectral": lambda: TokenGraying(0.7, "spectral"),
    "dct": lambda: TokenGraying(0.7, "dct"),
    "cb": ContextBroadcast,
    "cb_s": lambda: ContextBroadcast(7),
}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator(13)).to(dtype)


def forward_and_gradient(operation: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = operation(x)
    (grad,) = torch.autograd.grad(out, x, torch.cos(torch.arange(out.numel())).reshape(out.shape).to(x))
    return out.detach(), grad


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    # The DCT of a program is products, that of eager code an FFT: a half type may be rounded the other way.
    rtol = 1e-6 if actual[0].dtype == torch.float32 else torch.finfo(actual[0].dtype).eps
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6)


@pytest.mark.every_value
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled(name, dtype):
    torch.compiler.reset()
    x = random(2, 5, 7, dtype=dtype)
    compiled = torch.compile(OPERATIONS[name], fullgraph=True, backend="aot_eager")
    assert_same(forward_and_gradient(compiled, x), forward_and_gradient(OPERATIONS[name], x))


@pytest.mark.parametrize("name", OPERATIONS)
def test_compiled_for_changing_batches(name):
    torch.compiler.reset()
    compiled = torch.compile(OPERATIONS[name], fullgraph=True, backend="aot_eager")
    for images in (2, 3, 5):
        x = random(images, 5, 7)
        assert_same(forward_and_gradient(compiled, x), forward_and_gradient(OPERATIONS[name], x))


def test_compiled_under_autocast():
    torch.compiler.reset()
    x = random(2, 5, 7)
    compiled = torch.compile(OPERATIONS["svd"], fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        actual = forward_and_gradient(compiled, x)
    assert_same(actual, forward_and_gradient(OPERATIONS["svd"], x))


@pytest.mark.parametrize("name", MODULES)
def test_exported(name):
    module, x = MODULES[name](), random(2, 5, 7)
    exported = torch.export.export(module, (x,)).module()
    torch.testing.assert_close(exported(x), module(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODULES)
def test_exported_for_any_batch(name):
    module = MODULES[name]()
    batch = {0: torch.export.Dim("images", min=2)}
    exported = torch.export.export(module, (random(2, 5, 7),), dynamic_shapes=(batch,)).module()
    x = random(6, 5, 7)
    torch.testing.assert_close(exported(x), module(x), rtol=1e-6, atol=1e-6)


@pytest.mark.every_value
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (2, 3, 5, 7), (1, 7), (7, 1)])
def test_meta_tensors_have_the_right_shape(name, shape):
    out = OPERATIONS[name](torch.empty(shape, device="meta", dtype=torch.bfloat16))
    assert (out.shape, out.dtype, out.device.type) == (shape, torch.bfloat16, "meta")


def test_meta_images_have_the_right_shape():
    for method in ("svd", "spectral", "dct"):
        out = PixelGraying(4, 0.7, method)(torch.empty(2, 3, 8, 12, device="meta"))
        assert (out.shape, out.device.type) == ((2, 3, 8, 12), "meta")


@pytest.mark.parametrize("name", OPERATIONS)
def test_meta_tensors_have_a_gradient(name):
    x = torch.empty(2, 5, 7, device="meta", requires_grad=True)
    OPERATIONS[name](x).sum().backward()
    assert (x.grad.shape, x.grad.device.type) == (x.shape, "meta")


def test_models_of_several_floors_and_tolerances_compile_whole() -> None:
    torch.compiler.reset()
    x = torch.randn(2, 5, 4, generator=generator(0))
    for options in ({"floor": 0.1}, {"floor": 0.2}, {"floor": 0.2, "tolerance": 1e-2}):
        module = TokenGraying(0.7, "spectral", **options)
        torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), module(x))
