"""What was done to a model."""

from collections.abc import Iterable
from dataclasses import dataclass

from wellposed.text import aligned

_TITLES = ("edit", "where", "block", "module", "detail")


@dataclass(frozen=True)
class Edit:
    """One module touched by one edit."""

    kind: str
    where: str
    block: int | None
    module: str
    detail: str = ""


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
