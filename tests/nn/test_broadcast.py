"""Context Broadcasting against its formula, and what holds for any scale."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference.spectra import generator
from wellposed.nn import ContextBroadcast
from wellposed.nn.functional import broadcast, mix_mean

SHAPES = ((5, 4), (1, 4), (5, 1), (3, 5, 4), (2, 3, 5, 4))
# Relative to the largest token: one rounding of the dtype; the mean itself is taken in at least float32.
BOUNDS = {torch.float64: 1e-15, torch.float32: 3e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}

quick = settings(derandomize=True, deadline=None, max_examples=50)
seeds = st.integers(0, 2**16)
sizes = st.sampled_from(range(1, 9))


def random(*shape: int, seed: int = 6) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator(seed))


@st.composite
def tokens_and_scale(draw: st.DrawFn) -> tuple[Tensor, Tensor | None]:
    tokens, channels, seed = draw(sizes), draw(sizes), draw(seeds)
    kind = draw(st.sampled_from(["cb", "scalar", "channels"]))
    scale = {"cb": None, "scalar": random(seed=seed + 1), "channels": random(channels, seed=seed + 1)}[kind]
    return random(2, tokens, channels, seed=seed), scale


def by_the_formula(x: Tensor, scale: Tensor | float) -> Tensor:
    x = x.double()
    return (1 - scale) * x + scale * x.sum(-2, keepdim=True) / x.shape[-2]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", BOUNDS.keys(), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["cb", "scalar", "channels"])
def test_formula_in_every_dtype(dtype, shape, kind):
    x = random(*shape).to(dtype)
    scale = {"cb": None, "scalar": torch.tensor(0.3), "channels": torch.linspace(0, 1, shape[-1])}[kind]
    out = broadcast(x, scale)
    assert (out.dtype, out.shape) == (dtype, x.shape)
    expected = by_the_formula(
        x, 0.5 if scale is None else scale.to(torch.promote_types(dtype, torch.float32))
    )
    assert (out - expected).abs().max() <= BOUNDS[dtype] * x.abs().max()


@quick
@given(drawn=tokens_and_scale())
def test_mean_token_is_kept(drawn):
    x, scale = drawn
    torch.testing.assert_close(broadcast(x, scale).mean(-2), x.mean(-2), rtol=0, atol=1e-13)


@quick
@given(drawn=tokens_and_scale(), seed=seeds)
def test_order_of_tokens_passes_through(drawn, seed):
    x, scale = drawn
    order = torch.randperm(x.shape[-2], generator=generator(seed))
    actual, expected = broadcast(x[:, order], scale), broadcast(x, scale)[:, order]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)


@quick
@given(drawn=tokens_and_scale())
def test_tokens_that_are_all_the_same_stay(drawn):
    x, scale = drawn
    same = x[:, :1].expand_as(x)
    torch.testing.assert_close(broadcast(same, scale), same, rtol=0, atol=1e-13)


@quick
@given(drawn=tokens_and_scale())
def test_scale_zero_is_the_identity(drawn):
    x, _ = drawn
    assert torch.equal(broadcast(x, torch.tensor(0.0)), x)
    assert torch.equal(broadcast(x, torch.zeros(x.shape[-1])), x)


@quick
@given(drawn=tokens_and_scale())
def test_scale_one_makes_all_tokens_the_mean(drawn):
    x, _ = drawn
    uniform = x.mean(-2, keepdim=True).expand_as(x)
    torch.testing.assert_close(broadcast(x, torch.ones(x.shape[-1])), uniform, rtol=0, atol=1e-15)


@quick
@given(drawn=tokens_and_scale())
def test_scale_one_half_is_plain_broadcasting(drawn):
    x, _ = drawn
    torch.testing.assert_close(
        broadcast(x, torch.full((x.shape[-1],), 0.5)), broadcast(x), rtol=0, atol=1e-15
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_gradient(shape):
    assert torch.autograd.gradcheck(broadcast, random(*shape).requires_grad_())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["scalar", "channels"])
def test_gradient_with_scale(shape, kind):
    x, scale = random(*shape), random(shape[-1], seed=9) if kind == "channels" else random(seed=9)
    assert torch.autograd.gradcheck(broadcast, (x.requires_grad_(), scale.requires_grad_()))
    assert torch.autograd.gradgradcheck(broadcast, (x, scale))


def test_half_tokens_are_averaged_in_float32():
    # Added up in float16 these would overflow, in bfloat16 they would stop growing at 256.
    ones = torch.full((4096, 1), 100.0, dtype=torch.float16)
    assert torch.equal(broadcast(ones), ones)
    ones = torch.ones(4096, 1, dtype=torch.bfloat16)
    assert torch.equal(broadcast(ones), ones)


def test_plain_module_has_no_state_and_computes_cb():
    module, x = ContextBroadcast(), random(2, 5, 4)
    assert not module.state_dict()
    assert not list(module.parameters())
    assert torch.equal(module(x), broadcast(x))


def test_scaled_module_has_one_parameter():
    module = ContextBroadcast(4)
    assert list(module.state_dict()) == ["scale"]
    assert module.scale.shape == (4,)
    assert module.scale.requires_grad


def test_scaled_module_starts_as_cb():
    x = random(2, 5, 4).float()
    torch.testing.assert_close(ContextBroadcast(4, init="cb")(x), broadcast(x), rtol=0, atol=5e-7)


def test_scaled_module_can_start_as_the_identity():
    x = random(2, 5, 4).float()
    assert torch.equal(ContextBroadcast(4, init="identity")(x), x)


def test_scaled_module_learns_from_the_identity():
    x = random(2, 5, 4).float()
    module = ContextBroadcast(4, init="identity")
    module(x).square().sum().backward()
    assert (module.scale.grad.abs() > 0).all()


def test_scaled_module_loads_what_it_saved():
    saved, loaded = ContextBroadcast(4), ContextBroadcast(4, init="identity")
    with torch.no_grad():
        saved.scale.uniform_()
    loaded.load_state_dict(saved.state_dict())
    x = random(2, 5, 4)
    assert torch.equal(loaded(x), saved(x))


@pytest.mark.parametrize("dtype", BOUNDS.keys(), ids=str)
def test_module_keeps_the_dtype_of_the_tokens(dtype):
    x = random(2, 5, 4).to(dtype)
    for module in (ContextBroadcast(), ContextBroadcast(4), ContextBroadcast(4, dtype=torch.bfloat16)):
        assert module(x).dtype == dtype
    assert ContextBroadcast(4, dtype=dtype).scale.dtype == dtype


FACTORS = [(1.0, 0.5), (2.0, 1.0), (0.5, 0.5), (1.0, 1.0), (0.0, 1.0)]


@pytest.mark.parametrize("dtype", BOUNDS.keys(), ids=str)
@pytest.mark.parametrize("factors", FACTORS, ids=str)
def test_mean_and_difference_by_the_formula(dtype, factors):
    x = random(2, 5, 4).to(dtype)
    a, b = factors
    mean = x.double().sum(-2, keepdim=True) / 5
    expected = a * mean + b * (x.double() - mean)
    for out in (mix_mean(x, a, b), ContextBroadcast(mean=a, difference=b)(x)):
        assert (out.dtype, out.shape) == (dtype, x.shape)
        assert (out - expected).abs().max() <= 3 * BOUNDS[dtype] * x.abs().max()


def test_factors_a_channel_and_padding():
    x, a, b = random(2, 5, 4), random(4, seed=1), random(4, seed=2)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    for image, count in ((0, 5), (1, 3)):
        mean = x[image, :count].mean(0)
        expected = a * mean + b * (x[image] - mean)
        torch.testing.assert_close(mix_mean(x, a, b, padding)[image], expected, rtol=0, atol=1e-14)
    arguments = (x.requires_grad_(), a.requires_grad_(), b.requires_grad_())
    assert torch.autograd.gradcheck(mix_mean, arguments)


def test_learned_factors_start_where_they_are_told_and_learn():
    x = random(2, 5, 4).float()
    module = ContextBroadcast(4, mean=1.0, difference=1.0, learned=True)  # FeatScale
    torch.testing.assert_close(module(x), x, rtol=0, atol=5e-7)
    assert list(module.state_dict()) == ["mean", "difference"]
    (module(x) ** 3).sum().backward()
    assert all((each.grad.abs() > 0).all() for each in module.parameters())
    learned = ContextBroadcast(4, learned=True)
    torch.testing.assert_close(learned(x), broadcast(x), rtol=0, atol=5e-7)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"mean": float("nan")}, "mean must be a finite number"),
        ({"difference": "half"}, "difference must be a finite number"),
        ({"learned": True}, "give channels="),
        ({"channels": 4, "mean": 2.0}, "factors of its own"),
    ],
)
def test_factors_that_mean_nothing_are_refused(arguments, expected):
    with pytest.raises(ValueError, match=expected):
        ContextBroadcast(**arguments)
