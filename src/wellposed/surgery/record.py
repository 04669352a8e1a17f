"""What was done to a model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from wellposed.text import aligned

Setting = bool | int | float | str | list[int] | None
_TITLES = ("edit", "where", "block", "module", "detail")


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
    """

    kind: str
    where: str
    block: int | None
    module: str
    detail: str = ""
    settings: Mapping[str, Setting] = field(default_factory=dict, hash=False)


class Edits(tuple[Edit, ...]):
    """The edits of a model, one entry a module touched; prints as a table."""

    __slots__ = ()

    def __new__(cls, edits: Iterable[Edit] = ()) -> "Edits":
        return super().__new__(cls, tuple(edits))

    def __str__(self) -> str:
        if not self:
            return "no edits"
        rows = [_TITLES] + [
            (edit.kind, edit.where, "-" if edit.block is None else str(edit.block), edit.module, edit.detail)
            for edit in self
        ]
        return aligned(rows)
