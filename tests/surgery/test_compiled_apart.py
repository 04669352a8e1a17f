"""A compiled plain model and a compiled edited one of the same class are two programs."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

import wellposed as wp

pytestmark = pytest.mark.slow

EDITS = {
    "embedding": lambda model: wp.gray_tokens(model, 0.5, "dct"),
    "pixels": lambda model: wp.gray_tokens(model, 0.5, "dct", "pixels"),
    "blocks": lambda model: wp.gray_tokens(model, 0.5, "dct", "blocks", blocks=0),
    "broadcast": wp.broadcast_context,
    "skips": lambda model: wp.remove_skips(model, "attention"),
    "uniform": wp.uniform_heads,
    "blocks and skips": lambda model: (
        wp.gray_tokens(model, 0.5, "dct", "blocks", blocks=0),
        wp.remove_skips(model, "attention"),
    ),
    "skips and blocks": lambda model: (
        wp.remove_skips(model, "attention"),
        wp.gray_tokens(model, 0.5, "dct", "blocks", blocks=0),
    ),
}


def small_vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=5).eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_the_edit_is_in_the_program(edit, images) -> None:
    torch._dynamo.reset()
    plain, edited = small_vit(), small_vit()
    expected_plain = torch.compile(plain, backend="eager")(images)
    edit(edited)
    program = torch.compile(edited, backend="eager")
    # The DCT of eager code on a CPU is an FFT, that of compiled code is two products.
    torch.testing.assert_close(program(images), edited(images))
    assert not torch.allclose(edited(images), expected_plain, atol=1e-3)
    # And back: what was restored runs the plain program again.
    wp.restore(edited)
    assert torch.equal(torch.compile(edited, backend="eager")(images), expected_plain)


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_the_mark_leaves_no_trace(edit, images) -> None:
    model = small_vit()
    classes = [type(module) for module in model.modules()]
    edit(model)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for again in (copied, pickled):
        assert torch.equal(again(images), model(images))
        assert wp.edits(again) == wp.edits(model)
        assert [type(module) for module in again.modules()] == [type(module) for module in model.modules()]
        wp.restore(again)
        assert [type(module) for module in again.modules()] == classes


def test_two_edits_that_differ_in_a_number_are_two_programs(images) -> None:
    torch._dynamo.reset()
    for eps in (0.3, 0.9):
        model = small_vit()
        wp.gray_tokens(model, eps, "dct")
        torch.testing.assert_close(torch.compile(model, backend="eager")(images), model(images))
