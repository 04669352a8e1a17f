"""Uniform heads: attention that takes the mean of the values, in place."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from wellposed.anatomy.cores import HeadChannels
from wellposed.anatomy.model import (
    Block,
    BlockSelection,
    Place,
    find_place,
    no_attention,
    plain_numbers,
    refuse_wrapped,
    select,
)
from wellposed.anatomy.model import blocks as all_blocks
from wellposed.anatomy.queries import FoundQuery, find_queries, is_of_library
from wellposed.anatomy.subclass import no_packed_query
from wellposed.anatomy.table import after, attention_row
from wellposed.surgery.apply import insert_all
from wellposed.surgery.choose import choose
from wellposed.surgery.insertion import Inserted
from wellposed.surgery.record import Edits

KIND = "uniform_heads"
_WHERE = "attention.query"


class ZeroQuery(nn.Module):
    """Sets the query of some heads to zero: their logits are equal, their softmax is 1 / N for every token.

    Args:
        heads: which.
        channels: where the heads lie in the query.
    """

    def __init__(self, heads: tuple[int, ...], channels: HeadChannels) -> None:
        super().__init__()
        self.heads, self.channels = heads, channels

    def forward(self, x: Tensor) -> Tensor:
        return self.channels.zeroed(x, self.heads)

    @property
    def settings(self) -> dict[str, list[int]]:
        """The arguments of the edit."""
        return {"heads": list(self.heads)}

    def extra_repr(self) -> str:
        return f"heads={list(self.heads)}, of={self.channels.heads}"


def uniform_heads(
    model: nn.Module,
    heads: int | Iterable[int] = 1,
    *,
    blocks: BlockSelection = None,
    example: Any = None,
) -> Edits:
    """Make heads of self-attention uniform, in place: each token gets the mean of the values of all tokens.

    The query of these heads becomes zero, so that all their logits are equal. The model's parameters stay
    what they are; those that made the queries and keys of these heads get a gradient of zero. Where
    keys are of fewer tokens (PVT) the mean is over these, and a mask still holds: in a causal model the mean
    is over the tokens up to each.

    Where the query is made is found by a run up to the first block of each kind, and proven on a copy of
    that block; see :mod:`wellposed.anatomy.queries`.

    Args:
        model: any transformer, not yet compiled, sharded or replicated, whose attention has
            nothing on the logits but q k^T: no relative position bias (Swin, BEiT), no talking heads (CaiT).
        heads: how many, the first ones; or which, by their indices.
        blocks: an index, a slice, several indices, or None for every block that can have them.
        example: an input to run your own model on, once, to find its blocks; see
            :func:`wellposed.anatomy.blocks`. Not needed for timm, transformers and torchvision.

    Returns:
        What was touched.

    >>> import timm, wellposed as wp
    >>> model = timm.create_model("vit_tiny_patch16_224")
    >>> print(wp.uniform_heads(model, blocks=[0, 11]))
    edit           where            block  module                 detail
    uniform_heads  attention.query  0      blocks.0.attn.q_norm   ZeroQuery(heads=[0], of=3)
    uniform_heads  attention.query  11     blocks.11.attn.q_norm  ZeroQuery(heads=[0], of=3)
    10 of 12 blocks have no uniform_heads at attention.query: 1-10
    """
    refuse_wrapped(model)
    wanted = plain_numbers(heads)
    queries = _Queries(model, blocks, example)
    chosen = choose(model, blocks, queries.of, "a uniform head", example)
    return insert_all(
        model,
        [
            (query.place, Inserted(query.zero(_picked(wanted, query.heads, block.name)), KIND, _WHERE, None))
            for block, query in chosen
        ],
    )


def uniform_heads_of(block: Block) -> tuple[int, ...]:
    """The heads of a block that were made uniform."""
    for module in block.module.modules():
        if isinstance(module, Inserted) and isinstance(module.op, ZeroQuery):
            return module.op.heads
    return ()


@dataclass(frozen=True)
class _Query:
    """Where the query of an attention is, and how its heads lie there."""

    place: Place
    channels: HeadChannels

    @property
    def heads(self) -> int:
        return self.channels.heads

    def zero(self, heads: tuple[int, ...]) -> ZeroQuery:
        return ZeroQuery(heads, self.channels)


class _Queries:
    """The queries of a model's blocks, those that were taught and those that a run finds."""

    def __init__(self, model: nn.Module, selection: BlockSelection, example: Any) -> None:
        self.model, self.selection, self.example = model, selection, example

    def of(self, block: Block) -> _Query | str:
        """The query of a block's attention, or why its heads cannot be uniform."""
        if reason := no_attention(block):
            return reason
        taught = _taught(block)
        if taught is not None:
            return taught
        found = self._found[block.index]
        if isinstance(found, str):
            return _remedied(found, block)
        layout = block.row.layout_of(block.module)
        place = find_place(block.name, block.module, after(found.path), layout)
        if isinstance(place.owner, nn.MultiheadAttention):
            if reason := no_packed_query(place.owner):
                return reason
            place = replace(place, side="query")
        return _Query(place, found.channels)

    @functools.cached_property
    def _found(self) -> dict[int, FoundQuery | str]:
        chosen = select(all_blocks(self.model, self.example), self.selection)
        wanted = [
            block
            for block in chosen
            if not block.row.refused and not no_attention(block) and _taught(block) is None
        ]
        return find_queries(self.model, wanted, self.example)


def _taught(block: Block) -> _Query | str | None:
    """The query of an attention that was taught, or why it needs no run; None of another one."""
    try:
        name, attention = block.attention()
    except ValueError:
        return None
    if isinstance(attention, nn.MultiheadAttention) and (reason := no_packed_query(attention)):
        return reason
    row = attention_row(attention)
    if row is None or isinstance(row, str):
        return row
    place = find_place(name, attention, after(*row.query), block.row.layout_of(block.module))
    heads = int(getattr(attention, row.heads))
    on_axis = HeadChannels(heads, axis=1)
    channels = on_axis if row.heads_at == "axis 1" else HeadChannels(heads)
    return row.refuses(attention) or _Query(place, channels)


def _remedied(reason: str, block: Block) -> str:
    """A reason with the way out for your own attention."""
    try:
        attention = block.attention()[1]
    except ValueError:
        attention = block.module
    if is_of_library(attention):
        return reason
    called = type(attention).__name__
    return f"{reason}; declare it with wellposed.anatomy.teach({called}, AttentionRow(...))"


def _picked(wanted: int | list[int], of: int, name: str) -> tuple[int, ...]:
    """The indices of the heads, each once."""
    remedy = "heads=1 is the first head, heads=[0, 2] the first and the third."
    if isinstance(wanted, int):
        if isinstance(wanted, bool) or not 1 <= wanted <= of:
            raise ValueError(f"heads must be 1 to {of}, as many as {name} has, got {wanted}; {remedy}")
        return tuple(range(wanted))
    for head in wanted:
        if not isinstance(head, int) or isinstance(head, bool):
            raise TypeError(f"heads must be a number or indices of heads, got {head!r}; {remedy}")
        if not -of <= head < of:
            raise IndexError(f"heads must be within 0 and {of - 1} in {name}, got {head}; {remedy}")
    if not wanted:
        raise ValueError(f"heads=[] names none of the {of} heads of {name}; {remedy}")
    return tuple(sorted({head % of for head in wanted}))
