"""Weights that pack queries, keys and values: what a run shows, whatever the layers are called."""

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

import wellposed as wp
from untouched import assert_same, fingerprint
from wellposed.anatomy import blocks
from wellposed.anatomy.projections import find_projections, packed_otherwise
from wellposed.errors import NoMeaningError
from wellposed.probes.parameters import weight_spectra

WIDTH, HEADS = 24, 4
PACKINGS = ("q k v", "k q v", "q v k", "by head", "wide values")


class Attention(nn.Module):
    """One ``qkv`` layer whose rows mean what ``packing`` says."""

    def __init__(self, packing: str, fused: bool) -> None:
        super().__init__()
        self.packing, self.fused = packing, fused
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH if packing == "wide values" else 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def split(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values (B, H, N, D/H)."""
        out = self.qkv(x)
        b, n, rows = out.shape
        if self.packing == "wide values":
            half = WIDTH // 2
            parts = out.split([half, half, WIDTH], -1)
        elif self.packing == "by head":
            return list(out.view(b, n, HEADS, rows // HEADS).transpose(1, 2).chunk(3, -1))
        else:
            named = dict(zip(self.packing.split(), out.chunk(3, -1), strict=True))
            parts = [named[letter] for letter in "qkv"]
        return [part.reshape(b, n, HEADS, -1).transpose(1, 2) for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if self.fused:
            out = functional.scaled_dot_product_attention(q, k, v)
        else:
            out = ((q @ k.mT) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, packing: str, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(packing, fused)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def model(packing: str, fused: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(packing, fused), Block(packing, fused)).eval()


def tokens() -> Tensor:
    return torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_packing_is_seen_and_not_believed(packing: str, fused: bool) -> None:
    own = model(packing, fused)
    found = blocks(own, tokens())
    before = fingerprint(own)
    wrong = packed_otherwise(own, found, tokens())
    assert_same(before, fingerprint(own))
    # Where logits are all that is seen, queries and keys are alike.
    is_right = packing == "q k v" or (packing == "k q v" and not fused)
    if is_right:
        assert not wrong
        assert [[each.packed for each in layers] for layers in find_projections(own, found).values()] == [
            ["qkv"],
            ["qkv"],
        ]
        return
    assert set(wrong) == {0, 1}
    assert "packs them otherwise than one after another" in wrong[0]
    for edit in (wp.condition_weights, lambda m, **more: wp.initialise(m, "mimetic", **more)):
        with pytest.raises(NoMeaningError, match="has no meaning for"):
            edit(own, example=tokens())
    assert_same(before, fingerprint(own))
    positions = {record.position for record in weight_spectra(own, example=tokens())}
    assert positions == {"attn.qkv", "attn.proj", "mlp.0", "mlp.2"}  # the packed weight as one


def test_without_a_run_nothing_is_assumed() -> None:
    own = model("q k v")
    blocks(own, tokens())
    with pytest.raises(NoMeaningError, match=r"it takes a run of the model .* give an input as example="):
        wp.condition_weights(own)
    assert not wp.edits(own)
    assert len(wp.condition_weights(own, example=tokens())) == 2
    # An edit does not hide how they are packed.
    positions = [record.position for record in weight_spectra(own)]
    assert "attn.qkv v" in positions


def test_an_edit_of_the_weight_does_not_hide_the_packing() -> None:
    own = model("q k v")
    wp.normalise_spectrum(own, example=tokens())
    assert not packed_otherwise(own, blocks(own), tokens())


@pytest.mark.libraries("timm")
@pytest.mark.parametrize("name", ["tiny_vit_5m_224", "maxvit_pico_rw_256", "efficientformer_l1"])
def test_models_that_pack_by_head(name: str) -> None:
    own = timm.create_model(name)
    with pytest.raises(NoMeaningError, match="packs them otherwise than one after another"):
        wp.condition_weights(own)
    assert not wp.edits(own)


@pytest.mark.parametrize("names", [("to_q", "to_k", "to_v"), ("q_lin", "k_lin", "v_lin"), ("wq", "wk", "wv")])
def test_layers_apart_need_no_run(names: tuple[str, str, str]) -> None:
    class Apart(Attention):
        def __init__(self, packing: str, fused: bool) -> None:
            super().__init__(packing, fused)
            del self.qkv
            for name in names:
                setattr(self, name, nn.Linear(WIDTH, WIDTH))

        def split(self, x: Tensor) -> list[Tensor]:
            b, n, _ = x.shape
            made = [getattr(self, name)(x) for name in names]
            return [part.view(b, n, HEADS, -1).transpose(1, 2) for part in made]

    own = model("q k v")
    for block in own:
        block.attn = Apart("q k v", True)
    blocks(own, tokens())
    made = wp.condition_weights(own, "kv", 2.0)
    assert [edit.module for edit in made] == [f"{i}.attn.{name}" for i in (0, 1) for name in names[1:]]
