"""wellposed: measure how ill-conditioned a vision transformer is, and mend it."""

from wellposed import anatomy, linalg, nn, surgery
from wellposed.errors import SeamError, UnknownModelError, WrappedModelError
from wellposed.surgery import Edit, Edits, broadcast_context, edits, gray_tokens, remove_skips, restore

__version__ = "0.1.0"

__all__ = [
    "Edit",
    "Edits",
    "SeamError",
    "UnknownModelError",
    "WrappedModelError",
    "anatomy",
    "broadcast_context",
    "edits",
    "gray_tokens",
    "linalg",
    "nn",
    "remove_skips",
    "restore",
    "surgery",
]
