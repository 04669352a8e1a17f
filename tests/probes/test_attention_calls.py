"""Attention probabilities of single calls: masks, heads, windows, softmaxes, and what is refused."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attention_watch import Maps, maps_of, nothing_is_left
from wellposed.anatomy import Add, BlockRow
from wellposed.anatomy.model import Block
from wellposed.probes.attention_maps import (
    FROM_QK,
    FROM_SCORES,
    FROM_SOFTMAX,
    FROM_WEIGHTS,
    Source,
    attention_probabilities,
    watching_attention,
)

# The product itself

_SQUARE, _WIDE = (5, 5), (4, 7)


def masks(queries: int, keys: int) -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    some = torch.rand(3, 4, queries, keys, generator=generator) < 0.5
    some[..., 0] = True
    blind = some.clone()
    blind[:, :, 1] = False
    bias = torch.randn(3, 1, queries, keys, generator=generator)
    return {
        "none": {},
        "bool": {"attn_mask": some},
        "a query that sees nothing": {"attn_mask": blind},
        "bool for all images": {"attn_mask": some[0, 0]},
        "float": {"attn_mask": bias},
        "float for all images": {"attn_mask": bias[:1]},
        "float with -inf": {"attn_mask": bias.masked_fill(~some[:, :1], -math.inf)},
        "causal": {"is_causal": True},
        "scale": {"scale": 0.7},
    }


KINDS = list(masks(*_SQUARE))


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", [_SQUARE, _WIDE])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 2])
def test_probabilities_are_those_of_the_fused_kernel(shape: tuple[int, int], kind: str, groups: int) -> None:
    queries, keys = shape
    arguments = masks(queries, keys)[kind] | {"enable_gqa": groups > 1}
    torch.manual_seed(1)
    q, k = torch.randn(3, 4, queries, 8), torch.randn(3, 4 // groups, keys, 8)
    identity = torch.eye(keys).expand(3, 4 // groups, keys, keys)
    expected = functional.scaled_dot_product_attention(q, k, identity, **arguments)
    assert torch.allclose(attention_probabilities(q, k, **arguments), expected, atol=1e-6)


# What a block of one's own may do


class Free(nn.Module):
    """A block that computes what it is told."""

    def __init__(self, compute: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Any:
        return self.compute(x)


ROW = BlockRow("free", (Add("attention"),), ())


def free(compute: Callable[[Tensor], Any], index: int = 0) -> Block:
    return Block(index, f"free.{index}", Free(compute), ROW)


TOKENS = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(3))


def show(compute: Callable[[Tensor], Any], images: int = 2) -> tuple[Maps, Any]:
    block = free(compute)
    return maps_of([block], lambda: block.module(TOKENS), images)


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, 2)).transpose(1, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_sampled_images(kind: str) -> None:
    arguments, x = masks(5, 5)[kind], heads_of(TOKENS)
    shown, out = show(lambda _: functional.scaled_dot_product_attention(x, x, x, **arguments))
    expected = functional.scaled_dot_product_attention(x, x, torch.eye(5).expand(3, 4, 5, 5), **arguments)
    ((_, p, _),) = shown
    assert torch.allclose(p[:, 0], expected[:2], atol=1e-6)
    assert torch.equal(out, functional.scaled_dot_product_attention(x, x, x, **arguments))


def test_one_query_for_all_images() -> None:
    x, query = heads_of(TOKENS), torch.randn(1, 4, 1, 2)
    shown, _ = show(lambda _: functional.scaled_dot_product_attention(query, x, x))
    assert torch.allclose(shown[0][1][:, 0], attention_probabilities(query, x[:2]), atol=1e-6)


def test_autocast_rounds_what_the_kernel_gets() -> None:
    x = heads_of(TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        shown, _ = show(lambda _: functional.scaled_dot_product_attention(x, x, x))
    ((_, p, source),) = shown
    rounded = x[:2].bfloat16().double()
    assert torch.allclose(p[:, 0].double(), torch.softmax(rounded @ rounded.mT / 2**0.5, -1), atol=1e-6)
    assert source.dtype == torch.bfloat16


SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda s: torch.softmax(s, -1),
    "function, dim by name": lambda s: torch.softmax(input=s, dim=-1),
    "functional": lambda s: functional.softmax(s, dim=-1),
    "functional, positive dim": lambda s: functional.softmax(s, 3),
    "method": lambda s: s.softmax(-1),
    "method, dim by name": lambda s: s.softmax(dim=-1, dtype=torch.float32),
    "special": lambda s: torch.special.softmax(s, -1),
    "module": nn.Softmax(-1),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_every_softmax_is_read(name: str) -> None:
    scores = torch.randn(3, 4, 5, 5)
    shown, out = show(lambda _: SOFTMAXES[name](scores))
    ((_, p, source),) = shown
    assert torch.equal(p[:, 0], out[:2])
    assert source == Source(FROM_SOFTMAX, torch.float32, 0)


def test_softmax_in_half_precision_is_made_again() -> None:
    scores = torch.randn(3, 4, 5, 5).bfloat16()
    shown, _ = show(lambda _: scores.softmax(-1))
    ((_, p, source),) = shown
    assert torch.allclose(p[:, 0], scores[:2].float().softmax(-1), atol=1e-7)
    assert source == Source(FROM_SCORES, torch.bfloat16, 0)


def test_other_softmaxes_are_passed_over() -> None:
    def compute(x: Tensor) -> Tensor:
        torch.softmax(x, 1)  # over tokens: a pooling
        torch.softmax(x.mean(1), -1)  # (B, D): a gate
        return functional.scaled_dot_product_attention(heads_of(x), heads_of(x), heads_of(x))

    shown, _ = show(compute)
    assert [source.estimator for _, _, source in shown] == [FROM_QK]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 5, 5), (2, 1, 1, 5, 5)),
        ((3, 4, 5, 6), (2, 1, 4, 5, 6)),
        ((6, 4, 5, 6), (2, 2, 4, 5, 6)),
        ((3, 2, 4, 5, 6), (2, 2, 4, 5, 6)),
    ],
)
def test_the_axes_of_attention(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    shown, out = show(lambda _: torch.randn(shape).softmax(-1))
    ((_, p, _),) = shown
    assert tuple(p.shape) == expected
    assert torch.equal(p.flatten(), out[: 2 * shape[0] // 3].flatten())


def test_heads_and_windows_on_one_axis_are_shown_as_windows() -> None:
    shown, out = show(lambda _: torch.randn(12, 5, 5).softmax(-1))
    ((_, p, source),) = shown
    assert not source.tells_heads
    assert torch.equal(p.flatten(), out[:8].flatten())


@pytest.mark.parametrize("shape", [(4, 4, 5, 5), (6, 2, 4, 5, 5), (3, 1, 1, 4, 5, 5)])
def test_axes_that_cannot_be_told_apart_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"for B = 3 images in free\.0 \(Free\)"):
        show(lambda _: torch.randn(shape).softmax(-1))
    assert nothing_is_left()


def test_several_attentions_come_in_order() -> None:
    def compute(x: Tensor) -> Tensor:
        y = heads_of(x).softmax(-1)
        return functional.scaled_dot_product_attention(y, y, y)

    shown, _ = show(compute, images=3)
    assert [(source.order, source.estimator) for _, _, source in shown] == [(0, FROM_SOFTMAX), (1, FROM_QK)]


def test_a_block_in_a_block_shows_its_own() -> None:
    inner = free(lambda x: x.softmax(-1), 1)
    outer = free(lambda x: inner.module(x).softmax(-1), 0)
    shown, _ = maps_of([outer, inner], lambda: outer.module(TOKENS))
    assert [index for index, _, _ in shown] == [1, 0]
    # The inner block has had its image when the outer one comes.
    shown, _ = maps_of([outer, inner], lambda: (inner.module(TOKENS), outer.module(TOKENS)), 1)
    assert [index for index, _, _ in shown] == [1, 0]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["none", "mask", "mask a head", "padding", "half", "causal"])
def test_multi_head_attention(batch_first: bool, kind: str) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, add_bias_kv=True).eval()
    x = TOKENS if batch_first else TOKENS.transpose(0, 1)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = padding[1, 4:] = True
    arguments: dict[str, Any] = {
        "mask": {"attn_mask": torch.randn(5, 5)},
        "mask a head": {"attn_mask": torch.randn(6, 5, 5)},
        "padding": {"key_padding_mask": padding},
        "causal": {"attn_mask": causal, "is_causal": True},
    }.get(kind, {})
    if kind == "half":
        attention, x = attention.bfloat16(), x.bfloat16()
    shown, out = show(lambda _: attention(x, x, x, need_weights=False, **arguments)[0])
    assert torch.equal(out, attention(x, x, x, need_weights=False, **arguments)[0])
    exact = copy.deepcopy(attention).float()
    _, expected = exact(*[x.float()] * 3, average_attn_weights=False, **(arguments | {"is_causal": False}))
    ((_, p, source),) = shown
    assert p.dtype == torch.float32
    assert torch.allclose(p[:, 0], expected[:2], atol=1e-6)
    assert source == Source(FROM_WEIGHTS, x.dtype, 0)


# Errors


def test_a_block_that_shows_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"free\.0 \(Free\), found none.*set_attn_implementation"):
        show(lambda x: x @ x.mT @ x)
    assert nothing_is_left()


def test_a_block_that_did_not_run_is_none() -> None:
    shown, _ = maps_of([free(lambda x: x)], lambda: None)
    assert shown == []


def test_the_error_of_the_model_is_the_one_that_is_raised() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ArithmeticError("of the model")

    silent, failing = free(lambda x: x, 0), free(fail, 1)
    with pytest.raises(ArithmeticError, match="of the model"):
        maps_of([silent, failing], lambda: failing.module(silent.module(TOKENS)))


def test_a_failed_pass_does_not_count() -> None:
    block = free(lambda x: x.softmax(-1) if x.isfinite().all() else 1 / 0)

    def run() -> None:
        with pytest.raises(ZeroDivisionError):
            block.module(TOKENS * math.nan)
        block.module(TOKENS)

    shown, _ = maps_of([block], run)
    assert [len(p) for _, p, _ in shown] == [2]


def test_a_hook_that_fails_before_ours_leaves_nothing() -> None:
    block = free(lambda x: x.softmax(-1))

    def fail(module: nn.Module, args: Any) -> None:
        raise ArithmeticError("a hook")

    block.module.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError, match="a hook"):
        maps_of([block], lambda: block.module(TOKENS))
    assert nothing_is_left()


def test_no_images_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"), watching_attention([], print, 0):
        pass
    assert nothing_is_left()


def test_a_fast_path_that_was_off_stays_off() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        show(lambda x: x.softmax(-1))
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
