"""Training with and without each edit: a recipe, one call, and a run that survives what happens to it.

The names are loaded on first use, so that the command line can show a recipe's fields without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wellposed.train.fitting import Result, fit
    from wellposed.train.recipe import Recipe
    from wellposed.train.runs import TrainedRun, open_run

__all__ = ["Recipe", "Result", "TrainedRun", "fit", "open_run"]

_HOME = {
    "Recipe": "recipe",
    "Result": "fitting",
    "TrainedRun": "runs",
    "fit": "fitting",
    "open_run": "runs",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"wellposed.train.{_HOME[name]}"), name)
    raise AttributeError(f"module 'wellposed.train' has no attribute {name!r}")
