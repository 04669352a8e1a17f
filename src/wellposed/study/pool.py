"""Runs in one folder, named by what decides their result: studies with equal recipes share them.

The name is the same on every machine: of the data and of the run that it starts from it has the names, not
the folders.

>>> run_name(Recipe(data="cifar10:HERE")) == run_name(Recipe(data="cifar10:THERE", workers=0))
True
"""

import dataclasses
from pathlib import Path

from wellposed.study.plan import data_name
from wellposed.train.recipe import Recipe
from wellposed.train.runs import default_folder
from wellposed.train.sweep.processes import is_finished, read_result

LATER: tuple[str, ...] = ("mix_probability", "collapse_patience")
"""Fields that recipes got after the first records were kept. Left at their default they do nothing, so the
names of runs without them stay what they were, and their records stay valid."""

_KEEP = Recipe().keep


def run_name(recipe: Recipe) -> str:
    """Of the folder of a run."""
    default = Recipe()
    later = [name for name in LATER if getattr(recipe, name) == getattr(default, name)]
    name = default_folder(without_folders(recipe), without=later).name
    if recipe.keep <= _KEEP:
        return name
    # Its result is that of the run without, but not what can be measured on its way.
    return f"{name}-kept{recipe.keep}-every{recipe.checkpoint_every or 'epoch'}"


def without_folders(recipe: Recipe) -> Recipe:
    """The recipe with names in the place of folders of this machine."""
    source = None if recipe.start_from is None else Path(recipe.start_from).name
    return dataclasses.replace(recipe, data=data_name(recipe.data), start_from=source)


def has_weights(folder: Path) -> bool:
    """Whether the folder holds a finished run."""
    return is_finished(read_result(folder))
