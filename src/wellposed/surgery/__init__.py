"""Edits of a model, in place, and their undoing."""

from wellposed.surgery.broadcast import broadcast_context
from wellposed.surgery.condition import condition_weights
from wellposed.surgery.gray import gray_tokens
from wellposed.surgery.initialisation import initialise
from wellposed.surgery.normalise import normalise_spectrum
from wellposed.surgery.record import Edit, Edits
from wellposed.surgery.skips import remove_skips
from wellposed.surgery.undo import edits, restore
from wellposed.surgery.uniform import uniform_heads
from wellposed.surgery.weights import fold

__all__ = [
    "Edit",
    "Edits",
    "broadcast_context",
    "condition_weights",
    "edits",
    "fold",
    "gray_tokens",
    "initialise",
    "normalise_spectrum",
    "remove_skips",
    "restore",
    "uniform_heads",
]
