"""Which cells of a grid stand for their variants, and which runs are the same."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.study.plan import Cell
from wellposed.train.recipe import Recipe
from wellposed.train.report.run_log import plain
from wellposed.train.sweep.progress import is_finished, read_result


@dataclass(frozen=True)
class Planned:
    """One run of a study."""

    cell: Cell
    data: str
    seed: int
    folder: Path
    recipe: Recipe


def best_cells(planned: Sequence[Planned], spec: str) -> list[Cell]:
    """For each variant on a data set, the cell with the highest accuracy of those tried with the first seed.

    A lower loss tells between equals, and between runs that classify nothing.
    """
    best: dict[str, tuple[tuple[float, float], Cell]] = {}
    for each in planned:
        if each.data == spec and each.seed == planned[0].seed:
            score = _score(read_result(each.folder))
            if each.cell.label not in best or score > best[each.cell.label][0]:
                best[each.cell.label] = (score, each.cell)
    return [cell for _, cell in best.values()]


def _score(result: Mapping[str, Any]) -> tuple[float, float]:
    test = (result.get("test") or {}) if is_finished(result) else {}
    loss, accuracy = test.get("loss"), test.get("accuracy")
    return (
        accuracy if isinstance(accuracy, (int, float)) else -1.0,
        -loss if isinstance(loss, (int, float)) else -float("inf"),
    )


def distinct(cells: Iterable[Cell], changes: Mapping[str, Any]) -> list[Cell]:
    """Without those of a grid that the user's changes have made equal."""
    kept: dict[str, Cell] = {}
    for cell in cells:
        chosen = {name: value for name, value in cell.chosen.items() if name not in changes}
        made = dataclasses.replace(cell, chosen=chosen)
        kept.setdefault(made.name, made)
    return list(kept.values())


def require_different(wave: Sequence[Planned]) -> None:
    """A change over all must not make two variants the same."""
    seen: dict[str, str] = {}
    for each in wave:
        key = json.dumps(plain(each.recipe.to_mapping()), sort_keys=True)
        label = seen.setdefault(key, each.cell.label)
        if label != each.cell.label:
            raise ValueError(
                f"with these changes {label!r} and {each.cell.label!r} would be the same run; "
                "leave out of --set what the study varies."
            )
