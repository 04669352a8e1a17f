"""A library whose next release is written otherwise: edited rightly, or refused at the edit."""

import importlib.util
import itertools
import textwrap
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp

HEAD = """
import functools

import torch
from torch import nn


def checkpointed(function):
    @functools.wraps(function)
    def forward(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return function(self, *args, **kwargs)

    return forward


def add_residual(x, branch):
    return x + branch


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, scale=1.0):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v)) * scale


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(8), Attention()
        self.norm2, self.mlp = nn.LayerNorm(8), Mlp()

"""

TAIL = """

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x
"""

FIRST = """
def forward(self, x):
    x = x + self.attn(self.norm1(x))
    return x + self.mlp(self.norm2(x))
"""

NEXT_RELEASES = {
    "renames a variable": """
def forward(self, hidden):
    residual = hidden
    hidden = self.attn(self.norm1(hidden)) + residual
    residual = hidden
    return residual + self.mlp(self.norm2(hidden))
""",
    "moves an add into a helper method": """
def forward(self, x):
    x = self._attend(x)
    return x + self.mlp(self.norm2(x))

def _attend(self, x):
    x += self.attn(self.norm1(x))
    return x
""",
    "wraps forward": """
@checkpointed
def forward(self, x):
    x = x + self.attn(self.norm1(x))
    return x + self.mlp(self.norm2(x))
""",
    "changes an argument": """
def forward(self, x, *, scale=1.0, return_tuple=True):
    x = torch.add(x, self.attn(self.norm1(x), scale=scale))
    x = x.add(self.mlp(self.norm2(x)))
    return (x,) if return_tuple else x
""",
    "adds in another arm too": """
def forward(self, x, fast=False):
    if fast:
        x = x + self.attn(self.norm1(x), 1.0)
    else:
        x = x + self.attn(self.norm1(x))
    return x + self.mlp(self.norm2(x))
""",
}

REFUSED = {
    "moves an add into a function": """
def forward(self, x):
    x = add_residual(x, self.attn(self.norm1(x)))
    return x + self.mlp(self.norm2(x))
""",
    "adds among other things": """
def forward(self, x):
    x = torch.addcmul(x, self.norm1.weight, self.attn(self.norm1(x)))
    return x + self.mlp(self.norm2(x))
""",
    "goes another way in training": """
def forward(self, x):
    if self.training:
        x = add_residual(x, self.attn(self.norm1(x)))
    else:
        x = x + self.attn(self.norm1(x))
    return x + self.mlp(self.norm2(x))
""",
    "adds in a way that hides the skip": """
def forward(self, x):
    x = torch.stack([x, self.attn(self.norm1(x))]).sum(0)
    return x + self.mlp(self.norm2(x))
""",
}

_NUMBER = itertools.count()


def release(methods: str, tmp_path) -> ModuleType:
    """The stand-in library with these methods of its block, imported afresh."""
    name = f"stand_in_{next(_NUMBER)}"
    path = tmp_path / f"{name}.py"
    path.write_text(HEAD + textwrap.indent(methods.strip(), "    ") + TAIL)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))


def without_attention_skip(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer.attn(layer.norm1(x))
        x = x + layer.mlp(layer.norm2(x))
    return x


@pytest.mark.parametrize("change", ["nothing", *NEXT_RELEASES])
def test_the_next_release_is_edited_rightly(change: str, tmp_path) -> None:
    model = release({"nothing": FIRST, **NEXT_RELEASES}[change], tmp_path).Model()
    plain = model(X.clone())
    wp.remove_skips(model, "attention", example=X)
    torch.testing.assert_close(model(X.clone()), without_attention_skip(model, X.clone()))
    wp.restore(model)
    assert torch.equal(model(X.clone()), plain)


@pytest.mark.parametrize("change", REFUSED)
def test_what_could_not_be_proven_is_refused_at_the_edit(change: str, tmp_path) -> None:
    model = release(REFUSED[change], tmp_path).Model()
    plain = model(X.clone())
    with pytest.raises(wp.SeamError, match=r"layers\.0 and 1 more cannot be edited.*teach"):
        wp.remove_skips(model, "attention", example=X)
    assert torch.equal(model(X.clone()), plain)
    assert not wp.edits(model)


def test_both_arms_of_an_if_are_joined(tmp_path) -> None:
    model = release(NEXT_RELEASES["adds in another arm too"], tmp_path).Model()
    wp.remove_skips(model, "attention", example=X)
    block = model.layers[0]
    branch = block.attn(block.norm1(X))
    for fast in (False, True):
        torch.testing.assert_close(block(X, fast=fast), branch + block.mlp(block.norm2(branch)))


def test_a_wrapper_goes_on_working(tmp_path) -> None:
    model = release(NEXT_RELEASES["wraps forward"], tmp_path).Model()
    wp.remove_skips(model, "attention", example=X)
    before = model.layers[0].calls
    model(X)
    assert model.layers[0].calls == before + 1


def test_a_refusal_names_the_version_and_what_is_tested(tmp_path, monkeypatch) -> None:
    from wellposed.anatomy import proof

    monkeypatch.setattr(proof.importlib.metadata, "version", lambda library: "2.0")
    monkeypatch.setitem(proof.proofs().tested, f"stand_in_{next(_NUMBER) + 1}", ["1.0", "1.4"])
    model = release(REFUSED["moves an add into a function"], tmp_path).Model()
    with pytest.raises(wp.SeamError, match=r"2\.0 is installed; tested are 1\.0 to 1\.4"):
        wp.broadcast_context(model, example=X)
