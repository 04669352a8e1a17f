"""The projections of every family, against what its attention and MLP compute with them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from own_model import OwnBlock
from reference.ops import split_heads
from wellposed.anatomy import Add, BlockRow, after, blocks, taps
from wellposed.anatomy.model import Block
from wellposed.probes.attention_maps import no_attention
from wellposed.probes.projections import (
    attention_projections,
    depthwise_convolution,
    feed_forward,
    watching_inputs,
)
from zoo import CASES, SIDE, Case, families, output

Inputs = dict[tuple[int, str], Tensor]

ROTATED = ("timm dinov3", "timm eva", "timm eva post-norm", "hf dinov3")
with_attention = pytest.mark.parametrize(
    "case", [case for case in CASES if case.has_attention], ids=lambda case: case.name
)
with_mlp = pytest.mark.parametrize(
    "case", [case for case in CASES if case.has_mlp], ids=lambda case: case.name
)


class Operands(TorchFunctionMode):
    """Keeps, for each block, what goes into matrix products, normalisations and activations."""

    KEPT = (torch.matmul, Tensor.matmul, Tensor.__matmul__, functional.normalize)
    KEPT += (functional.gelu, functional.silu, functional.relu)

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.of: dict[int, list[Tensor]] = {block.index: [] for block in blocks(model)}
        self.now = -1

    def enter(self, index: int) -> None:
        self.now = index

    def keep(self, *tensors: Any) -> None:
        if self.now >= 0:
            self.of[self.now] += [x.detach() for x in tensors if isinstance(x, Tensor)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.KEPT:
            self.keep(*args)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def operands(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operands]:
    """SDPA is patched by name: nn.MultiheadAttention calls it where no mode looks."""
    seen = Operands(model)
    fused = functional.scaled_dot_product_attention

    def keeping(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.keep(q, k, v)
        return fused(q, k, v, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", keeping)
    handles = [
        block.module.register_forward_pre_hook(lambda *_, index=block.index: seen.enter(index))
        for block in blocks(model)
    ]
    with seen:
        yield seen
    for handle in handles:
        handle.remove()


def sources_of(found: list[Block]) -> list[tuple[Block, dict[str, Tensor]]]:
    sources = []
    for block in found:
        weights = {}
        if "attention" in block.row.roles and not no_attention(block):
            weights |= attention_projections(block).sources
        if "ffn" in block.row.roles and not isinstance(layers := feed_forward(block), str):
            weights["ffn"] = layers.source
        if isinstance(layer := depthwise_convolution(block), nn.Conv2d):
            weights["convolution"] = layer.weight
        sources.append((block, weights))
    return sources


def inputs_of(model: nn.Module, images: Tensor) -> Inputs:
    seen: Inputs = {}
    with watching_inputs(sources_of(blocks(model)), lambda b, kind, x: seen.update({(b.index, kind): x})):
        output(model, images)
    return seen


def is_among(expected: Tensor, candidates: list[Tensor], *, rows: slice = slice(None)) -> bool:
    """Whether a candidate is ``expected``, up to a positive factor (the scale 1 / sqrt(C))."""
    for found in candidates:
        for x in (found, found.mT) if found.ndim > 1 else (found,):
            if x.shape == expected.shape:
                a, b = x[..., rows, :], expected[..., rows, :]
                factor = (a * b).sum() / b.square().sum()
                if factor > 0 and torch.allclose(a, factor * b, rtol=1e-9, atol=1e-9):
                    return True
    return False


@with_attention
def test_the_projections_give_the_q_k_and_v_that_the_model_attends_with(case: Case, monkeypatch) -> None:
    model, images = case.model(dtype=torch.float64), case.input(dtype=torch.float64)
    inputs = inputs_of(model, images)
    with operands(model, monkeypatch) as seen:
        output(model, images)
    checked = 0
    for block in blocks(model):
        if no_attention(block):
            continue
        layers = attention_projections(block)
        for letter in "qkv":
            made = split_heads(getattr(layers, letter)(inputs[block.index, letter]), layers.heads)
            # Rotations leave the class token, which comes first, as it is.
            rows = slice(0, 1) if case.name in ROTATED and letter != "v" else slice(None)
            assert is_among(made, seen.of[block.index], rows=rows), (block.name, letter)
        checked += 1
    expected = 2 if case.name == "timm xcit" else case.blocks  # the other two attend over channels
    assert checked == expected


@families("timm vit", "hf vit", "torchvision vit", "timm swin", "torchvision swin_v2", "timm pvt_v2")
def test_the_output_projection_is_the_last_step_of_attention(case: Case, monkeypatch) -> None:
    model, images = case.model(dtype=torch.float64), case.input(dtype=torch.float64)
    inputs = inputs_of(model, images)
    for block in blocks(model):
        layers = attention_projections(block)
        # With W_V = 0 every token gets b_V W_O + b_O, whatever the probabilities are.
        x = torch.zeros_like(inputs[block.index, "v"][:1, :1])
        expected = layers.out(layers.v(x))
        source = layers.sources.get("v", layers.sources.get("kv", layers.sources.get("qkv")))
        with torch.no_grad():
            source[-layers.v.W.shape[1] :] = 0
        name = next(name for name in ("attn", "attention", "self_attention") if hasattr(block.module, name))
        results: list[Any] = []
        attention = getattr(block.module, name)
        handle = attention.register_forward_hook(lambda m, args, out, results=results: results.append(out))
        output(model, images)
        handle.remove()
        result = results[0][0] if isinstance(results[0], tuple) else results[0]
        torch.testing.assert_close(result, expected.expand_as(result), rtol=1e-9, atol=1e-9)


def test_the_parts_of_the_heads_make_the_whole() -> None:
    block = blocks(CASES[0].model())[0]
    layers = attention_projections(block)
    heads = [layers.of(head) for head in range(layers.heads)]
    for index, whole in enumerate(layers.of(None)[:3]):
        torch.testing.assert_close(torch.cat([head[index].W for head in heads], 1), whole.W)
        torch.testing.assert_close(torch.cat([head[index].b for head in heads]), whole.b)
    torch.testing.assert_close(torch.cat([head[3].W for head in heads]), layers.out.W)


@with_mlp
def test_the_feed_forward_layers_are_the_first_and_the_last(case: Case, monkeypatch) -> None:
    model, images = case.model(dtype=torch.float64), case.input(dtype=torch.float64)
    hidden: dict[int, tuple[Tensor, Tensor]] = {}
    handles = []
    for block in blocks(model):
        if not isinstance(place := block.place("mlp.middle"), str):
            keep = lambda m, args, out, index=block.index: hidden.update({index: (args[0], out)})  # noqa: E731
            handles.append(place.owner.register_forward_hook(keep))
    inputs = inputs_of(model, images)
    with operands(model, monkeypatch) as seen:
        output(model, images)
    assert hidden
    for index, (given, result) in hidden.items():
        block = blocks(model)[index]
        layers = feed_forward(block)
        assert not isinstance(layers, str)
        torch.testing.assert_close(layers.last(given), result, rtol=1e-9, atol=1e-9)
        first = layers.first(inputs[index, "ffn"])
        given = given.transpose(0, 1) if case.name == "torch encoder pre-norm" else given
        if layers.remark.startswith("gated"):
            # What goes into the last layer is the activated gate times this.
            gates = [x for x in seen.of[index] if x.shape == first.shape]
            assert any(torch.allclose(functional.silu(gate) * first, given) for gate in gates)
        elif "leaves out" in layers.remark:
            assert "dwconv" in layers.remark
        else:
            shape = given.shape
            activations = [x.transpose(0, 1) if x.shape[:2] != shape[:2] else x for x in seen.of[index]]
            assert any(
                x.shape == shape and torch.allclose(x.reshape(first.shape), first) for x in activations
            )


def test_the_convolution_and_its_image() -> None:
    case = next(case for case in CASES if case.name == "timm convmixer")
    model, images = case.model(), case.input()
    inputs = inputs_of(model, images)
    for block in blocks(model):
        layer = depthwise_convolution(block)
        assert layer is block.module.fn[0]
        assert inputs[block.index, "convolution"].shape == (2, 16, 4, 4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"stride": 2}, "stride=(2, 2)"),
        ({"padding": 0}, "changes the size"),
        ({"padding_mode": "reflect"}, ""),
    ],
)
def test_a_convolution_that_changes_the_size_is_named(change: dict[str, Any], named: str) -> None:
    case = next(case for case in CASES if case.name == "timm convmixer")
    block = blocks(case.model())[0]
    block.module.fn[0] = nn.Conv2d(16, 16, 3, groups=16, **({"padding": 1} | change))
    reason = depthwise_convolution(block)
    assert isinstance(reason, str)
    assert named in reason


def test_eva_with_a_layer_for_each_of_q_k_and_v(monkeypatch) -> None:
    settings = {"img_size": SIDE, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    torch.manual_seed(0)
    model = timm.create_model("eva02_tiny_patch14_224", qkv_fused=False, **settings).double().eval()
    assert model.blocks[0].attn.qkv is None
    images = torch.randn(2, 3, SIDE, SIDE, dtype=torch.float64)
    inputs = inputs_of(model, images)
    layers = attention_projections(blocks(model)[0])
    with operands(model, monkeypatch) as seen:
        model(images)
    assert is_among(split_heads(layers.v(inputs[0, "v"]), 2), seen.of[0])
    assert is_among(split_heads(layers.k(inputs[0, "k"]), 2), seen.of[0], rows=slice(0, 1))


def test_names_of_earlier_versions_of_transformers() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_attention_heads = 2
            self.query, self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    attention = nn.Module()
    attention.attention, attention.output = Inner(), nn.Module()
    attention.output.dense = nn.Linear(4, 4)
    module = nn.Module()
    module.attention = attention
    layers = attention_projections(Block(0, "layer.0", module, OWN_ROW))
    assert layers.heads == 2
    torch.testing.assert_close(layers.k.W, attention.attention.key.weight.double().mT)
    torch.testing.assert_close(layers.out.b, attention.output.dense.bias.double())


OWN_ROW = BlockRow(
    "own",
    (Add("attention"), Add("ffn")),
    taps(attention=after("mix"), mlp="ff", last_linear="ff.out"),
)


def test_unknown_projections_are_an_error_that_names_what_was_found() -> None:
    block = Block(0, "blocks.0", OwnBlock(8), OWN_ROW)
    with pytest.raises(
        ValueError, match=r"expected the projections \(qkv\) or .* in blocks.0.mix \(Linear\)"
    ):
        attention_projections(block)
    block.module.attn = nn.Sequential(nn.Linear(8, 24), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"blocks.0.attn \(Sequential\), found the linear layers 0, 1 in it"):
        attention_projections(block)


def test_missing_parts_are_named() -> None:
    module = OwnBlock(8)
    module.attn = nn.Module()
    module.attn.qkv = nn.Linear(8, 24)
    block = Block(0, "blocks.0", module, OWN_ROW)
    with pytest.raises(ValueError, match="expected the output projection proj or o_proj"):
        attention_projections(block)
    module.attn.proj = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="expected the number of heads as num_heads"):
        attention_projections(block)
    module.attn = nn.MultiheadAttention(8, 2, kdim=4, vdim=4)
    with pytest.raises(ValueError, match="expected in_proj_weight"):
        attention_projections(block)


def test_an_mlp_with_an_unknown_first_layer_is_an_error() -> None:
    module = OwnBlock(8)
    module.ff.inner = nn.Sequential(nn.Linear(8, 16))
    with pytest.raises(ValueError, match=r"expected the first linear layer of an MLP in blocks\.0\.ff"):
        feed_forward(Block(0, "blocks.0", module, OWN_ROW))


def test_shared_weights_are_refused() -> None:
    first, second = (Block(i, f"blocks.{i}", OwnBlock(8), OWN_ROW) for i in range(2))
    weight = nn.Parameter(torch.zeros(2, 2))
    with (
        pytest.raises(ValueError, match=r"blocks.1 and blocks.0 share their weights"),
        watching_inputs([(first, {"ffn": weight}), (second, {"ffn": weight})], lambda *_: None),
    ):
        pass


def test_nothing_is_watched_afterwards() -> None:
    case = CASES[0]
    model, images = case.model(), case.input()
    seen = []
    with pytest.raises(RuntimeError, match="stop"), watching_inputs(sources_of(blocks(model)), _stop):
        model(images)
    with watching_inputs(sources_of(blocks(model)), lambda *found: seen.append(found)):
        pass
    model(images)
    assert not seen


def _stop(*_: Any) -> None:
    raise RuntimeError("stop")
