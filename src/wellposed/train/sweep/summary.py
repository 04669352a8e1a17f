"""The end of a sweep: a line for each run, and over the seeds of each recipe the mean and the deviation."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.files import write_cells
from wellposed.records import short
from wellposed.text import aligned
from wellposed.train.report import write_json
from wellposed.train.report.status import duration, percent, rate
from wellposed.train.report.summary import best_accuracy
from wellposed.train.sweep import progress
from wellposed.train.sweep.children import Child

_SPEED = ("images_per_second", "seconds")
COLUMNS = ("run", "recipe", "seed", "state", "accuracy", "best_accuracy", "loss", *_SPEED, "folder")
GROUP_COLUMNS = ("recipe_accuracy_mean", "recipe_accuracy_std", "recipe_n")


@dataclass(frozen=True)
class Group:
    """The finished runs of one recipe; ``std`` is the standard deviation of the sample, None for one run."""

    recipe: str
    n: int
    mean: float | None
    std: float | None


def rows(children: Sequence[Child]) -> list[dict[str, Any]]:
    """One mapping a run, under the names of :data:`COLUMNS`."""
    return [_row(child) for child in children]


def _row(child: Child) -> dict[str, Any]:
    result = child.result or {}
    last = result.get("test") or {}
    measured = {
        "accuracy": last.get("accuracy"),
        "best_accuracy": best_accuracy(result),
        "loss": last.get("loss"),
    }
    finished = child.state == "finished"
    return {
        "run": child.run.name,
        "recipe": child.run.group,
        "seed": child.run.recipe.seed,
        "state": child.state,
        **{name: progress.number(value) if finished else None for name, value in measured.items()},
        **{name: progress.number(result.get(name)) for name in _SPEED},
        "folder": str(child.run.folder),
    }


def groups(runs: Sequence[dict[str, Any]]) -> list[Group]:
    """The recipes in their order, over the runs that finished.

    >>> groups([{"recipe": "a", "accuracy": 0.5}, {"recipe": "a", "accuracy": 0.75},
    ...         {"recipe": "a", "accuracy": None}])
    [Group(recipe='a', n=2, mean=0.625, std=0.1767766952966369)]
    """
    found = []
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        values = [run["accuracy"] for run in runs if run["recipe"] == recipe and run["accuracy"] is not None]
        mean = statistics.fmean(values) if values else None
        found.append(Group(recipe, len(values), mean, statistics.stdev(values) if len(values) > 1 else None))
    return found


def text(runs: Sequence[dict[str, Any]]) -> str:
    """Both tables; the one over the seeds only where a recipe has several runs."""
    lines = [("run", "state", "accuracy", "loss", "images/s", "time")]
    for run in runs:
        cells = (
            _told(run["accuracy"], percent),
            _told(run["loss"], short),
            _told(run["images_per_second"], rate),
            _told(run["seconds"], duration),
        )
        lines.append((run["run"], run["state"], *cells))
    tables = [aligned(lines, right=(2, 3, 4, 5))]
    found = groups(runs)
    if len(found) < len(runs) and any(group.n for group in found):
        over_seeds = [("recipe", "accuracy", "n")]
        over_seeds += [(group.recipe, _mean_and_std(group), str(group.n)) for group in found]
        tables.append(aligned(over_seeds, right=(1, 2)))
        tables.append("accuracy: mean ± standard deviation of the sample over n finished runs")
    return "\n\n".join(tables)


def _mean_and_std(group: Group) -> str:
    if group.mean is None:
        return "-"
    return percent(group.mean) + ("" if group.std is None else f" ± {percent(group.std)}")


def _told(value: float | None, words: Any) -> str:
    return "-" if value is None else str(words(value))


def save(runs: Sequence[dict[str, Any]], about: dict[str, Any], out: Path) -> None:
    """Write ``sweep.csv``, one line a run, and ``sweep.json``, with what the sweep was asked."""
    found = {group.recipe: group for group in groups(runs)}
    rows = [
        [*(run[name] for name in COLUMNS), group.mean, group.std, group.n]
        for run in runs
        for group in (found[run["recipe"]],)
    ]
    write_cells(out / "sweep.csv", [[*COLUMNS, *GROUP_COLUMNS], *rows])
    content = {**about, "runs": list(runs), "recipes": [vars(group) for group in found.values()]}
    write_json(out / "sweep.json", content)
