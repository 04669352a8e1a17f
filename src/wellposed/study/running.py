"""A study from its grid to its report: recipes, runs, measurements, files.

The folder of a study has ``recipes/``, ``runs/`` (as of a sweep), ``records.jsonl``, ``table.csv``,
``figure.png`` and ``summary.json``. The same call again goes on where it stopped: runs that have finished are
not trained again, and what was measured on them is not measured again.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from wellposed.study.choosing import Planned, best_cells, distinct, require_different
from wellposed.study.files import about, write_lines, write_report
from wellposed.study.plan import Cell, RunRecord, Scale, Study, StudyRecords, StudyReport, data_name
from wellposed.train.recipe_file import combine, read_recipe, write_recipe
from wellposed.train.report import read_run
from wellposed.train.sweep import COMMAND, gpu_is_there
from wellposed.train.sweep import run as sweep
from wellposed.train.sweep.progress import is_finished, read_result

MEASURED = "measured.jsonl"
CPU_JOBS = 8
LARGE = 224
"""Models for images of this side fill a GPU alone."""
RESULT = ("updates", "seconds", "images_per_second", "train", "test", "best", "kappa", "entropy", "nonfinite")
"""What a record keeps of ``result.json``; the rest is in the run's folder."""


@dataclass(frozen=True)
class Outcome:
    """What a study came to; no report if it was stopped before its runs had ended."""

    folder: Path
    report: StudyReport | None
    exit_code: int


def run(
    study: Study,
    *,
    data: Sequence[str] = ("digits",),
    scale: Scale = "small",
    seeds: Sequence[int] | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    changes: Mapping[str, Any] | None = None,
    command: Sequence[str] = COMMAND,
    console: Console | None = None,
) -> Outcome:
    """Run a study, or go on with it.

    Args:
        study: which.
        data: sets as ``Recipe.data`` has them; each variant is trained on each.
        scale: see :data:`wellposed.study.plan.Scale`.
        seeds: None takes the study's own.
        out: its folder; None is ``runs/study/NAME-SCALE``.
        jobs: runs beside each other, see :func:`wellposed.train.sweep.run`.
        changes: fields of all the recipes, over what the study says.
        command: what trains a recipe.
        console: where to print.
    """
    console = console or Console()
    folder = Path(out) if out is not None else Path("runs") / "study" / f"{study.name}-{scale}"
    chosen_seeds = tuple(study.seeds if seeds is None else seeds)
    _check(data, chosen_seeds)
    session = _Session(
        study, tuple(data), scale, chosen_seeds, folder, jobs, dict(changes or {}), command, console
    )
    planned, exit_code = session.train()
    if exit_code >= 128:
        console.print("The study was stopped; the same command again goes on with it.")
        return Outcome(folder, None, exit_code)
    records = StudyRecords(study.name, scale, session.records(planned), session.measured_once())
    report = study.report(records)
    details = about(study, scale, data, chosen_seeds, dict(changes or {}))
    for sentence in write_report(folder, records, report, details):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    is_whole = all(run.state != "failed" for run in records.runs)
    return Outcome(folder, report, 0 if is_whole else 1)


def _check(data: Sequence[str], seeds: Sequence[int]) -> None:
    names = [data_name(spec) for spec in data]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"data must be different sets, got {', '.join(data) or 'none'}.")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers, got {list(seeds)}.")


@dataclass
class _Session:
    """One call of :func:`run`."""

    study: Study
    data: tuple[str, ...]
    scale: Scale
    seeds: tuple[int, ...]
    folder: Path
    jobs: int | None
    changes: dict[str, Any]
    command: Sequence[str]
    console: Console

    def train(self) -> tuple[list[Planned], int]:
        """All runs: the whole grid with the first seed, then the best of each variant with the others."""
        cells = self.study.cells(self.scale)
        if not cells:
            return [], 0
        first, *others = self.seeds
        planned, code = self._train_cells({spec: cells for spec in self.data}, [first])
        if others and code < 128:
            best = {spec: best_cells(planned, spec) for spec in self.data}
            more, later = self._train_cells(best, others)
            planned, code = planned + more, max(code, later)
        return planned, code

    def _train_cells(
        self, cells: Mapping[str, Sequence[Cell]], seeds: Sequence[int]
    ) -> tuple[list[Planned], int]:
        """First what others start from, then those."""
        planned: list[Planned] = []
        worst = 0
        for follows in (False, True):
            wave: list[Planned] = []
            for spec, of_data in cells.items():
                for cell in distinct(of_data, self.changes):
                    if (cell.starts_from is not None) == follows:
                        wave += [self._plan(cell, spec, seed, planned) for seed in seeds]
            if not wave or worst >= 128:
                continue
            worst = max(worst, self._sweep(wave))
            planned += wave
        # In the order of the grid, which is that of the tables.
        order = {(spec, cell.name): place for spec in cells for place, cell in enumerate(cells[spec])}
        planned.sort(key=lambda each: (self.data.index(each.data), order.get((each.data, each.cell.name), 0)))
        return planned, worst

    def _plan(self, cell: Cell, spec: str, seed: int, before: Sequence[Planned]) -> Planned:
        values = {**cell.fields, "seed": seed}
        if cell.starts_from is not None:
            roots = [each for each in before if (each.data, each.seed) == (spec, seed)]
            best = {each.name for each in best_cells(roots, spec)}
            source = next(
                (each for each in roots if each.cell.label == cell.starts_from and each.cell.name in best),
                None,
            )
            if source is None:
                raise ValueError(
                    f"{cell.label} starts from {cell.starts_from!r}, which is no cell of the study."
                )
            values["start_from"] = str(source.folder)
        base = self.study.base(self.scale, spec).to_mapping() | {"data": spec}
        recipe = combine(combine(base, values).to_mapping(), self.changes)
        name = f"{data_name(spec)}-{cell.name}-seed{seed}"
        return Planned(cell, spec, seed, self.folder / "runs" / name, recipe)

    def _sweep(self, wave: Sequence[Planned]) -> int:
        require_different(wave)
        recipes = self.folder / "recipes"
        recipes.mkdir(parents=True, exist_ok=True)
        files = []
        for each in wave:
            files.append(recipes / f"{each.folder.name}.toml")
            write_recipe(each.recipe, files[-1])
        jobs = self.study.jobs if self.jobs is None else self.jobs
        if jobs is None and any((each.recipe.image_size or 0) >= LARGE for each in wave):
            jobs = 1
        elif jobs is None and not gpu_is_there(os.environ):
            # Models so small that a CPU trains them gain nothing from a second thread.
            jobs = min(CPU_JOBS, os.cpu_count() or 1)
        runs = self.folder / "runs"
        return sweep(files, out=runs, jobs=jobs, command=self.command, console=self.console).exit_code

    def records(self, planned: Iterable[Planned]) -> list[RunRecord]:
        """With what is measured on the weights; that of a run is measured once."""
        planned = list(planned)
        best = {spec: {cell.name for cell in best_cells(planned, spec)} for spec in self.data}
        return [self._record(each, each.cell.name in best[each.data]) for each in planned]

    def _record(self, planned: Planned, is_best: bool) -> RunRecord:
        result, cell = read_result(planned.folder), planned.cell
        unfinished = "nonfinite" if result.get("nonfinite") else "failed"
        state = "finished" if is_finished(result) else unfinished
        measured: list[dict[str, Any]] = []
        if state == "finished" and is_best and cell.reported and self.study.after is not None:
            measured = self._cached(planned.folder / MEASURED, lambda: self._measure(planned))
        changed = {name: self.changes.get(name, value) for name, value in cell.fields.items()}
        return RunRecord(
            label=cell.label,
            data=data_name(planned.data),
            seed=planned.seed,
            fields=changed,
            chosen={name: changed[name] for name in cell.chosen if name not in self.changes},
            recipe=_public_recipe(planned),
            state=state,
            result={name: result[name] for name in RESULT if name in result},
            curve=curve(planned.folder),
            measured=measured,
            best=is_best,
            reported=cell.reported,
        )

    def _measure(self, planned: Planned) -> list[dict[str, Any]]:
        assert self.study.after is not None
        self.console.print(f"measuring {planned.folder.name}", markup=False, highlight=False)
        return self.study.after(planned.folder, self.folder)

    def measured_once(self) -> list[dict[str, Any]]:
        """What needs no run."""
        once = self.study.once
        if once is None:
            return []
        self.folder.mkdir(parents=True, exist_ok=True)
        found = []
        for spec in self.data:
            path = self.folder / f"{data_name(spec)}-{MEASURED}"
            rows = self._cached(path, lambda spec=spec: once(self.scale, spec, self.folder))  # type: ignore[misc]
            found += [{"data": data_name(spec), **row} for row in rows]
        return found

    def _cached(self, path: Path, measure: Any) -> list[dict[str, Any]]:
        if not path.exists():
            write_lines(path, measure())
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def curve(folder: Path) -> list[dict[str, Any]]:
    """The tests of a run, each with the training loss before it."""
    points: list[dict[str, Any]] = []
    train_loss = None
    for line in read_run(folder) if (folder / "run.jsonl").is_file() else []:
        if line["event"] == "train":
            train_loss = line.get("loss", train_loss)
        elif line["event"] == "test":
            point: dict[str, Any] = {
                name: line[name] for name in ("epoch", "loss", "accuracy") if name in line
            }
            points.append({**point, "train_loss": train_loss})
    return points


def _public_recipe(planned: Planned) -> dict[str, Any]:
    """All fields as they ran; folders of this machine are nobody else's business."""
    path = planned.folder / "recipe.toml"
    values = combine(read_recipe(path), {}).to_mapping() if path.is_file() else planned.recipe.to_mapping()
    values["data"] = data_name(planned.data)
    if values.get("start_from"):
        values["start_from"] = Path(values["start_from"]).name
    return values
