"""Training with and without each edit: a recipe, one call, and a run that survives what happens to it.

A run from ``fit`` to its last checkpoint, in the order to read it:

1. ``recipe``: all that decides a run, as one value and a file;
2. ``fitting``: ``fit`` completes the recipe, holds the folder and puts the parts together;
3. ``data``: the images by name;
4. ``order``: which images an update takes, and every draw;
5. ``augment``: what is done to them;
6. ``batches``: the three together, update by update;
7. ``model``: what is trained, its task and its test;
8. ``optimizer``: what changes the weights, and the guard on it;
9. ``loop``: updates, tests, measurements, checkpoints;
10. ``checkpoint``: the files of one.

The others are for some runs or one step each: ``edits`` of a recipe, ``mae``, several processes and GPUs
(``parallel``), what goes into a checkpoint (``training_state``) or to people (``export``, ``reporter``,
``screen``), a run opened again (``runs``), many runs (``sweep``).

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
