"""Attention probabilities beside the fused kernels, against what each library computes without them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from attention_watch import Maps, maps_of, nothing_is_left
from reference.ops import logits, packed_qkv
from untouched import assert_same, fingerprint
from wellposed.anatomy import blocks
from wellposed.anatomy.model import Block
from wellposed.probes import attention_maps
from wellposed.probes.attention_maps import (
    FROM_QK,
    FROM_SOFTMAX,
    FROM_WEIGHTS,
    no_attention,
    watching_attention,
)
from wellposed.probes.observe import observed
from zoo import BY_NAME, CASES, KINDS, Case, each_kind, families, output

# (W, H, N, M) of each block
WINDOWS = [(4, 2, 16, 16)] * 2 + [(1, 2, 16, 16)] * 2
SHAPES = {
    **{case.name: [(1, 2, 17, 17)] * 2 for case in CASES if case.has_attention},
    **{name: [(1, 2, 18, 18)] * 2 for name in ("timm deit", "hf deit")},
    **{name: [(1, 2, 21, 21)] * 2 for name in ("timm dinov2", "timm dinov3")},
    "timm vit post-norm": [(1, 2, 16, 16)] * 2,
    **{
        name: WINDOWS
        for name in ("timm swin", "timm swinv2", "hf swin", "torchvision swin", "torchvision swin_v2")
    },
    "timm cait": [(1, 2, 16, 16)] * 2 + [(1, 2, 1, 17)] * 2,
    "timm pvt_v2": [(1, 1, 256, 16), (1, 1, 64, 16), (1, 2, 16, 16), (1, 2, 4, 4)],
    "timm xcit": [(1, 2, 1, 5)] * 2,
    "hf vitmae": [(1, 2, 5, 5)] * 2 + [(1, 2, 17, 17)],
    "torch encoder": [(1, 2, 9, 9)] * 2,
    "torch encoder pre-norm": [(1, 2, 9, 9)] * 2,
}
with_attention = families(*SHAPES)
of_transformers = families(*(name for name in SHAPES if name.startswith("hf ")))
of_timm = families(*(name for name in SHAPES if name.startswith("timm ") and name != "timm swinv2"))


def images_of(case: Case, count: int) -> Tensor:
    """Images where the model wants them: PyTorch's encoder has them on the second axis."""
    x = case.input(count)
    return x.transpose(0, 1).contiguous() if case.name == "torch encoder pre-norm" else x


def image(case: Case, x: Tensor, index: int) -> Tensor:
    return x[:, [index]] if case.name == "torch encoder pre-norm" else x[[index]]


# Every family


@with_attention
def test_rows_are_probabilities_of_the_expected_shape(case: Case) -> None:
    model, x = case.model(), images_of(case, 3)
    shown, _ = maps_of(blocks(model), lambda: output(model, x))
    assert [tuple(p.shape) for _, p, _ in shown] == [(2, *shape) for shape in SHAPES[case.name]]
    for _, p, source in shown:
        assert p.dtype == torch.float32
        assert not p.requires_grad
        assert p.min() >= 0
        assert (p.sum(-1) - 1).abs().max() < 1e-5
        assert source.dtype == torch.float32


@each_kind
def test_the_result_and_the_model_stay_as_they_are(case: Case) -> None:
    model, x = case.model(), images_of(case, 3)
    expected, before = output(model, x), fingerprint(model)
    _, result = maps_of(blocks(model), lambda: output(model, x))
    assert torch.equal(result, expected)
    assert_same(before, fingerprint(model))
    assert nothing_is_left()


@pytest.mark.some_families(*KINDS)
@with_attention
def test_each_image_owns_its_rows(case: Case) -> None:
    model, x = case.model(), images_of(case, 3)
    together, _ = maps_of(blocks(model), lambda: output(model, x), 3)
    for index in range(3):
        alone, _ = maps_of(blocks(model), lambda i=index: output(model, image(case, x, i)), 1)
        for (_, p, _), (_, expected, _) in zip(together, alone, strict=True):
            assert torch.allclose(p[index], expected[0], atol=1e-5)


@pytest.mark.some_families(*KINDS)
@with_attention
def test_only_the_first_images_are_shown(case: Case) -> None:
    model, x = case.model(), images_of(case, 3)
    first, _ = maps_of(blocks(model), lambda: output(model, x), 3)

    def three_batches() -> None:
        for _ in range(3):
            output(model, x)

    shown, _ = maps_of(blocks(model), three_batches, 4)
    count = len(SHAPES[case.name])
    assert [len(p) for _, p, _ in shown] == [3] * count + [1] * count
    for (_, p, _), (_, expected, _) in zip(shown[count:], first, strict=True):
        assert torch.allclose(p, expected[:1], atol=1e-6)


@of_transformers
def test_fused_equals_eager_attention_of_transformers(case: Case) -> None:
    model, x = case.model(), case.input()
    shown, _ = maps_of(blocks(model), lambda: output(model, x))
    assert {source.estimator for _, _, source in shown} == {FROM_QK}
    eager: list[Tensor] = []

    def keep(module: nn.Module, args: object, out: object) -> None:
        # Some versions wrap the attention in another module of that name, which returns the tokens alone.
        if isinstance(out, tuple) and isinstance(out[1], Tensor) and out[1].ndim == 4:
            eager.append(out[1])

    for module in model.modules():
        if hasattr(module, "config"):  # MAE's decoder has a configuration of its own
            module.config._attn_implementation = "eager"
        if type(module).__name__.endswith("Attention"):
            module.register_forward_hook(keep)
    unfused, _ = maps_of(blocks(model), lambda: output(model, x))
    for (_, p, _), expected in zip(shown, eager, strict=True):
        assert torch.allclose(p.flatten(0, 1), expected, atol=1e-5)
    assert {source.estimator for _, _, source in unfused} == {FROM_SOFTMAX}
    for (_, p, _), (_, expected, _) in zip(unfused, shown, strict=True):
        assert torch.allclose(p, expected, atol=1e-5)


@of_timm
def test_fused_equals_unfused_attention_of_timm(case: Case) -> None:
    model, x = case.model(), case.input()
    shown: dict[bool, Maps] = {}
    for fused in (True, False):
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        shown[fused], _ = maps_of(blocks(model), lambda: output(model, x))
    fused_blocks = [index for index, _, source in shown[True] if source.estimator == FROM_QK]
    # CaiT mixes the heads before its softmax, which no fused kernel does.
    assert len(fused_blocks) == (2 if case.name == "timm cait" else len(SHAPES[case.name]))
    assert {source.estimator for _, _, source in shown[False]} == {FROM_SOFTMAX}
    for (_, p, _), (_, expected, _) in zip(shown[True], shown[False], strict=True):
        assert torch.allclose(p, expected, atol=1e-6)


@families("timm vit", "torchvision vit", "torch encoder")
def test_attention_is_that_of_the_weights(case: Case) -> None:
    model, x = case.model(), case.input()
    block = blocks(model)[1]
    attention = next(
        m for m in block.module.modules() if hasattr(m, "qkv") or isinstance(m, nn.MultiheadAttention)
    )
    seen: list[Tensor] = []
    handle = attention.register_forward_pre_hook(lambda module, args: seen.append(args[0].double()))
    shown, _ = maps_of([block], lambda: output(model, x))
    handle.remove()
    weights = {name: weight.detach().double() for name, weight in attention.named_parameters()}
    weight = weights.get("qkv.weight", weights.get("in_proj_weight"))
    q, k, _ = packed_qkv(seen[0], weight, weights.get("qkv.bias", weights.get("in_proj_bias")), 2)
    ((_, p, source),) = shown
    assert torch.allclose(p[:, 0].double(), torch.softmax(logits(q, k), -1), atol=1e-6)
    assert source.estimator == (FROM_QK if case.name == "timm vit" else FROM_WEIGHTS)


@each_kind
def test_edited_models_show_their_attention(case: Case) -> None:
    model, x = case.model(), images_of(case, 2)
    plain, _ = maps_of(blocks(model), lambda: output(model, x))
    wp.gray_tokens(model, 0.6, "dct", "embedding" if case.has_embedding else "blocks")
    if case.has_mlp:
        wp.broadcast_context(model)
    wp.remove_skips(model, case.roles[0], blocks=0)
    expected = output(model, x)
    shown, result = maps_of(blocks(model), lambda: output(model, x))
    assert torch.equal(result, expected)
    assert [p.shape for _, p, _ in shown] == [p.shape for _, p, _ in plain]
    for (_, p, _), (_, other, _) in zip(shown, plain, strict=True):
        assert (p.sum(-1) - 1).abs().max() < 1e-5
        assert not torch.allclose(p, other, atol=1e-3)


@families("timm vit", "timm swin", "timm cait", "hf swin", "torchvision vit", "torchvision swin_v2")
@pytest.mark.parametrize("how", ["autocast", "half"])
def test_low_precision_is_shown_in_float32(case: Case, how: str) -> None:
    half = how == "half"
    model, x = case.model(dtype=torch.bfloat16 if half else torch.float32), case.input()
    x = x.bfloat16() if half else x
    with torch.autocast("cpu", torch.bfloat16, enabled=not half):
        expected = output(model, x)
        shown, result = maps_of(blocks(model), lambda: output(model, x))
    assert torch.equal(result, expected)
    exact, _ = maps_of(blocks(model.float()), lambda: output(model, x.float()))
    for (_, p, source), (_, float32, _) in zip(shown, exact, strict=True):
        assert p.dtype == torch.float32
        assert source.dtype == torch.bfloat16
        assert (p.sum(-1) - 1).abs().max() < 1e-5
        assert (p - float32).abs().mean() < 0.02


def test_float64_stays_float64() -> None:
    case = BY_NAME["timm vit"]
    model, x = case.model(dtype=torch.float64), case.input(dtype=torch.float64)
    shown, _ = maps_of(blocks(model), lambda: output(model, x))
    assert all(p.dtype == torch.float64 for _, p, _ in shown)


@families("timm vit", "timm swin", "torchvision vit")
def test_gradients_stay_as_they_are(case: Case) -> None:
    model, x = case.model(), case.input()
    watched = copy.deepcopy(model)
    output(model, x).square().sum().backward()
    maps_of(blocks(watched), lambda: output(watched, x).square().sum().backward())
    for expected, got in zip(model.parameters(), watched.parameters(), strict=True):
        assert torch.equal(expected.grad, got.grad)


@families("timm vit", "torchvision vit", "torch encoder")
def test_dropout_draws_what_it_would(case: Case) -> None:
    model, x = case.model().train(), case.input()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.3
    torch.manual_seed(0)
    expected = output(model, x)
    torch.manual_seed(0)
    shown, result = maps_of(blocks(model), lambda: output(model, x))
    assert torch.equal(result, expected)
    assert all((p.sum(-1) - 1).abs().max() < 1e-5 for _, p, _ in shown)


@families("torchvision vit", "torch encoder")
def test_only_the_fast_path_of_inference_is_off(case: Case) -> None:
    model, x = case.model(), case.input()
    with torch.no_grad(), observed(model) as found:
        torch.backends.mha.set_fastpath_enabled(False)
        expected = output(model, x)
        torch.backends.mha.set_fastpath_enabled(True)
        fast = output(model, x)
        shown, result = maps_of(found, lambda: output(model, x))
    assert torch.equal(result, expected)
    assert torch.allclose(result, fast, atol=1e-5)
    assert len(shown) == 2
    assert nothing_is_left()


@pytest.mark.some_families(*KINDS)
@with_attention
def test_large_maps_come_in_parts(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = case.model(), images_of(case, 3)
    whole, _ = maps_of(blocks(model), lambda: output(model, x), 3)
    monkeypatch.setattr(attention_maps, "LARGEST_MAP", 1)
    parts, result = maps_of(blocks(model), lambda: output(model, x), 3)
    assert torch.equal(result, output(model, x))
    assert [len(p) for _, p, _ in parts] == [1] * 3 * len(whole)
    for (index, p, _), three in zip(whole, zip(*[iter(parts)] * 3, strict=True), strict=True):
        assert {i for i, _, _ in three} == {index}
        assert {source.order for _, _, source in three} == {0}
        assert torch.allclose(torch.cat([part for _, part, _ in three]), p, atol=1e-6)


def test_an_own_attention_of_transformers_is_named() -> None:
    from transformers import AttentionInterface

    def average(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return value.mean(2, keepdim=True).expand_as(query).transpose(1, 2).contiguous(), None

    AttentionInterface.register("average", average)
    case = BY_NAME["hf vit"]
    model, x = case.model(), case.input()
    model.set_attn_implementation("average")
    with pytest.raises(RuntimeError, match=r"layers\.0, .*layers\.1 \(ViTLayer\), found none"):
        maps_of(blocks(model), lambda: output(model, x))


@families("hf vit", "hf beit", "hf dinov3")
def test_what_output_attentions_gives_with_eager_attention(case: Case) -> None:
    model, x = case.model(), case.input()
    shown, _ = maps_of(blocks(model), lambda: output(model, x))
    model.set_attn_implementation("eager")
    for (_, p, _), expected in zip(shown, model(x, output_attentions=True).attentions, strict=True):
        assert torch.allclose(p[:, 0], expected, atol=1e-6)


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@families("timm vit", "torchvision vit", "timm swin")
def test_after_an_error_everything_is_as_found(case: Case, error: type[BaseException]) -> None:
    model, x = case.model(), case.input()
    expected, before = output(model, x), fingerprint(model)

    def fail(block: Block, p: Tensor) -> None:
        if block.index == 1:
            raise error("in the middle of a block")

    with pytest.raises(error, match="in the middle"), watching_attention(blocks(model), fail, 2):
        output(model, x)
    assert_same(before, fingerprint(model))
    assert nothing_is_left()
    assert torch.equal(output(model, x), expected)


def test_blocks_without_attention_over_tokens_say_why() -> None:
    def reasons(name: str) -> list[str]:
        return [no_attention(block) for block in blocks(BY_NAME[name].model())]

    assert reasons("timm xcit") == ["its attention is over channels, not tokens"] * 2 + [""] * 2
    assert reasons("timm mixer") == ["it mixes tokens without attention"] * 2
    assert "convolution" in reasons("timm convmixer")[0]
    assert reasons("timm swin") == [""] * 4
