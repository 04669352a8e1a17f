"""The seam of every family: it changes nothing, and its joins are the residual adds."""

import copy

import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed.anatomy import Add, BlockRow, after, blocks, taps, teach, verify
from wellposed.anatomy.seam import close_seam, is_seamed, joins, open_seam
from wellposed.anatomy.table import BLOCKS, EMBEDDINGS
from zoo import BY_NAME, CASES, Case, each_kind, every_family, output


def open_all(model: nn.Module) -> None:
    for block in blocks(model):
        open_seam(block.module, block.row)


def test_every_row_of_the_table_has_a_model() -> None:
    classes = {
        f"{cls.__module__}.{cls.__qualname__}"
        for case in CASES
        for module in case.model().modules()
        for cls in type(module).__mro__
    }
    assert {*BLOCKS, *EMBEDDINGS} <= classes


@every_family
def test_every_block_is_found_with_its_skips(case: Case) -> None:
    found = blocks(case.model())
    assert len(found) == case.blocks
    assert set(found[0].row.roles) == set(case.roles)


@every_family
def test_an_open_seam_changes_nothing(case: Case) -> None:
    model, x = case.model(), case.input()
    expected, keys = output(model, x), list(model.state_dict())
    names = [type(module).__name__ for module in model.modules()]
    open_all(model)
    assert torch.equal(output(model, x), expected)
    assert list(model.state_dict()) == keys
    assert [type(m).__name__ for m in model.modules() if type(m).__name__ != "Join"] == names


@each_kind
def test_an_open_seam_leaves_the_gradients(case: Case) -> None:
    model, x = case.model(), case.input()
    seamed = copy.deepcopy(model)
    open_all(seamed)
    output(model, x).square().sum().backward()
    output(seamed, x).square().sum().backward()
    for (name, expected), got in zip(model.named_parameters(), seamed.parameters(), strict=True):
        assert (expected.grad is None) == (got.grad is None), name
        if expected.grad is not None:
            assert torch.equal(expected.grad, got.grad), name


@every_family
def test_the_joins_carry_the_residual_stream(case: Case) -> None:
    model, x = case.model(), case.input()
    expected = output(model, x)
    roles = sum(len(block.row.roles) for block in blocks(model))
    assert verify(model, x) == roles
    assert not any(is_seamed(module) for module in model.modules())
    assert torch.equal(output(model, x), expected)


@each_kind
def test_the_chain_holds_with_skips_removed(case: Case) -> None:
    model, x = case.model(), case.input()
    wp.remove_skips(model, "all")
    verify(model, x)
    assert len(wp.edits(model)) == sum(len(block.row.roles) for block in blocks(model))


def test_verify_keeps_training_mode_and_hooks() -> None:
    case = BY_NAME["timm vit"]
    model = case.model().train()
    model.blocks[0].eval()
    before = [(module.training, len(module._forward_hooks)) for module in model.modules()]
    verify(model, case.input())
    assert [(module.training, len(module._forward_hooks)) for module in model.modules()] == before


class Wrong(nn.Module):
    """Adds that are not the residual ones stand beside those that are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.ff = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.norm(x)
        y = y + self.mix(y)
        x = x + y
        z = self.ff(x)
        return x + z


@pytest.fixture
def forget_what_was_taught():
    before = dict(BLOCKS)
    yield
    BLOCKS.clear()
    BLOCKS.update(before)


@pytest.mark.usefixtures("forget_what_was_taught")
@pytest.mark.parametrize(
    ("adds", "message"),
    [
        # counts right, but the first is an add inside the branch
        ((Add("attention", "y"), Add("ffn", "x"), Add("local", "x")), "not the residual stream"),
        ((Add("attention", "x"),), "found more than 1"),
        ((Add("attention", "x"), Add("ffn", "x"), Add("local", "x")), "found 2"),
        ((Add("attention", "q"), Add("ffn", "q")), "found 0"),
    ],
)
def test_wrong_adds_are_refused(adds: tuple[Add, ...], message: str) -> None:
    teach(Wrong, BlockRow("wrong", adds, taps(attention=after("mix"), mlp="ff", last_linear="ff")))
    model = nn.Sequential(Wrong())
    with pytest.raises(wp.SeamError, match=message):
        verify(model, torch.randn(2, 3, 4))
    assert type(model[0]) is Wrong
    assert not joins(model[0])


@pytest.mark.usefixtures("forget_what_was_taught")
def test_right_adds_of_the_same_class_pass() -> None:
    row = BlockRow(
        "right", (Add("attention"), Add("ffn")), taps(attention=after("mix"), mlp="ff", last_linear="ff")
    )
    teach(Wrong, row)
    assert verify(nn.Sequential(Wrong(), Wrong()), torch.randn(2, 3, 4)) == 4


def test_closing_a_seam_restores_the_class() -> None:
    model = BY_NAME["timm vit"].model()
    before = type(model.blocks[0])
    open_all(model)
    assert type(model.blocks[0]) is not before
    assert isinstance(model.blocks[0], before)
    for block in blocks(model):
        close_seam(block.module)
    assert type(model.blocks[0]) is before


def test_a_forward_patched_on_the_instance_is_refused() -> None:
    model = BY_NAME["timm vit"].model()
    model.blocks[1].forward = model.blocks[1].forward
    with pytest.raises(wp.SeamError, match="on the instance"):
        wp.remove_skips(model, "attention")
    assert not any(is_seamed(module) for module in model.modules())


def test_a_traceback_shows_the_seamed_source() -> None:
    import inspect

    model = BY_NAME["timm vit"].model()
    open_all(model)
    assert "self.join_attention(x, self.drop_path1(" in inspect.getsource(type(model.blocks[0]).forward)
