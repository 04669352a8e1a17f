"""Models that no library has, written as people write theirs: edited with nothing taught, or refused.

Every edited model is compared with the same layers written out by hand in float64, from their weights alone.
"""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from own_blocks import (
    EDITS,
    HEADS,
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
    with_context,
)
from wellposed.anatomy import blocks, verify


class EinsumAttention(Attention):
    """As with einops, with no module for the shapes."""

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(x).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = torch.einsum("b n t h d -> t b h n d", qkv)
        dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * (WIDTH // HEADS) ** -0.5
        out = torch.einsum("b h i j, b h j d -> b h i d", dots.softmax(dim=-1), v)
        return self.to_out(torch.einsum("b h n d -> b n h d", out).reshape(x.shape))


class Block(nn.Module):
    """The parts; how they are added up is the subclass's."""

    attention: type[Attention] = Attention

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), self.attention()
        self.norm2, self.ff = nn.LayerNorm(WIDTH), FeedForward()


class Plain(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ff(self.norm2(x))


class Einsum(Plain):
    attention = EinsumAttention


class BranchFirst(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm1(x)) + x
        return self.ff(self.norm2(x)) + x


class TorchAdd(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.add(x, self.attn(self.norm1(x)))
        return torch.add(self.ff(self.norm2(x)), x)


class Augmented(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.attn(self.norm1(x))
        x += self.ff(self.norm2(x))
        return x


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x.add_(self.attn(self.norm1(x)))
        return x.add_(self.ff(self.norm2(x)))


class InPlaceStatement(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(self.attn(self.norm1(x)))
        x.add_(self.ff(self.norm2(x)))
        return x


class Helpers(Block):
    def mix(self, x: Tensor) -> Tensor:
        shortcut = x
        return shortcut + self.attn(self.norm1(x))

    def feed(self, x: Tensor) -> Tensor:
        return x + self.ff(self.norm2(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.feed(self.mix(x))


class Output(nn.Module):
    """The last layer of a branch with its skip, as in BERT."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.dense = inner

    def forward(self, hidden: Tensor, given: Tensor) -> Tensor:
        return self.dense(hidden) + given


class InSubmodules(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attn_output, self.ff_output = Output(self.attn.to_out), Output(self.ff.out)
        self.attn.to_out = self.ff.out = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn_output(self.attn(self.norm1(x)), x)
        return self.ff_output(self.ff(self.norm2(x)), x)


class Keywords(Block):
    def forward(self, *, hidden_states: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        hidden_states = hidden_states + self.attn(self.norm1(hidden_states))
        hidden_states = hidden_states + self.ff(self.norm2(hidden_states))
        return hidden_states, mask


class TupleStream(Block):
    def forward(self, given: tuple[Tensor, int]) -> tuple[Tensor, int]:
        x, layer = given
        x = x + self.attn(self.norm1(x))
        x = x + self.ff(self.norm2(x))
        return x, layer + 1


class Parallel(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        return x + (self.attn(y) + self.ff(y))


class ParallelBranchFirst(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        return self.ff(y) + self.attn(y) + x


class OneByOne(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        return x + self.attn(y) + self.ff(y)


class Model(nn.Module):
    def __init__(self, block: type[Block], *, shared: bool = False) -> None:
        super().__init__()
        first = block()
        self.blocks = nn.ModuleList([first] if shared else [first, block()])
        self.order = [0, 0, 0] if shared else [0, 1]
        self.head = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        for layer, index in enumerate(self.order):
            block = self.blocks[index]
            if isinstance(block, Keywords):
                x, _ = block(hidden_states=x)
            elif isinstance(block, TupleStream):
                x, _ = block((x, layer))
            else:
                x = block(x)
        return self.head(x)


WAYS = (
    Plain,
    Einsum,
    BranchFirst,
    TorchAdd,
    Augmented,
    InPlace,
    Helpers,
    InSubmodules,
    Keywords,
    TupleStream,
)


def names_of(prefix: str, cls: type[nn.Module]) -> tuple[str, ...]:
    last = ("attn_output.dense", "ff_output.dense") if cls is InSubmodules else ("attn.to_out", "ff.out")
    parts = ("norm1", "attn.to_qkv", last[0], "norm2", "ff.inner", last[1])
    return tuple(f"{prefix}.{part}" for part in parts)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("cls", WAYS, ids=lambda cls: cls.__name__)
def test_adds_written_in_any_way_are_found(cls: type[Block], edit: str) -> None:
    model = made(lambda: Model(cls))
    w = weights(model)
    names = [names_of(f"blocks.{index}", cls) for index in range(2)]
    check(model, edit, lambda edit: by_hand(w, names, edit))


def accepted(model: nn.Module, edit: str, refusal: str) -> bool:
    """Whether an edit was made; one that was refused must say why in these words."""
    with contextlib.suppress(wp.SeamError):
        EDITS[edit](model)
        return True
    with pytest.raises(wp.SeamError, match=refusal):
        EDITS[edit](model)
    return False


@pytest.mark.parametrize("edit", EDITS)
def test_an_add_whose_result_is_not_taken_is_found_or_refused(edit: str) -> None:
    model = made(lambda: Model(InPlaceStatement))
    w, plain = weights(model), model(INPUT.clone())
    names = [names_of(f"blocks.{index}", InPlaceStatement) for index in range(2)]
    if not accepted(model, edit, "teach"):
        assert torch.equal(model(INPUT.clone()), plain)
        return
    torch.testing.assert_close(model(INPUT.clone()), by_hand(w, names, edit), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("edit", EDITS)
def test_a_block_that_is_called_several_times(edit: str) -> None:
    model = made(lambda: Model(Plain, shared=True))
    w = weights(model)
    check(model, edit, lambda edit: by_hand(w, [names_of("blocks.0", Plain)] * 3, edit))
    assert len(blocks(model)) == 1


@pytest.mark.parametrize("edit", ["all", "attention.end", "mlp.end"])
@pytest.mark.parametrize("cls", [Parallel, ParallelBranchFirst])
def test_attention_and_ffn_side_by_side(cls: type[Block], edit: str) -> None:
    model = made(lambda: Model(cls))
    w = weights(model)

    def reference(edit: str) -> Tensor:
        x = INPUT * 1.5
        for index in range(2):
            norm1, qkv, to_out, _, inner, out = names_of(f"blocks.{index}", cls)
            y = norm(x, w, norm1)
            attended, fed = attend(y, w, qkv, to_out), feed(y, w, inner, out)
            attended = with_context(attended) if edit == "attention.end" else attended
            fed = with_context(fed) if edit == "mlp.end" else fed
            x = attended + fed if edit == "all" else x + attended + fed
        return norm(x, w, "head")

    check(model, edit, reference)


@pytest.mark.parametrize("which", ["attention", "ffn"])
def test_one_skip_around_both_is_neither_alone(which: str) -> None:
    model = made(lambda: Model(Parallel))
    with pytest.raises(ValueError, match="no skip around"):
        wp.remove_skips(model, which, example=INPUT)
    assert not wp.edits(model)


@pytest.mark.parametrize("edit", EDITS)
def test_branches_side_by_side_that_are_added_one_by_one_are_refused(edit: str) -> None:
    """Of x + a + f no add has the skip on one side and both branches on the other."""
    model = made(lambda: Model(OneByOne))
    plain = model(INPUT)
    with pytest.raises(wp.SeamError, match=r"Write it as x \+ \(a \+ f\)"):
        EDITS[edit](model)
    assert torch.equal(model(INPUT), plain)


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


@pytest.mark.parametrize("edit", EDITS)
def test_a_sequential_of_residual_modules(edit: str) -> None:
    def build() -> nn.Module:
        layers = [
            part
            for _ in range(2)
            for part in (
                Residual(nn.LayerNorm(WIDTH), Attention()),
                Residual(nn.LayerNorm(WIDTH), FeedForward()),
            )
        ]
        return nn.Sequential(*layers)

    model = made(build)
    w = weights(model)
    names = [
        tuple(
            f"{2 * index + half}.branch.{part}"
            for half, part in (
                (0, "0"), (0, "1.to_qkv"), (0, "1.to_out"), (1, "0"), (1, "1.inner"), (1, "1.out"),
            )
        )
        for index in range(2)
    ]  # fmt: skip
    check(model, edit, lambda edit: by_hand(w, names, edit, start=1, head=""))


class Stage(nn.Module):
    """Attentions and FFNs with a skip around each, as EfficientViT and LeViT have them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        parts = (Attention, FeedForward) * layers
        self.parts = nn.ModuleList(Residual(nn.LayerNorm(WIDTH), part()) for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class LongStage(Stage):
    """Another class: what was proven of one is kept."""


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        # Before them stands a layer of the class of their parts.
        ((Stage, 1, 1), {"Stage": ["attention ffn"] * 2, "Residual": ["ffn"]}),
        ((LongStage, 1, 2), {"Residual": ["ffn", *["attention", "ffn"] * 3]}),
    ],
)
def test_what_holds_one_layer_is_a_block_and_a_stage_of_two_is_none(
    stages: tuple[type[Stage], int, int], expected: dict[str, list[str]]
) -> None:
    cls, *layers = stages
    stem = Residual(nn.LayerNorm(WIDTH), FeedForward())
    model = made(lambda: nn.Sequential(stem, *map(cls, layers)))
    found: dict[str, list[str]] = {}
    for block in blocks(model, example=INPUT):
        found.setdefault(type(block.module).__name__, []).append(" ".join(block.row.names))
    assert found == expected


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def residual(*layers: nn.Module) -> Lambda:
    branch = nn.Sequential(*layers)
    return Lambda(lambda x: x + branch(x), branch)


def closure(*layers: nn.Module) -> Lambda:
    branch = nn.Sequential(*layers)

    def add(x: Tensor) -> Tensor:
        return x + branch(x)

    return Lambda(add, branch)


@pytest.mark.parametrize("wrap", [residual, closure])
@pytest.mark.parametrize("edit", EDITS)
def test_skips_in_functions_are_refused(wrap: Callable[..., Lambda], edit: str) -> None:
    model = made(
        lambda: nn.Sequential(
            wrap(nn.LayerNorm(WIDTH), Attention()), wrap(nn.LayerNorm(WIDTH), FeedForward())
        )
    )
    plain = model(INPUT)
    with pytest.raises(wp.SeamError, match=r"is added in the function .*no method of a module"):
        EDITS[edit](model)
    assert torch.equal(model(INPUT), plain)


def test_one_run_is_enough_for_all_edits_of_a_class() -> None:
    """Nothing is given a second time: what was found is kept."""

    class Once(Plain):
        pass

    wp.remove_skips(made(lambda: Model(Once)), "attention", example=INPUT)
    edited = wp.broadcast_context(made(lambda: Model(Once, shared=True)), "mlp.end")
    assert len(edited) == 1


def test_verify_agrees() -> None:
    model = made(lambda: Model(Plain))
    blocks(model, example=INPUT)
    assert verify(model, INPUT) == 4
