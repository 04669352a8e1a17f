"""Methods that something is wrapped around: the seam reaches the function inside them."""

import functools

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.anatomy import Add, BlockRow, after, taps, teach
from wellposed.anatomy.table import BLOCKS
from zoo import families, output

CALLS: list[str] = []


def counted(function):
    @functools.wraps(function)
    def counting(self, *args, **kwargs):
        CALLS.append(type(self).__name__)
        return function(self, *args, **kwargs)

    return counting


def silent(text):
    def around(function):
        def inner(self, x, *, by=1.0):
            CALLS.append(text)
            return function(self, x, by=by)

        return inner

    return around


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)

    def plain(self, x: Tensor, *, by: float = 1.0) -> Tensor:
        x = x + by * self.attn(x)
        return x + self.mlp(x)


class Decorated(Block):
    @counted
    @silent("inner")
    def forward(self, x: Tensor, *, by: float = 1.0) -> Tensor:
        x = x + by * self.attn(x)
        return x + self.mlp(x)


class NotKept(Block):
    forward = functools.partialmethod(Block.plain, by=2.0)


@pytest.fixture(autouse=True)
def forget():
    before = dict(BLOCKS)
    row = BlockRow("own", (Add("attention"), Add("ffn")), taps(attention=after("attn"), last_linear="mlp"))
    for cls in (Decorated, NotKept):
        teach(cls, row)
    CALLS.clear()
    yield
    BLOCKS.clear()
    BLOCKS.update(before)


def test_decorators_of_ones_own_go_on_working() -> None:
    block, x = Decorated(), torch.randn(2, 3, 4)
    model = nn.Sequential(block)
    wp.remove_skips(model, "attention")
    branch = 3.0 * block.attn(x)
    torch.testing.assert_close(block(x, by=3.0), branch + block.mlp(branch))
    assert CALLS == ["Decorated", "inner"]
    wp.restore(model)
    assert torch.equal(block(x), block.plain(x))


def test_what_cannot_be_reached_is_refused_at_the_edit() -> None:
    with pytest.raises(wp.SeamError, match=r"NotKept.forward is a partialmethod"):
        wp.remove_skips(nn.Sequential(NotKept()), "attention")


@families("hf vitmae", "hf dinov3", "hf swin", "hf vit")
def test_gradient_checkpointing_of_transformers_goes_on(case, monkeypatch) -> None:
    model, x = case.model(), case.input()
    wp.remove_skips(model, "attention", blocks=0)
    model.train()
    torch.manual_seed(0)  # DINOv3 jitters its positions in training
    output(model, x).square().mean().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    model.gradient_checkpointing_enable()
    block = wp.anatomy.blocks(model)[0].module
    checkpointed = []
    function = block._gradient_checkpointing_func
    monkeypatch.setattr(
        block, "_gradient_checkpointing_func", lambda *args: (checkpointed.append(1), function(*args))[1]
    )
    torch.manual_seed(0)
    output(model, x).square().mean().backward()
    assert checkpointed
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, plain[name], msg=name)
