"""Which cells of a grid stand for their variants."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.study.compare import LEAST
from wellposed.study.ledger import Key
from wellposed.study.plan import Cell, RunRecord, StudyRecords, data_name
from wellposed.train.recipe import Recipe


@dataclass(frozen=True)
class Planned:
    """One run of a study.

    Args:
        cell: whose it is.
        data: as ``--data`` has it.
        seed: of the run.
        trial: whether it is short and only chooses.
        recipe: what is trained.
        folder: where, in the pool.
        measured: whether something is measured on its weights.
    """

    cell: Cell
    data: str
    seed: int
    trial: bool
    recipe: Recipe
    folder: Path
    measured: bool

    @property
    def key(self) -> Key:
        return self.folder.name, self.trial

    @property
    def title(self) -> str:
        """For people, and for its file in ``recipes/``."""
        return f"{data_name(self.data)}-{self.cell.name}-seed{self.seed}" + ("-trial" if self.trial else "")


def best_of(tried: Sequence[tuple[Cell, RunRecord]]) -> Cell:
    """The cell with the highest accuracy; a lower loss tells between equals, and where none classifies.

    Trials stand for longer runs, and with one seed they tell no difference below :data:`compare.LEAST`: of
    those so near to the best one, the first of the grid is taken.
    """
    best_cell, best = max(tried, key=lambda each: score(each[1]))
    highest = score(best)[0]
    if not best.trial or highest < 0:
        return best_cell
    return next(cell for cell, record in tried if 100 * (highest - score(record)[0]) < LEAST)


def score(record: RunRecord) -> tuple[float, float]:
    """Accuracy, then loss; of a run that ended well."""
    if record.state != "finished":
        return -1.0, -float("inf")
    loss = (record.result.get("test") or {}).get("loss")
    return (
        -1.0 if record.accuracy is None else record.accuracy / 100,
        -loss if isinstance(loss, (int, float)) else -float("inf"),
    )


def broke(run: RunRecord | None, trial: RunRecord) -> bool:
    """Whether a full run knows less in the end than the short one that chose its setting."""
    if run is None or run.accuracy is None or trial.accuracy is None:
        return False
    return trial.accuracy - run.accuracy >= LEAST


def broken_runs(records: StudyRecords) -> list[str]:
    """Sentences on the runs that broke: they say what their setting does, not what their variant can."""
    trials = {(run.label, run.data, str(run.chosen)): run for run in records.runs if run.trial}
    pairs = [(run, trials.get((run.label, run.data, str(run.chosen)))) for run in records.runs]
    broken = [
        (run, trial) for run, trial in pairs if trial is not None and not run.trial and broke(run, trial)
    ]
    hopeless = {(run.label, run.data) for run, trial in broken if run.best and run.seed == trial.seed}
    found = []
    for run, trial in broken:
        setting = ", ".join(f"{name}={value}" for name, value in run.chosen.items())
        then = "another setting stands for it"
        if (run.label, run.data) in hopeless:
            then = "so did all others, and the best trial's stands"
        elif run.best:
            then = "the seed that chooses did not"
        is_short = run.result.get("collapsed")
        when = f"when it was ended after epoch {run.result['test']['epoch']}" if is_short else "in the end"
        found.append(
            f"{run.label}, {run.data}, seed {run.seed}: broke with {setting}, {run.accuracy:.1f} {when} "
            f"and {trial.accuracy:.1f} in its short trial; {then}."
        )
    return found


def variants(cells: Iterable[Cell], changes: Mapping[str, Any]) -> dict[str, list[Cell]]:
    """The cells by label, without those of a grid that the user's changes have made equal."""
    kept: dict[str, Cell] = {}
    for cell in cells:
        chosen = {name: value for name, value in cell.chosen.items() if name not in changes}
        made = dataclasses.replace(cell, chosen=chosen)
        kept.setdefault(made.name, made)
    found: dict[str, list[Cell]] = {}
    for cell in kept.values():
        found.setdefault(cell.label, []).append(cell)
    return found
