"""Edits of a model, in place: graying, broadcasting, skip removal, uniform heads, and their undoing."""

from wellposed.surgery.broadcast import broadcast_context
from wellposed.surgery.gray import gray_tokens
from wellposed.surgery.record import Edit, Edits
from wellposed.surgery.skips import remove_skips
from wellposed.surgery.undo import edits, restore
from wellposed.surgery.uniform import uniform_heads

__all__ = [
    "Edit",
    "Edits",
    "broadcast_context",
    "edits",
    "gray_tokens",
    "remove_skips",
    "restore",
    "uniform_heads",
]
