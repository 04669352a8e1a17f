"""Bounds where a model packs its weights, windows or texts in other ways than most."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wellposed as wp
from probes.test_bounds import assert_block_is, assert_is, by, cubic, kappa, with_skip
from texts import albert, bert, gpt2, made, texts
from wellposed.anatomy import blocks
from wellposed.probes.bounds import bounds
from wellposed.probes.projections import attention_projections, feed_forward

TEXTS = texts((6, 6), 6)
_BERT = ("query", "key", "value")


def caught(model: nn.Module, *names: str) -> dict[str, np.ndarray]:
    """What goes into some modules."""
    seen: dict[str, np.ndarray] = {}
    handles = []
    for name in names:

        def keep(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            seen[name] = args[0].detach().numpy()

        handles.append(model.get_submodule(name).register_forward_pre_hook(keep))
    with torch.no_grad():
        model(**TEXTS)
    for handle in handles:
        handle.remove()
    return seen


def weight(layer: nn.Linear) -> np.ndarray:
    return layer.weight.detach().T.numpy()


def test_bert_against_numpy() -> None:
    model = made(bert)
    found = by(bounds(model, TEXTS, blocks=1))
    layer = model.encoder.layer[1]
    inputs = caught(model, "encoder.layer.1", "encoder.layer.1.intermediate")
    attention = layer.attention.self
    W = {letter: weight(getattr(attention, name)) for letter, name in zip("qkv", _BERT, strict=True)}
    W |= {"out": weight(layer.attention.output.dense), "b_v": attention.value.bias.detach().numpy()}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        P = model(**TEXTS, output_attentions=True).attentions[1].numpy()
    x = inputs["encoder.layer.1"]  # the norms of BERT come behind its sums
    assert_block_is(found, 1, x, W, P)
    heads = (P @ (x @ W["v"] + W["b_v"]).reshape(2, 6, 4, 8).swapaxes(1, 2)).swapaxes(1, 2).reshape(x.shape)
    branch = heads @ W["out"] + layer.attention.output.dense.bias.detach().numpy()
    C = kappa(W["q"]) * kappa(W["k"]) * kappa(W["v"])
    record = found[1, "kappa 4.1 softmax", None]
    assert_is(record, [kappa(y) for y in branch], [cubic(C, t) for t in x])
    sums = [kappa(y) for y in branch + x]
    assert_is(found[1, "kappa 4.2 softmax", None], sums, [with_skip(C, t) for t in x])
    x = inputs["encoder.layer.1.intermediate"]
    first, last = weight(layer.intermediate.dense), weight(layer.output.dense)
    limits = [kappa(first) * kappa(last) * kappa(t) for t in x]
    assert_is(found[1, "kappa ffn linear", None], [kappa(t @ first @ last) for t in x], limits)


def test_gpt2_against_numpy() -> None:
    model = made(gpt2)
    found = by(bounds(model, TEXTS, blocks=0))
    mlp = model.transformer.h[0].mlp
    x = caught(model, "transformer.h.0.mlp")["transformer.h.0.mlp"]
    first, last = mlp.c_fc.weight.detach().numpy(), mlp.c_proj.weight.detach().numpy()
    limits = [kappa(first) * kappa(last) * kappa(t) for t in x]
    assert_is(found[0, "kappa ffn linear", None], [kappa(t @ first @ last) for t in x], limits)
    branch = mlp(torch.from_numpy(x)).detach().numpy()
    assert_is(found[0, "kappa ffn", None], [kappa(y) for y in branch], limits)
    for measure in ("4.1 linear", "4.1 softmax", "4.2 linear", "4.2 softmax"):
        record = found[0, f"kappa {measure}", None]
        assert record.status == "not measured"
        assert "a mask hides some" in record.note


@pytest.mark.parametrize("make", [bert, gpt2, albert])
def test_the_layers_of_texts_make_what_the_model_makes(make: Any) -> None:
    model, x = made(make), torch.randn(2, 3, 32, dtype=torch.float64)
    block = blocks(model)[0]
    layers, ffn = attention_projections(block), feed_forward(block)
    assert not isinstance(ffn, str)
    parts = dict(block.module.named_modules())
    queries, keys, values = {
        bert: lambda: [parts[f"attention.self.{name}"](x) for name in _BERT],
        albert: lambda: [parts[f"attention.{name}"](x) for name in _BERT],
        gpt2: lambda: parts["attn.c_attn"](x).chunk(3, -1),
    }[make]()
    out, first, last = {
        bert: ("attention.output.dense", "intermediate.dense", "output.dense"),
        albert: ("attention.dense", "ffn", "ffn_output"),
        gpt2: ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    }[make]
    torch.testing.assert_close(layers.q(x), queries)
    torch.testing.assert_close(layers.k(x), keys)
    torch.testing.assert_close(layers.v(x), values)
    torch.testing.assert_close(layers.out(x), parts[out](x))
    torch.testing.assert_close(ffn.first(x), parts[first](x))
    hidden = ffn.first(x)
    torch.testing.assert_close(ffn.last(hidden), parts[last](hidden))
    assert layers.heads == 4


class Attention(nn.Module):
    """Attention in four windows of four tokens, or among all sixteen, with something of its own."""

    def __init__(self, kind: str, heads: int = 2) -> None:
        super().__init__()
        self.kind, self.num_heads = kind, heads
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        if self.kind.startswith("grid"):
            x = x.reshape(B, 4, 2, 2, D)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).reshape(B, N, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, N, D/H)
        match self.kind:
            case "grid, windows first":
                q, k, v = (y.unflatten(2, (4, 4)).transpose(1, 2) for y in (q, k, v))
            case "grid, heads first" | "cut behind":
                q, k, v = (y.unflatten(2, (4, 4)) for y in (q, k, v))
            case "pooled":
                k, v = (y.unflatten(2, (-1, 2)).mean(3) for y in (k, v))
            case "values normalised":
                v = functional.normalize(v, dim=-1)
        y = functional.scaled_dot_product_attention(q, k, v)
        y = y.transpose(1, 2) if self.kind == "grid, windows first" else y
        return self.proj(y.reshape(B, self.num_heads, N, -1).transpose(1, 2).reshape(B, N, D))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class OneBlock(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attn, self.mlp = attention, Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.patches, self.block = nn.Conv2d(3, 8, 4, 4), OneBlock(attention)

    def forward(self, images: Tensor) -> Tensor:
        return self.block(self.patches(images).flatten(2).mT)


def model_and_images(kind: str, heads: int = 2) -> tuple[Model, Tensor]:
    return found_in(Attention(kind, heads))


def found_in(attention: nn.Module) -> tuple[Model, Tensor]:
    """A model whose blocks are known, and two images for it."""
    generator = torch.Generator().manual_seed(0)
    model, images = Model(attention).double().eval(), torch.randn(2, 3, 16, 16, generator=generator).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    blocks(model, example=images)
    return model, images


@pytest.mark.parametrize("kind", ["grid, windows first", "grid, heads first"])
def test_windows_on_an_axis_of_their_own(kind: str) -> None:
    model, images = model_and_images(kind)
    found = by(bounds(model, images))
    attention = model.block.attn
    x = model.block.norm1(model.patches(images).flatten(2).mT).detach().reshape(2, 4, 4, 8)
    w, b = attention.qkv.weight.detach(), attention.qkv.bias.detach()
    q, k, v = (
        (x @ part.T + c).unflatten(-1, (2, 4)).transpose(2, 3)
        for part, c in zip(w.chunk(3), b.chunk(3), strict=True)
    )
    P = torch.softmax(q @ k.mT / 2, -1)  # (B, W, H, N, N)
    made_of = (P @ v).numpy()
    for head in range(2):
        record = found[0, "kappa 4.1 softmax", head]
        of_images = [np.median([kappa(y[head]) for y in image]) for image in made_of]
        assert record.samples == pytest.approx(of_images, rel=1e-6)
    assert (0, "kappa 4.1 softmax", 2) not in found
    wq, wk, wv = (part.T.numpy() for part in w.chunk(3))
    linear = [np.median([kappa(t @ wq @ wk.T @ t.T @ t @ wv) for t in image.numpy()]) for image in x]
    assert found[0, "kappa 4.1 linear", None].samples == pytest.approx(linear, rel=1e-5)
    assert "4 windows an image" in found[0, "kappa 4.1 linear", None].note
    # Density, over the same windows and heads.
    density = by_head(wp.diagnose(model, images, what="density").records)
    entropy = -(P * P.log()).sum(-1).mean((1, 3)) / np.log(4)
    for head in range(2):
        assert density[head].samples == pytest.approx(entropy[:, head].tolist(), abs=1e-6)
    assert set(density) == {None, 0, 1}


def by_head(records: Any) -> dict[int | None, Any]:
    return {record.head: record for record in records if record.measure == "entropy"}


def test_as_many_heads_as_windows_are_not_told_apart() -> None:
    model, images = model_and_images("grid, heads first", heads=4)
    density = by_head(wp.diagnose(model, images, what="density").records)
    assert set(density) == {None}
    assert "windows and heads, which lie on one axis" in density[None].note
    record = by(bounds(model, images))[0, "kappa 4.1 linear", None]
    assert "cannot be told apart" in record.note


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("pooled", "pooled or cut into windows after their projection"),
        ("cut behind", "pooled or cut into windows after their projection"),
        ("values normalised", "not the outputs of its value projection"),
    ],
)
def test_attention_among_other_tokens_has_no_bound(kind: str, reason: str) -> None:
    model, images = model_and_images(kind)
    found = by(bounds(model, images))
    for measure in ("4.1 linear", "4.1 softmax", "4.2 linear", "4.2 softmax"):
        record = found[0, f"kappa {measure}", None]
        assert record.status == "not measured"
        assert reason in record.note
    assert found[0, "kappa ffn", None].status == "ok"


class SideBySide(OneBlock):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        return x + (self.attn(y) + self.mlp(y))


def test_attention_and_ffn_that_are_added_as_one_have_no_bounds() -> None:
    model = Model(Attention("plain")).double().eval()
    model.block = SideBySide(Attention("plain")).double().eval()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert [block.row.roles for block in blocks(model, example=images)] == [("parallel",)]
    found = by(bounds(model, images, strict=False))
    assert {record.note for record in found.values()} == {
        "its attention and its FFN are added as one, and the propositions are of each alone"
    }


class ValuesOfTheirOwn(nn.MultiheadAttention):
    """Queries and keys with positions, values without, as in DETR."""

    def __init__(self) -> None:
        super().__init__(8, 2, batch_first=True)
        self.positions = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + self.positions, x + self.positions, x, need_weights=False)[0]


def test_values_of_other_tokens_have_no_bound() -> None:
    found = by(bounds(*found_in(ValuesOfTheirOwn())))
    assert found[0, "kappa 4.1 softmax", None].note == "its keys and its values are made of different tokens"


class Narrow(Attention):
    """Queries and keys of half the width of the values, all in one layer."""

    def __init__(self) -> None:
        super().__init__("narrow")
        self.qkv = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).split((4, 4, 8), dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


def test_parts_of_different_widths_are_no_equal_thirds() -> None:
    model, _ = found_in(Narrow())
    with pytest.raises(ValueError, match="expected queries, keys and values of one width"):
        attention_projections(blocks(model)[0])
