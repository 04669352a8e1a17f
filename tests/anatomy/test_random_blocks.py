"""Random programs of blocks: their joins are found rightly, or the block is refused."""

import importlib.util
import itertools
import linecache
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import wellposed as wp

HEAD = """
import torch
from torch import nn


def residual(x, branch):
    return x + branch


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(2, 5, 5))

    def forward(self, x):
        B, N, D = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, 2, 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT + self.bias).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(B, N, D))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = self.fc1(x)
        x = x * (1 + 0.1 * x)
        return self.fc2(x)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x):
        return self.scale * x


class Add(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, branch, skip):
        return self.drop(branch) + skip


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        for i in range(3):
            setattr(self, f"norm{i}", nn.LayerNorm(8))
            setattr(self, f"gate{i}", Gate())
            setattr(self, f"add{i}", Add())
            setattr(self, f"attn{i}", Attention())
            setattr(self, f"mlp{i}", Mlp())
            setattr(self, f"drop{i}", nn.Dropout(0.2))
        self.position = nn.Parameter(torch.randn(1, 5, 8))

"""

TAIL = """

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.double()
        self.eval()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""

# How a skip is added; all but the last two can be reached.
FORMS = {
    "left": "{x} = {x} + {b}",
    "right": "{x} = {b} + {x}",
    "in place": "{x} += {b}",
    "torch.add": "{x} = torch.add({x}, {b})",
    "method": "{x} = {x}.add({b})",
    "other name": "skip = {x}\n{x} = skip + {b}",
    "helper": "{x} = self.step{i}({x})",
    "submodule": "{x} = self.add{i}({b}, {x})",
    "if": "if self.training and self.drop0 is None:\n    {x} = {x} + {b} * 1\nelse:\n    {x} = {x} + {b}",
    "function": "{x} = residual({x}, {b})",
    "fused": "{x} = torch.addcmul({x}, torch.ones_like({x}), {b})",
}
UNREACHABLE = {"function", "fused"}


@dataclass(frozen=True)
class Step:
    """x -> x + f(x), written in one of many ways."""

    what: str  # attn, mlp
    norm: str  # pre, post, after (of the branch), none
    form: str
    gate: bool
    drop: bool
    decoy: bool  # an add that is no skip

    def branch(self, i: int, x: str) -> str:
        inside = f"self.norm{i}({x})" if self.norm == "pre" else x
        text = f"self.{self.what}{i}({inside})"
        if self.norm == "after":
            text = f"self.norm{i}({text})"
        if self.gate:
            text = f"self.gate{i}({text})"
        return f"self.drop{i}({text})" if self.drop else text

    def source(self, i: int) -> str:
        lines = FORMS[self.form].format(x="x", b=self.branch(i, "x"), i=i)
        if self.decoy:
            lines += "\nx = x + self.position"
        if self.norm == "post":
            lines += f"\nx = self.norm{i}(x)"
        return lines

    def helper(self, i: int) -> str:
        return f"def step{i}(self, y):\n    y = y + {self.branch(i, 'y')}\n    return y\n"

    def compute(self, block: nn.Module, i: int, x: Tensor, keep: bool) -> Tensor:
        norm = getattr(block, f"norm{i}")
        y = getattr(block, f"{self.what}{i}")(norm(x) if self.norm == "pre" else x)
        y = norm(y) if self.norm == "after" else y
        y = y * getattr(block, f"gate{i}").scale if self.gate else y
        x = x + y if keep else y
        x = x + block.position if self.decoy else x
        return norm(x) if self.norm == "post" else x


STEP = st.builds(
    Step,
    what=st.sampled_from(["attn", "mlp"]),
    norm=st.sampled_from(["pre", "post", "after", "none"]),
    form=st.sampled_from(list(FORMS)),
    gate=st.booleans(),
    drop=st.booleans(),
    decoy=st.booleans(),
)
_NUMBER = itertools.count()


def built(steps: list[Step]) -> nn.Module:
    body = "\n".join(step.source(i) for i, step in enumerate(steps))
    forward = "def forward(self, x):\n" + textwrap.indent(body + "\nreturn x", "    ")
    helpers = "\n".join(step.helper(i) for i, step in enumerate(steps))
    name = f"random_block_{next(_NUMBER)}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(HEAD + textwrap.indent(f"{forward}\n\n{helpers}", "    ") + TAIL)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        # The source is read when the seam opens, which is later than this folder lasts.
        linecache.getlines(str(path))
        linecache.cache[str(path)] = (len(path.read_text()), None, *linecache.cache[str(path)][2:])
    return module.Model()


X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # a failure names its program; a smaller one would take minutes to find
    suppress_health_check=[HealthCheck.too_slow],
)
@given(steps=st.lists(STEP, min_size=2, max_size=3), which=st.sampled_from(["attention", "ffn", "all"]))
def test_a_random_block_is_edited_rightly_or_refused(steps: list[Step], which: str) -> None:
    model = built(steps)
    plain = model(X.clone())
    wanted = {"attention": ["attn"], "ffn": ["mlp"], "all": ["attn", "mlp"]}[which]
    hidden = any(step.form in UNREACHABLE for step in steps)
    there = any(step.what in wanted for step in steps)
    if hidden or not there:
        # A block whose skips are all hidden is not seen at all.
        with pytest.raises((wp.SeamError, wp.UnknownModelError) if hidden else ValueError):
            wp.remove_skips(model, which, example=X)
    else:
        wp.remove_skips(model, which, example=X)
        expected = X
        for block in model.layers:
            for i, step in enumerate(steps):
                expected = step.compute(block, i, expected, keep=step.what not in wanted)
        torch.testing.assert_close(model(X.clone()), expected, rtol=1e-9, atol=1e-9)
        wp.restore(model)
    assert torch.equal(model(X.clone()), plain)
    assert not wp.edits(model)
