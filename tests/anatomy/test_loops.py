"""Encoders that add the skips of their layers in a loop, as vit-pytorch's: each layer is a block."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from own_blocks import (
    EDITS,
    INPUT,
    TOLERANCE,
    WIDTH,
    Attention,
    FeedForward,
    attend,
    by_hand,
    check,
    feed,
    made,
    norm,
    weights,
)
from wellposed.anatomy import blocks, verify
from wellposed.nn import TokenGraying
from wellposed.probes.subblock import sub_block

PARTS = ("0.0", "0.1.to_qkv", "0.1.to_out", "1.0", "1.1.inner", "1.1.out")


def pair() -> nn.ModuleList:
    return nn.ModuleList(
        [
            nn.Sequential(nn.LayerNorm(WIDTH), Attention()),
            nn.Sequential(nn.LayerNorm(WIDTH), FeedForward()),
        ]
    )


class Encoder(nn.Module):
    """The parts; how the loop goes is the subclass's."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(pair() for _ in range(depth))
        self.head = nn.LayerNorm(WIDTH)


class InALoop(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.head(x)


class Counted(Encoder):
    """With the number of the layer, a list of what came out, and something of the encoder's own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for index, (attn, ff) in enumerate(self.layers):
            y = attn(x)
            x = x + self.drop(y)
            x += self.drop(ff(x))
            seen.append((index, x.shape))
        assert [index for index, _ in seen] == [0, 1]
        return self.head(x)


class Chosen(Encoder):
    """Over what some code has made of the list."""

    def forward(self, x: Tensor) -> Tensor:
        layers = [layer for layer in self.layers if len(layer) == 2]
        for attn, ff in layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.head(x)


class InAHelper(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run_layers(x)[0])

    def run_layers(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        last = x
        for layer in self.layers:
            last = x
            x = torch.add(x, layer[0](x) * scale)
            x = x + layer[1](x)
        return x, last


LOOPS = (InALoop, Counted, Chosen, InAHelper)


def names_of(depth: int = 2, prefix: str = "") -> list[tuple[str, ...]]:
    return [tuple(f"{prefix}layers.{index}.{part}" for part in PARTS) for index in range(depth)]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("cls", LOOPS, ids=lambda cls: cls.__name__)
def test_each_layer_of_a_loop_is_a_block(cls: type[nn.Module], edit: str) -> None:
    model = made(cls)
    w = weights(model)
    check(model, edit, lambda edit: by_hand(w, names_of(), edit, start=1))
    assert [block.name for block in blocks(model)] == ["layers.0", "layers.1"]
    assert_plain(model, cls)


def assert_plain(model: Any, cls: type) -> None:
    assert type(model) is cls
    assert all(type(layer) is nn.ModuleList for layer in model.layers)


def test_one_layer_of_a_loop() -> None:
    model = made(InALoop)
    w = weights(model)
    edited = wp.remove_skips(model, "attention", blocks=[1], example=INPUT)
    assert [(edit.block, edit.module) for edit in edited] == [(1, "layers.1.join_attention")]
    x = by_hand(w, names_of()[:1], "nothing", start=1, head="")
    expected = _from(x, w, names_of()[1], "attention")
    torch.testing.assert_close(model(INPUT), expected, rtol=TOLERANCE, atol=TOLERANCE)


def _from(x: Tensor, w: dict[str, Tensor], names: tuple[str, ...], edit: str, head: str = "head") -> Tensor:
    norm1, qkv, to_out, norm2, inner, out = names
    branch = attend(norm(x, w, norm1), w, qkv, to_out)
    x = branch if edit == "attention" else x + branch
    x = x + feed(norm(x, w, norm2), w, inner, out)
    return norm(x, w, head) if head else x


def test_graying_of_the_input_of_a_layer() -> None:
    """Before the whole layer: its skip carries the grayed tokens too."""
    model = made(InALoop)
    w, plain = weights(model), model(INPUT)
    wp.gray_tokens(model, eps=0.5, where="blocks", blocks=[1], example=INPUT)
    x = by_hand(w, names_of()[:1], "nothing", start=1, head="")
    expected = _from(TokenGraying(0.5)(x), w, names_of()[1], "nothing")
    torch.testing.assert_close(model(INPUT), expected, rtol=1e-9, atol=1e-9)
    wp.restore(model)
    assert torch.equal(model(INPUT), plain)
    assert_plain(model, InALoop)


def edited() -> Any:
    model = made(InALoop)
    wp.remove_skips(model, "attention", blocks=[0], example=INPUT)
    wp.gray_tokens(model, eps=0.7, where="blocks", blocks=[1])
    wp.broadcast_context(model, "mlp.end")
    return model


def test_its_edits_survive() -> None:
    model = edited()
    expected = model(INPUT)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, pickled):
        assert torch.equal(other(INPUT), expected)
        assert wp.edits(other) == wp.edits(model)
    assert set(model.state_dict()) == set(made(InALoop).state_dict())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(INPUT), expected)
    wp.restore(model)
    assert_plain(model, InALoop)
    assert not torch.equal(model(INPUT), expected)
    assert torch.equal(copied(INPUT), expected)


def test_it_is_exported() -> None:
    model = made(InALoop)
    wp.remove_skips(model, "attention", example=INPUT)
    wp.broadcast_context(model, "mlp.end")
    exported = torch.export.export(model, (INPUT,), strict=True).module()
    torch.testing.assert_close(exported(INPUT), model(INPUT))


@pytest.mark.slow
def test_another_process_undoes_its_edits(tmp_path: Path) -> None:
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(edited()))
    code = (
        f"import pickle, sys, torch, wellposed as wp, {__name__} as t\n"
        "model = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert len(wp.edits(model)) == 4, wp.edits(model)\n"
        "wp.restore(model)\n"
        "t.assert_plain(model, t.InALoop)\n"
        "assert torch.equal(model(t.INPUT), t.made(t.InALoop)(t.INPUT))\n"
    )
    path = [str(Path(__file__).parents[2]), *sys.path]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"]
    subprocess.run([*command, str(tmp_path / "model.pickle")], check=True)


def test_probes_see_each_layer_and_leave_the_model() -> None:
    model = made(InALoop)
    plain = model(INPUT)
    diagnosis = wp.diagnose(model, INPUT, progress=False)
    kappas = {r.block for r in diagnosis.records if r.value is not None and "kappa" in r.measure}
    assert kappas == {0, 1}
    assert {r.block for r in diagnosis.records if "entropy" in r.measure} == {0, 1}
    assert_plain(model, InALoop)
    x = by_hand(weights(model), names_of()[:1], "nothing", start=1, head="")[:1].detach()
    layer = sub_block(model, INPUT[:1], 1, "block")
    torch.testing.assert_close(layer.input, x, rtol=TOLERANCE, atol=TOLERANCE)
    expected = _from(x, weights(model), names_of()[1], "nothing", head="")
    torch.testing.assert_close(layer.function(x), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert verify(model, INPUT) == 4
    assert torch.equal(model(INPUT), plain)
    assert_plain(model, InALoop)


def test_uniform_heads_of_a_layer() -> None:
    model = made(InALoop)
    wp.uniform_heads(model, heads=2, blocks=[0], example=INPUT)
    w = {name: value.clone() for name, value in model.state_dict().items()}
    w["layers.0.0.1.to_qkv.weight"][:WIDTH] = 0  # the queries
    expected = by_hand(w, names_of(), "nothing", start=1)
    torch.testing.assert_close(model(INPUT), expected, rtol=TOLERANCE, atol=TOLERANCE)
    wp.restore(model)
    assert_plain(model, InALoop)


class Skipping(Encoder):
    """A body that leaves its layer half done."""

    def forward(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:
            x = attn(x) + x
            if x.isnan().any():
                break
            x = ff(x) + x
        return self.head(x)


class Zipped(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        attentions, feeds = [a for a, _ in self.layers], [f for _, f in self.layers]
        for attn, ff in zip(attentions, feeds, strict=True):
            x = attn(x) + x
            x = ff(x) + x
        return self.head(x)


@pytest.mark.parametrize("cls", [Skipping, Zipped])
@pytest.mark.parametrize("edit", EDITS)
def test_a_loop_that_cannot_be_taken_apart_is_refused(cls: type[nn.Module], edit: str) -> None:
    model = made(cls)
    plain = model(INPUT)
    with pytest.raises(wp.SeamError, match=r"in a loop.*module of its own"):
        EDITS[edit](model)
    assert torch.equal(model(INPUT), plain)
    assert_plain(model, cls)
