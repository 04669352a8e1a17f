"""wellposed: measure how ill-conditioned a vision transformer is, and fix it.

The public names are loaded on first use, so that the command line need not import torch to say what
it can do.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wellposed import anatomy, linalg, models, nn, probes, surgery
    from wellposed.errors import SeamError, UnknownModelError, WrappedModelError
    from wellposed.probes import Diagnosis
    from wellposed.probes.diagnose import diagnose
    from wellposed.saving import apply, save_edits
    from wellposed.surgery import (
        Edit,
        Edits,
        broadcast_context,
        condition_weights,
        edits,
        fold,
        gray_tokens,
        initialise,
        normalise_spectrum,
        remove_skips,
        restore,
        uniform_heads,
    )

__version__ = "0.2.0"

_HOME = {
    "SeamError": "errors",
    "UnknownModelError": "errors",
    "WrappedModelError": "errors",
    "Diagnosis": "probes",
    "apply": "saving",
    "save_edits": "saving",
    "diagnose": "probes",
}
"""Modules of the names that are not in ``surgery``."""
_MODULES = ("anatomy", "errors", "linalg", "models", "nn", "probes", "surgery")

__all__ = [
    "Diagnosis",
    "Edit",
    "Edits",
    "SeamError",
    "UnknownModelError",
    "WrappedModelError",
    "anatomy",
    "apply",
    "broadcast_context",
    "condition_weights",
    "diagnose",
    "edits",
    "fold",
    "gray_tokens",
    "initialise",
    "linalg",
    "models",
    "nn",
    "normalise_spectrum",
    "probes",
    "remove_skips",
    "restore",
    "save_edits",
    "surgery",
    "uniform_heads",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"wellposed.{name}")
    if name in __all__:
        return getattr(importlib.import_module(f"wellposed.{_HOME.get(name, 'surgery')}"), name)
    raise AttributeError(f"module 'wellposed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
