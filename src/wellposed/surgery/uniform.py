"""Uniform heads: attention that takes the mean of the values, in place."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import (
    Block,
    BlockSelection,
    Place,
    find_place,
    no_attention,
    plain_numbers,
    refuse_wrapped,
)
from wellposed.anatomy.packed_query import no_packed_query
from wellposed.anatomy.rows import after
from wellposed.anatomy.table import attention_row
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
        of: how many there are.
        axis: of the heads: 1 of a query (B, H, N, D/H), -1 of (..., D).
        parts: how many heads' widths that axis holds: H, or 3 H where keys and values follow the queries.
    """

    def __init__(self, heads: tuple[int, ...], of: int, *, axis: int, parts: int) -> None:
        super().__init__()
        self.heads, self.of, self.axis, self.parts = heads, of, axis, parts

    def forward(self, x: Tensor) -> Tensor:
        # Made here, not kept: a buffer would be lost where a model is built on the meta device.
        index = torch.arange(self.parts, device=x.device)
        cut = index == self.heads[0]
        for head in self.heads[1:]:
            cut = cut | (index == head)
        # Filled, not multiplied by zero: that would keep an infinity. The gradient is zero, not missing.
        if self.axis == 1:
            return x.masked_fill(cut[:, None, None], 0)
        by_head = x.reshape(*x.shape[:-1], self.parts, -1)
        return by_head.masked_fill(cut[:, None], 0).reshape(x.shape)

    @property
    def settings(self) -> dict[str, list[int]]:
        """The arguments of the edit."""
        return {"heads": list(self.heads)}

    def extra_repr(self) -> str:
        return f"heads={list(self.heads)}, of={self.of}"


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
    keys are of fewer tokens (PVT) the mean is over these, and a mask given to the model still holds.

    Args:
        model: any transformer, not yet compiled, sharded or replicated, whose attention has
            nothing on the logits but q k^T: no relative position bias (Swin, BEiT), no talking heads (CaiT).
        heads: how many, the first ones; or which, by their indices.
        blocks: an index, a slice, several indices, or None for every block that can have them.
        example: an input to run a model of one's own on, once, to find its blocks; see
            :func:`wellposed.anatomy.blocks`. Not needed for timm, transformers and torchvision.

    Returns:
        What was touched.

    >>> import timm, wellposed as wp
    >>> model = timm.create_model("vit_tiny_patch16_224")
    >>> print(wp.uniform_heads(model, blocks=[0, 11]))
    edit           where            block  module                 detail
    uniform_heads  attention.query  0      blocks.0.attn.q_norm   ZeroQuery(heads=[0], of=3)
    uniform_heads  attention.query  11     blocks.11.attn.q_norm  ZeroQuery(heads=[0], of=3)
    """
    refuse_wrapped(model)
    wanted = plain_numbers(heads)
    chosen = choose(model, blocks, _query, "a uniform head", example)
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
    """Where the query of an attention is, and how its heads lie there (see :class:`ZeroQuery`)."""

    place: Place
    heads: int
    axis: int
    parts: int

    def zero(self, heads: tuple[int, ...]) -> ZeroQuery:
        return ZeroQuery(heads, self.heads, axis=self.axis, parts=self.parts)


def _query(block: Block) -> _Query | str:
    """The query of a block's attention, or why its heads cannot be uniform."""
    if reason := no_attention(block):
        return reason
    name, attention = block.attention()
    layout = block.row.layout_of(block.module)
    if isinstance(attention, nn.MultiheadAttention):
        heads = attention.num_heads
        place = Place(name, attention, "query", layout)
        return no_packed_query(attention) or _Query(place, heads, axis=-1, parts=3 * heads)
    row = attention_row(attention)
    if isinstance(row, str):
        return row
    if row is None:
        called = type(attention).__name__
        return (
            f"its attention is {called}, of which it is not known where the query is and whether anything "
            f"else is on the logits; tell it with wellposed.anatomy.teach({called}, AttentionRow(...))"
        )
    heads = int(getattr(attention, row.heads))
    place = find_place(name, attention, after(*row.query), layout)
    axis = 1 if row.heads_at == "axis 1" else -1
    return row.refuses(attention) or _Query(place, heads, axis, parts=heads)


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
