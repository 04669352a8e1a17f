"""The folder of a run: its name, and whether what is in it can go on."""

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from wellposed.files import clear_staged
from wellposed.train.recipe import Recipe
from wellposed.train.recipe_file import read_recipe, write_recipe
from wellposed.train.report import write_json
from wellposed.train.report.result import read_json

RECIPE, RESULT, ENVIRONMENT = "recipe.toml", "result.json", "environment.json"


def default_folder(recipe: Recipe, without: Collection[str] = ()) -> Path:
    """The same for equal recipes, so that starting again goes on.

    >>> default_folder(Recipe()) == default_folder(Recipe(workers=0))
    True

    Args:
        recipe: of the run.
        without: fields that the name does not hang on.
    """
    told = {name: value for name, value in decisive(recipe).items() if name not in without}
    text = json.dumps(told, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    kind, colon, rest = recipe.data.partition(":")
    data = kind if colon and kind not in ("packed", "hf", "wds", "folder") else Path(rest or kind).stem
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{data}-{recipe.model}").strip("-.")
    return Path("runs") / f"{name}-{digest}"


def decisive(recipe: Recipe) -> dict[str, Any]:
    """The fields that decide the result; the others may change when a run goes on."""
    free = {field.name for field in dataclasses.fields(recipe) if field.metadata["free"]}
    return {name: value for name, value in recipe.to_mapping().items() if name not in free}


def recipe_before(folder: Path) -> dict[str, Any]:
    """The fields of the run in the folder; none if there is no run."""
    file = folder / RECIPE
    return read_recipe(file) if file.is_file() else {}


def open_folder(folder: Path, recipe: Recipe, overwrite: bool) -> dict[str, Any] | None:
    """Make a folder that is there ready for a run; returns the result of one that is finished already.

    Raises:
        ValueError: the folder holds a run of another recipe, or something that is no run.
    """
    file = folder / RECIPE
    clear_staged(file, folder / ENVIRONMENT, folder / RESULT)
    if overwrite and file.is_file():
        _empty(folder)
    if file.is_file():
        before, now = decisive(Recipe.from_mapping(read_recipe(file))), decisive(recipe)
        if recipe.has_device_floor and "gray_floor" in now:
            before.setdefault("gray_floor", now["gray_floor"])  # older versions did not write it
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if changed:
            listed = ", ".join(
                f"{name} {before.get(name, 'unset')!r} there, {now.get(name, 'unset')!r} now"
                for name in changed
            )
            raise ValueError(
                f"{folder} holds a run of another recipe ({listed}); take another --out, or --overwrite."
            )
        result = folder / RESULT
        if result.is_file():
            done = read_json(result)
            if done.get("finished"):
                return done
    elif folder.is_dir() and any(folder.iterdir()):
        # A log may be there already, written by what started the run.
        strangers = [path.name for path in folder.iterdir() if path.suffix not in (".txt", ".log")]
        if strangers:
            raise ValueError(
                f"expected a new folder or that of a run, {folder} holds {strangers[0]!r} and no {RECIPE}; "
                "take another --out."
            )
    write_recipe(recipe, file)
    return None


def _empty(folder: Path) -> None:
    """Delete what is in the folder, which stays, with the lock on it.

    A kill leaves a run that was interrupted: its result goes first, and the recipe that makes it a run last.
    """
    first, last = folder / RESULT, folder / RECIPE
    inside = [path for path in folder.iterdir() if path not in (first, last)]
    for path in (first, *inside, last):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_environment(folder: Path, environment: dict[str, Any]) -> None:
    write_json(folder / ENVIRONMENT, environment)
