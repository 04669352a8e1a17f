"""One study in one call: which runs it needs next, and the records of those that have ended.

A variant with several cells is tried first; its best cell is then trained with all seeds. What starts from
other weights waits for them. Each call of :meth:`Session.ready` tells the runs that nothing stands before.
"""

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wellposed.study import ledger
from wellposed.study.choosing import Planned, best_of, broke
from wellposed.study.compact import POINTS
from wellposed.study.grids import Grid
from wellposed.study.ledger import ENDED, Key
from wellposed.study.plan import RunRecord, Scale, Study, StudyRecords, data_name
from wellposed.study.pool import has_weights, without_folders
from wellposed.train.recipe import Recipe, read_recipe, write_recipe
from wellposed.train.runs import RECIPE

TRIAL_POINTS = 12
"""Of the curve of a run that only chose."""


class Session:
    """See above.

    Args:
        study: which.
        scale: of it.
        data: sets as ``--data`` has them.
        seeds: to train with.
        folder: of the study.
        pool: of all runs.
        changes: fields of all the recipes.

    Attributes:
        dropped: records of before that are not this study's any more, by the reason.
        strange: lines of the records that this version cannot read.
        has_worked: whether anything was trained or measured.
    """

    def __init__(
        self,
        study: Study,
        scale: Scale,
        *,
        data: Sequence[str],
        seeds: Sequence[int],
        folder: Path,
        pool: Path,
        changes: Mapping[str, Any],
    ) -> None:
        self.study, self.scale, self.folder = study, scale, folder
        self.data, self.seeds, self.changes = tuple(data), tuple(seeds), dict(changes)
        self.grid = Grid(study, scale, pool, self.changes)
        self.has_worked = False
        self._tried: set[Key] = set()
        self._planned: dict[Key, Planned] = {}
        self._lock = threading.RLock()
        runs, self.measured, self.strange = ledger.read(folder)
        self._runs = {ledger.key_of(run): run for run in runs}
        # Those that were there first stay first.
        self._sets = list(dict.fromkeys([*(run.data for run in runs), *map(data_name, data)]))
        self._stale = [run for run in runs if self.grid.stale(run)]
        self.dropped = Counter(self.grid.stale(run) for run in self._stale)
        if self.strange:
            self.dropped["an older version, which told less"] = len(self.strange)

    def check(self) -> None:
        """Raise if the study cannot be run so; nothing is written before."""
        for spec in self.data:
            self.grid.require_different(spec, self.seeds[0])

    def drop_stale(self) -> None:
        """Put records of other recipes aside: a mean must not be of two settings."""
        if self.dropped:
            ledger.add_dropped(self.folder, self._stale, self.strange)
            for run in self._stale:
                del self._runs[ledger.key_of(run)]
            self._stale, self.strange = [], []

    # Which runs are needed.

    def ready(self) -> list[Planned]:
        """The runs that are needed next; none when all have ended."""
        found: dict[Key, Planned] = {}
        for spec in self.data:
            for label in self.grid.variants:
                for planned in self._needed(spec, label):
                    found.setdefault(planned.key, planned)
        recipes = self.folder / "recipes"
        for key in found.keys() - self._planned.keys():
            recipes.mkdir(parents=True, exist_ok=True)
            write_recipe(found[key].recipe, recipes / f"{found[key].title}.toml")
        self._planned |= found
        return list(found.values())

    def _needed(self, spec: str, label: str) -> Iterator[Planned]:
        for planned in self._wanted(spec, label):
            source = self._source(planned)
            if self._is_there(planned, self._gives_weights(planned)):
                continue
            if source is None or source.key in self._tried or has_weights(source.folder):
                yield planned

    def _wanted(self, spec: str, label: str) -> list[Planned]:
        """The grid until it has ended, then its best with all seeds; nothing before what it starts from."""
        cells = self.grid.variants[label]
        if len(cells) > 1:
            tries = self._tries(spec, label)
            if any(not self._has_ended(each.key) for each in tries):
                return tries
        number = self._best(spec, label)
        made = [] if number is None else [self._plan(label, number, spec, seed) for seed in self.seeds]
        return [each for each in made if each is not None]

    def _tries(self, spec: str, label: str) -> list[Planned]:
        """The runs that a variant's best is chosen by; none while what they start from is not chosen."""
        if self.study.chooses_once:
            spec = self._chooser(spec, label)
        is_short = self.grid.has_trial(spec)
        seed = self._ended_grid(spec, label)
        if seed is None and not self.seeds:  # a call that only reports
            return []
        made = [
            self._plan(label, number, spec, self.seeds[0] if seed is None else seed, is_short)
            for number in range(len(self.grid.variants[label]))
        ]
        # What chooses is not measured.
        return [dataclasses.replace(each, measured=False) for each in made if each is not None]

    def _chooser(self, spec: str, label: str) -> str:
        """The set that has chosen before, though it may not be at hand now; else the first given.

        Of those with the same model: the digits have a small one, which wants other values.
        """
        specs = {data_name(spec): spec for spec in self.data}
        known = [specs.get(name, name) for name in self._sets]
        alike = [each for each in known if self._model(each) == self._model(spec)]
        ended = (each for each in alike if self._ended_grid(each, label) is not None)
        given = (each for each in self.data if each in alike)
        return next(ended, next(given, spec))

    def _model(self, spec: str) -> tuple[Any, ...]:
        base = self.study.base(self.scale, spec)
        return base.model, base.model_options

    def _ended_grid(self, spec: str, label: str) -> int | None:
        """The seed of a grid that has ended, so that more seeds do not choose anew."""
        is_short = self.grid.has_trial(spec)
        of_label = [
            run
            for run in self._runs.values()
            if (run.label, run.data, run.trial) == (label, data_name(spec), is_short) and run.state in ENDED
        ]
        numbers = range(len(self.grid.variants[label]))
        for seed in sorted({run.seed for run in of_label}):
            known = {run.run for run in of_label if run.seed == seed}
            made = [self._plan(label, number, spec, seed, is_short) for number in numbers]
            if all(each is not None and each.folder.name in known for each in made):
                return seed
        return None

    def _best(self, spec: str, label: str) -> int | None:
        """The number of the cell that stands for the variant; None until it is known."""
        cells = self.grid.variants[label]
        if len(cells) == 1:
            return 0
        tried = []
        for each in self._tries(spec, label):
            if not self._has_ended(each.key):
                return None
            tried.append((each.cell, self._runs[each.key]))
        if not tried:
            return None
        # A short run cannot tell what a long one makes of its setting: one that broke gives way to the next.
        whole = [each for each in tried if not self._broke(spec, label, cells.index(each[0]), each[1])]
        return cells.index(best_of(whole or tried))

    def _broke(self, spec: str, label: str, number: int, trial: RunRecord) -> bool:
        """Whether the full run of a cell ended below its trial, on the set and with the seed that choose."""
        if not trial.trial:
            return False
        chooser = self._chooser(spec, label) if self.study.chooses_once else spec
        full = self.grid.plan(label, number, chooser, trial.seed, False)
        return broke(self._runs.get(full.key), trial)

    def _plan(self, label: str, number: int, spec: str, seed: int, trial: bool = False) -> Planned | None:
        start = self.grid.variants[label][number].starts_from
        if start is None:
            return self.grid.plan(label, number, spec, seed, trial)
        best = self._best(spec, start)
        source = None if best is None else self._plan(start, best, spec, seed)
        return None if source is None else self.grid.plan(label, number, spec, seed, trial, source.folder)

    def _source(self, planned: Planned) -> Planned | None:
        start = planned.cell.starts_from
        best = None if start is None else self._best(planned.data, start)
        return None if start is None or best is None else self._plan(start, best, planned.data, planned.seed)

    def _gives_weights(self, planned: Planned) -> bool:
        """Whether a run that is not there yet starts from it."""
        followers = [
            each
            for label, cells in self.grid.variants.items()
            if not planned.trial and cells[0].starts_from == planned.cell.label
            for each in self._wanted(planned.data, label)
            if each.seed == planned.seed
        ]
        return any(not self._is_there(each, False) for each in followers)

    def _has_ended(self, key: Key) -> bool:
        return key in self._runs and (key in self._tried or self._runs[key].state in ENDED)

    def _is_there(self, planned: Planned, needs_weights: bool) -> bool:
        """Whether nothing is left to train."""
        if planned.key in self._tried:
            return True
        record = self._runs.get(planned.key)
        if record is None or record.state not in ENDED:
            return False
        is_unmeasured = planned.measured and record.state == "finished" and not record.measured
        return not (needs_weights or is_unmeasured) or has_weights(planned.folder)

    # Records.

    def ended(self, name: str) -> None:
        """Take down a run of the pool that has ended, if it is one of the study's."""
        with self._lock:
            for key, planned in self._planned.items():
                if key[0] == name and key not in self._tried:
                    self._tried.add(key)
                    self._take(planned)
                    self.has_worked = True
            self.save()

    def _take(self, planned: Planned) -> None:
        before = self._runs.get(planned.key)
        record = self._record(planned)
        if before is None or record.state in ENDED or before.state not in ENDED:
            kept = () if before is None else before.measured
            self._runs[planned.key] = dataclasses.replace(record, measured=kept)

    def to_measure(self) -> list[Planned]:
        """Runs of the best cells that have ended and that nothing was measured on."""
        with self._lock:
            wanted = [
                planned
                for spec in self.data
                for label in self.grid.variants
                for planned in self._wanted(spec, label)
            ]
            return [each for each in wanted if self._is_unmeasured(each)]

    def _is_unmeasured(self, planned: Planned) -> bool:
        record = self._runs.get(planned.key)
        can_be = record is not None and record.state == "finished" and not record.measured
        return planned.measured and can_be and has_weights(planned.folder)

    def take_measured(self, planned: Planned, rows: Sequence[Mapping[str, Any]]) -> None:
        with self._lock:
            record = self._runs[planned.key]
            self._runs[planned.key] = dataclasses.replace(record, measured=list(rows))
            self.has_worked = True
            self.save()

    def save(self) -> None:
        """After each run: what has ended is known, whatever comes."""
        with self._lock:
            ledger.write(self.folder, self.records().runs, self.measured)

    def records(self) -> StudyRecords:
        """Those of this call and those of before, in the order of the grid."""
        with self._lock:
            runs = list(self._runs.values())
            given = {data_name(spec): spec for spec in self.data}
            best = {
                (name, label): number
                for name in self._sets
                for label in self.grid.variants
                for number in [self._best(given.get(name, name), label)]
                # What another call chose stands while its grid is not whole here.
                if number is not None or name in given
            }
            placed = []
            for run in runs:
                place, cell = self.grid.keys(run.data, run.seed).get(ledger.key_of(run), (0, None))
                if cell is not None and (run.data, run.label) in best:
                    number = best[run.data, run.label]
                    chosen = None if number is None else self.grid.variants[run.label][number].name
                    run = dataclasses.replace(run, best=chosen == cell.name)
                placed.append(((self._sets.index(run.data), place, not run.trial, run.seed), run))
            placed.sort(key=lambda each: each[0])
            return StudyRecords(self.study.name, self.scale, [run for _, run in placed], self.measured)

    def _record(self, planned: Planned) -> RunRecord:
        cell, result = planned.cell, ledger.result_of(planned.folder)
        changed = {name: self.changes.get(name, value) for name, value in cell.fields.items()}
        return RunRecord(
            label=cell.label,
            data=data_name(planned.data),
            seed=planned.seed,
            fields=changed,
            chosen=dict(cell.chosen),
            recipe=_as_it_ran(planned),
            state=ledger.state_of(planned.folder),
            result=result,
            curve=ledger.curve(planned.folder, TRIAL_POINTS if planned.trial else POINTS),
            reported=cell.reported,
            trial=planned.trial,
            run=planned.folder.name,
        )


def _as_it_ran(planned: Planned) -> dict[str, Any]:
    """All fields with nothing open; folders of this machine are nobody else's business."""
    path = planned.folder / RECIPE
    recipe = Recipe.from_mapping(read_recipe(path)) if path.is_file() else planned.recipe
    return without_folders(recipe).to_mapping()
