"""What was done to a model."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wellposed.calls import ARGUMENTS, GRAY, PLACED_BY, EditCall
from wellposed.text import aligned, ranges

Setting = bool | int | float | str | list[int] | None
_TITLES = ("edit", "where", "block", "module", "detail")
OF_EMBEDDINGS = ("embedding", "pixels")


@dataclass(frozen=True)
class Edit:
    """One module touched by one edit.

    Args:
        kind: the function that made it: ``"gray_tokens"``, ``"broadcast_context"``, ...
        where: its position: that function's ``where``, or the skip that was removed.
        block: the block's index; None for an embedding.
        module: the name of the module that was touched.
        detail: in words, for the table.
        settings: the other arguments of the function, as plain numbers and words.

    >>> import timm, wellposed as wp
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
    >>> edit = wp.gray_tokens(model, eps=0.8, where="blocks")[0]
    >>> edit.kind, edit.where, edit.block, edit.settings["eps"]
    ('gray_tokens', 'blocks', 0, 0.8)
    """

    kind: str
    where: str
    block: int | None
    module: str
    detail: str = ""
    settings: Mapping[str, Setting] = field(default_factory=dict, hash=False)


class Edits(tuple[Edit, ...]):
    """The edits of a model, one entry a module touched; prints as a table.

    Under the table stands in how many of the model's blocks an edit is, where it is not in all of them.

    Args:
        edits: in the order of the model's modules.
        blocks: how many blocks the model has; None where that is not known.

    >>> import timm, wellposed as wp
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=3)
    >>> print(wp.remove_skips(model, "ffn", blocks=[0]))
    edit          where  block  module             detail
    remove_skips  ffn    0      blocks.0.join_ffn
    2 of 3 blocks have no remove_skips at ffn: 1-2
    """

    blocks: int | None

    def __new__(cls, edits: Iterable[Edit] = (), blocks: int | None = None) -> "Edits":
        made = super().__new__(cls, tuple(edits))
        made.blocks = blocks
        return made

    @property
    def untouched(self) -> dict[tuple[str, str], list[int]]:
        """Of each edit of blocks, by its kind and position, the blocks that do not have it."""
        found: dict[tuple[str, str], set[int]] = {}
        for edit in self:
            if edit.block is not None:
                found.setdefault((edit.kind, edit.where), set()).add(edit.block)
        everyone = range(self.blocks or 0)
        return {key: [block for block in everyone if block not in there] for key, there in found.items()}

    def calls(self) -> list[EditCall]:
        """The calls that make these edits again, in the form of a recipe's ``edits``."""
        alike: dict[tuple[str, str, str], list[Edit]] = {}
        for edit in self:
            settings = json.dumps(dict(edit.settings), sort_keys=True)
            alike.setdefault((edit.kind, edit.where, settings), []).append(edit)
        _refuse_unlike_embeddings(list(alike))
        return [_call(edits) for edits in alike.values()]

    def to_dict(self) -> dict[str, Any]:
        """The calls and the modules they touch as plain values, which :func:`wellposed.apply` takes."""
        return {
            "edits": [call.to_mapping() for call in self.calls()],
            "modules": [edit.module for edit in self],
        }

    def to_json(self) -> str:
        """The same as a text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def __str__(self) -> str:
        if not self:
            return "no edits"
        return "\n".join([aligned([_TITLES, *self._rows()]), *self._left()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self:
            return "<p>no edits</p>"
        titles, *rows = (
            "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
            for tag, row in [("th", _TITLES), *(("td", row) for row in self._rows())]
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        left = "".join(f"<p>{html.escape(line)}</p>" for line in self._left())
        return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>{left}"

    def _rows(self) -> list[Sequence[str]]:
        return [
            (edit.kind, edit.where, "-" if edit.block is None else str(edit.block), edit.module, edit.detail)
            for edit in self
        ]

    def _left(self) -> list[str]:
        """In words, the blocks that an edit is not in."""
        return [
            f"{len(left)} of {self.blocks} blocks have no {kind} at {where}: {ranges(left)}"
            for (kind, where), left in self.untouched.items()
            if left
        ]


def _call(edits: list[Edit]) -> EditCall:
    """One call for edits of the same kind, position and settings."""
    kind, where = edits[0].kind, edits[0].where
    given: dict[str, Any] = {name: value for name, value in edits[0].settings.items() if value is not None}
    if kind in PLACED_BY:
        given[PLACED_BY[kind]] = where
    if where not in OF_EMBEDDINGS:
        given["blocks"] = [_index(edit) for edit in edits]
    return EditCall(kind, {name: given[name] for name in ARGUMENTS[kind] if name in given})


def _index(edit: Edit) -> int:
    if edit.block is None:
        raise ValueError(
            f"expected the index of the block of {edit.module}, which is not known, as the model was not run "
            "in this process; call wellposed.anatomy.blocks(model, example) once, then wp.edits(model)."
        )
    return edit.block


def _refuse_unlike_embeddings(keys: list[tuple[str, str, str]]) -> None:
    for place in OF_EMBEDDINGS:
        if sum(kind == GRAY and where == place for kind, where, _ in keys) > 1:
            raise ValueError(
                f'expected one graying for all embeddings, as gray_tokens(model, where="{place}") makes it, '
                "got different ones; give them the same settings."
            )
