"""Which runs a sweep has: recipes times seeds, each with a name and a folder, all checked beforehand."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.train.recipe import SUFFIX, Recipe, combine, read_recipe, write_recipe

LOG = "log.txt"
"""In a run's folder: all that the run printed."""

DIGITS, UNKNOWN = 1_400, 50_000
"""Training images of the embedded set, and what a set counts as that would have to be opened to tell."""
USUAL_DEPTH = 12


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Args:
        name: of its folder and its recipe file.
        group: the name without the seed; runs of a group are compared as one.
        recipe: what is trained.
        folder: where it is trained.
        shown: what people see of it; empty for its name.
    """

    name: str
    group: str
    recipe: Recipe
    folder: Path
    shown: str = ""

    @property
    def title(self) -> str:
        return self.shown or self.name

    @property
    def recipe_file(self) -> Path:
        """Beside the folder, which belongs to the training process."""
        return self.folder.with_name(f"{self.name}.toml")


def plan(
    sources: Iterable[str | Path],
    *,
    out: Path,
    seeds: Sequence[int] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> list[Run]:
    """The runs of recipes and folders of recipes, with ``changes`` to all, one for each of the seeds."""
    changes = changes or {}
    if seeds is not None and "seed" in changes:
        raise ValueError("expected seeds or a change of seed, got both; leave one of them out.")
    if seeds is not None and (not seeds or len(set(seeds)) < len(seeds)):
        raise ValueError(f"seeds must be different numbers, got {list(seeds)}.")
    files = find_recipes(sources, without=out)
    recipes = [_read(file, changes) for file in files]
    runs = []
    for group, recipe in zip(distinct_names(files), recipes, strict=True):
        if seeds is None:
            runs.append(Run(group, group, recipe, out / group))
            continue
        for seed in seeds:
            name = f"{group}-seed{seed}"
            runs.append(Run(name, group, dataclasses.replace(recipe, seed=seed), out / name))
    return runs


def work(recipe: Recipe) -> float:
    """About how long a run takes beside others: images that it sees times blocks. No more than an order.

    >>> work(Recipe(data="cifar10:DIR", epochs=3)) > work(Recipe(data="cifar10:DIR", epochs=20, limit=5000))
    True
    """
    images = DIGITS if recipe.data == "digits" else UNKNOWN
    depth = recipe.model_options.get("depth", USUAL_DEPTH)
    blocks = sum(depth) if isinstance(depth, (list, tuple)) else depth
    return float(recipe.epochs * min(images, recipe.limit or images) * blocks)


def find_recipes(sources: Iterable[str | Path], *, without: Path) -> list[Path]:
    """The files, and those in the folders and their subfolders; ``without`` is the sweep's own output."""
    found: dict[Path, Path] = {}
    for source in map(Path, sources):
        files = [source]
        if source.is_dir():
            every = sorted(file for file in source.rglob("*") if file.suffix == SUFFIX)
            files = [file for file in every if without.resolve() not in file.resolve().parents]
            if not files:
                raise ValueError(f"expected recipes in {source}, got none that end in {SUFFIX}.")
        for file in files:
            found.setdefault(file.resolve(), file)
    if not found:
        raise ValueError("expected recipes, or folders of them, got none.")
    return list(found.values())


def distinct_names(files: Sequence[Path]) -> list[str]:
    """A name for each file: its own, with its folder's where several are called the same.

    >>> distinct_names([Path("a/base.toml"), Path("b/base.toml"), Path("c/b/base.toml"), Path("b/svd.toml")])
    ['a-base', 'b-base', 'b-base-2', 'svd']
    """
    stems = [file.stem for file in files]
    # Some file systems take A and a for one.
    shared = Counter(stem.casefold() for stem in stems)
    names = [
        f"{file.resolve().parent.name}-{stem}" if shared[stem.casefold()] > 1 else stem
        for file, stem in zip(files, stems, strict=True)
    ]
    taken: set[str] = set()
    for index, name in enumerate(names):
        number = 2
        while names[index].casefold() in taken:
            names[index] = f"{name}-{number}"
            number += 1
        taken.add(names[index].casefold())
    return names


def write_recipes(runs: Sequence[Run]) -> None:
    """Write each run's recipe beside its folder, unless one of them holds a run of another recipe."""
    for run in runs:
        _require_same(run)
    for run in runs:
        write_recipe(run.recipe, run.recipe_file)


def _require_same(run: Run) -> None:
    """An old result must not pass for one of a recipe that has changed since."""
    trained = run.folder.is_dir() and any(path.name != LOG for path in run.folder.iterdir())
    if not trained or not run.recipe_file.exists():
        return
    before = combine(read_recipe(run.recipe_file), {})
    changed = [
        f"{field.name} was {getattr(before, field.name)!r}, now {getattr(run.recipe, field.name)!r}"
        for field in dataclasses.fields(Recipe)
        if not field.metadata["free"] and getattr(before, field.name) != getattr(run.recipe, field.name)
    ]
    if changed:
        raise ValueError(
            f"{run.folder} holds a run of another recipe: {'; '.join(changed)}. "
            "Choose another --out, or delete the folder."
        )


def _read(file: Path, changes: Mapping[str, Any]) -> Recipe:
    values = read_recipe(file)
    try:
        return combine(values, changes)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{file}: {error}") from error
