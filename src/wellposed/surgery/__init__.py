"""Edits of a model, in place: Token Graying, Context Broadcasting, skip removal, and their undoing."""

from wellposed.surgery.broadcast import broadcast_context
from wellposed.surgery.gray import gray_tokens
from wellposed.surgery.record import Edit, Edits
from wellposed.surgery.skips import remove_skips
from wellposed.surgery.undo import edits, restore

__all__ = ["Edit", "Edits", "broadcast_context", "edits", "gray_tokens", "remove_skips", "restore"]
