"""spectral_power inside torch.compile, vmap, export, autocast, checkpointing; and twice."""

import functools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from reference.spectra import generator
from wellposed.linalg import spectral_condition, spectral_power
from wellposed.nn.functional import gray

pytestmark = pytest.mark.slow

# A large floor takes few steps, so these are quickly traced; float32 and float64 have all of them.
OPERATIONS = {
    "float32": lambda x: spectral_power(x, 0.7),
    "float64": lambda x: spectral_power(x, 0.7, precision="float64"),
    "short": lambda x: spectral_power(x, 0.7, floor=0.1),
    "literal": lambda x: spectral_power(x, 0.7, floor=0.1, rescale=False),
    "condition": lambda x: spectral_condition(x, floor=0.1),
    "target": lambda x: gray(x, target_kappa=3.0, floor=0.1),
    "powers": lambda x: spectral_power(x, torch.full(x.shape[:-2], 0.6), floor=0.1),
}
over_operations = pytest.mark.parametrize("name", OPERATIONS)


def random(*shape: int, seed: int = 13, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def value_and_gradient(function, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    y = function(x)
    (grad,) = torch.autograd.grad(y, x, random(*y.shape, seed=14, dtype=y.dtype))
    return y.detach(), grad


@over_operations
def test_compiled(name):
    torch.compiler.reset()
    compiled = torch.compile(OPERATIONS[name], fullgraph=True, backend="aot_eager")
    x = random(2, 4, 7)
    expected = value_and_gradient(OPERATIONS[name], x)
    torch.testing.assert_close(value_and_gradient(compiled, x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "operation",
    [functools.partial(gray, eps=0.7, floor=0.1), functools.partial(gray, method="condition", floor=0.1)],
)
def test_compiled_with_symbols_for_all_sizes_and_numbers(operation):
    torch.compiler.reset()
    compiled = torch.compile(operation, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((2, 4, 7), (3, 6, 5)):
        x = random(*shape)
        expected = value_and_gradient(operation, x)
        torch.testing.assert_close(value_and_gradient(compiled, x), expected, rtol=1e-6, atol=1e-6)


def test_compiled_for_changing_batches():
    torch.compiler.reset()
    compiled = torch.compile(OPERATIONS["short"], fullgraph=True, backend="aot_eager")
    for images in (2, 3, 5):
        x = random(images, 4, 7)
        expected = value_and_gradient(OPERATIONS["short"], x)
        torch.testing.assert_close(value_and_gradient(compiled, x), expected, rtol=1e-6, atol=1e-6)


def test_a_number_that_changes_compiles_again():
    torch.compiler.reset()
    power = functools.partial(spectral_power, floor=0.1)
    compiled, x = torch.compile(power, fullgraph=True, backend="aot_eager"), random(2, 5, 7)
    for eps in (0.9, 0.7, 0.5):
        torch.testing.assert_close(compiled(x, eps), power(x, eps), rtol=1e-6, atol=1e-6)


def test_a_tensor_that_changes_does_not_compile_again():
    torch.compiler.reset()
    compiled = torch.compile(spectral_power, fullgraph=True, backend="aot_eager")
    x, eps = random(2, 5, 7), torch.tensor(0.9, dtype=torch.float64)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for value in (0.9, 0.7, 0.5, 1.0):
            eps.fill_(value)
            torch.testing.assert_close(compiled(x, eps), spectral_power(x, eps), rtol=1e-6, atol=1e-6)


@over_operations
def test_exported_for_any_batch(name):
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return OPERATIONS[name](x)

    batch = {0: torch.export.Dim("images", min=2)}
    exported = torch.export.export(Module(), (random(2, 5, 7),), dynamic_shapes=(batch,)).module()
    x = random(6, 5, 7)
    torch.testing.assert_close(exported(x), OPERATIONS[name](x), rtol=1e-6, atol=1e-6)


def test_nothing_of_a_tracer_is_kept():
    # A setting of its own, so that its coefficients are made while tracing.
    eps, x = 0.4711, random(2, 5, 7)
    with torch._subclasses.FakeTensorMode() as mode:
        spectral_power(mode.from_tensor(x), eps)
        spectral_power(mode.from_tensor(x), torch.tensor(0.5), tolerance=1.1e-3)
    assert spectral_power(x, eps).isfinite().all()
    assert spectral_power(x, torch.tensor(0.5), tolerance=1.1e-3).isfinite().all()


def test_coefficients_made_in_inference_mode_serve_a_training_step():
    eps, x = 0.4712, random(2, 5, 7)
    with torch.inference_mode():
        spectral_power(x, eps)
    value_and_gradient(lambda x: spectral_power(x, eps), x)


@over_operations
def test_vmap(name):
    x = random(4, 2, 6, 9)
    expected = torch.stack([OPERATIONS[name](each) for each in x])
    torch.testing.assert_close(torch.func.vmap(OPERATIONS[name])(x), expected, rtol=1e-5, atol=1e-6)


@over_operations
def test_gradient_under_vmap(name):
    x, weight = random(3, 6, 9), random(3, 6, 9, seed=14)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return (OPERATIONS[name](x) * weight).sum()

    _, expected = value_and_gradient(OPERATIONS[name], x)
    each = torch.func.vmap(torch.func.grad(loss))(x, weight)
    torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-6)
    outside = torch.func.grad(lambda x: torch.func.vmap(loss)(x, weight).sum())(x)
    torch.testing.assert_close(outside, expected, rtol=1e-5, atol=1e-6)


@over_operations
def test_twice_the_same(name):
    x = random(3, 40, 60)
    first, second = (value_and_gradient(OPERATIONS[name], x) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_random_numbers_are_drawn():
    state = torch.get_rng_state()
    value_and_gradient(OPERATIONS["float32"], random(2, 30, 40))
    assert torch.equal(torch.get_rng_state(), state)


@over_operations
def test_autocast_leaves_the_digits(name):
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x = random(2, 16, 24, dtype=dtype)
        expected = value_and_gradient(OPERATIONS[name], x)
        with torch.autocast("cpu", torch.bfloat16):
            actual = value_and_gradient(OPERATIONS[name], x)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), dtype


def test_meta_tensors():
    x = torch.empty(2, 5, 7, device="meta", requires_grad=True)
    for operation in OPERATIONS.values():
        (grad,) = torch.autograd.grad(operation(x).sum(), x)
        assert (grad.shape, grad.device.type) == (x.shape, "meta")


def test_checkpointing():
    x = random(2, 9, 14)
    expected = value_and_gradient(OPERATIONS["float32"], x)
    actual = value_and_gradient(lambda x: checkpoint(OPERATIONS["float32"], x, use_reentrant=False), x)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("needed", [True, False])
def test_what_the_gradient_needs_is_kept_for_it_only(monkeypatch, needed):
    seen = []
    save = torch.autograd.function.FunctionCtx.save_for_backward

    def watched(context, *tensors):
        seen.append(len(tensors))
        return save(context, *tensors)

    monkeypatch.setattr(torch.autograd.function.FunctionCtx, "save_for_backward", watched)
    x = random(2, 9, 14).requires_grad_(needed)
    spectral_power(x, 0.7)
    with torch.no_grad():
        spectral_power(x, 0.7)
    assert (seen[0] > seen[1]) == needed


@pytest.mark.usefixtures("by_the_chain")
@pytest.mark.parametrize("name", ["float32", "float64", "literal", "powers"])
def test_the_chain_in_programs(name):
    torch.compiler.reset()
    x = random(2, 4, 7)
    expected = value_and_gradient(OPERATIONS[name], x)
    compiled = torch.compile(OPERATIONS[name], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(value_and_gradient(compiled, x), expected, rtol=1e-6, atol=1e-6)
    weight = random(2, 4, 7, seed=14)
    each = torch.func.vmap(torch.func.grad(lambda x, w: (OPERATIONS[name](x) * w).sum()))(x, weight)
    torch.testing.assert_close(each, expected[1], rtol=1e-5, atol=1e-6)


def test_any_strides():
    x = random(4, 14, 2, 9)
    for view in (x.transpose(1, 2), x.permute(2, 0, 3, 1), x[:, ::2], x.expand(2, 4, 14, 2, 9)):
        actual, expected = (
            value_and_gradient(OPERATIONS["float32"], each) for each in (view, view.contiguous())
        )
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
