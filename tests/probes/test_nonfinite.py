"""Where NaN first appears, in a forward and in a backward pass."""

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
import zoo
from untouched import assert_same, fingerprint
from wellposed.probes import first_nonfinite

VIT = zoo.BY_NAME["timm vit"]


class Divides(nn.Module):
    """Infinite outputs, of finite weights."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 0


class RootOfZero(nn.Module):
    """Finite, with an infinite derivative at 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * 0).abs().sqrt()


def squares(output: Tensor) -> Tensor:
    return output.square().sum()


def test_nothing_is_bad() -> None:
    model = VIT.model()
    assert first_nonfinite(model, VIT.input(2)) is None
    assert first_nonfinite(model, VIT.input(2), squares) is None


def test_a_weight() -> None:
    model = VIT.model()
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[3, 4] = float("inf")
    found = first_nonfinite(model, VIT.input(2))
    assert found is not None
    assert (found.what, found.name) == ("weight", "blocks.1.attn.qkv.weight")
    assert str(found) == "the weight of blocks.1.attn.qkv is not finite"


def test_an_output() -> None:
    model = VIT.model()
    model.blocks[1].mlp.act = Divides()
    found = first_nonfinite(model, VIT.input(2), squares)
    assert str(found) == "the first output that is not finite is of blocks.1.mlp.act"


def test_a_loss() -> None:
    found = first_nonfinite(VIT.model(), VIT.input(2), lambda output: output.sum() / 0)
    assert str(found) == "all outputs are finite, the loss is not"


def test_a_gradient() -> None:
    model = VIT.model()
    model.blocks[1].mlp.act = RootOfZero()
    assert first_nonfinite(model, VIT.input(2)) is None
    found = first_nonfinite(model, VIT.input(2), squares)
    # What the layer before the root gets back is the first that is not finite.
    assert found is not None
    assert (found.what, found.name) == ("gradient", "the output of blocks.1.mlp.fc1")


@pytest.mark.parametrize("is_training", [True, False])
def test_it_leaves_no_trace(is_training: bool) -> None:
    model = zoo.BY_NAME["timm convmixer"].model().train(is_training)  # with running statistics
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = fingerprint(model)
    assert first_nonfinite(model, zoo.BY_NAME["timm convmixer"].input(2), squares) is None
    assert_same(before, fingerprint(model))
    assert all((parameter.grad == 1).all() for parameter in model.parameters())


@pytest.mark.parametrize("what", [None, "conditioning", "tokens"])
def test_a_diagnosis_says_where(what: str | None) -> None:
    model = VIT.model()
    model.blocks[1].mlp.act = Divides()
    (note,) = (note for note in wp.diagnose(model, VIT.input(2), what=what).notes if "not finite" in note)
    assert note.startswith("not finite: the first output that is not finite is of blocks.1.mlp.act; try: ")


def test_a_diagnosis_of_gradients_says_where() -> None:
    model = VIT.model()
    model.blocks[1].mlp.act = RootOfZero()
    (note,) = wp.diagnose(model, VIT.input(2), what="gradients").notes
    assert "the first gradient that is not is by the output of blocks.1.mlp.fc1" in note
