"""Runs a study: recipes -> ``wellposed sweep`` -> records, with what is measured on the weights.

The same call again resumes: a run whose record is there is not trained again, though its folder may be gone,
and a run that was stopped continues from its last checkpoint. Further seeds and data sets add to the records.
Runs stand in one folder for all studies (the pool), named by what decides their result, so equal recipes of
two studies are trained once.
"""

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from studies.study import Records, Scale, Study, Variant, data_name
from wellposed import study_records
from wellposed.calls import plain_calls
from wellposed.files import read_object
from wellposed.run_records import read_run
from wellposed.study_records import RunRecord, rounded, thinned
from wellposed.train import Recipe, sweep
from wellposed.train.edits import whole
from wellposed.train.recipe import REMOVED, combine, read_recipe, write_recipe

ENDED = ("finished", "nonfinite")
"""States that another try would not change."""
RUNS = Path("runs/studies")

Key = tuple[str, str, int]
"""Label, data set and seed."""

_RESULT = ("updates", "seconds", "images_per_second", "train", "test", "best", "nonfinite", "collapsed")
_AS_ASKED = {"data", "start_from", "seed", "placement"} | {
    each.name for each in dataclasses.fields(Recipe) if each.metadata["free"]
}
"""Fields that may differ from the study's: names for folders, and what does not decide the result."""


@dataclass(frozen=True)
class Planned:
    """One run that a study asks for."""

    variant: Variant
    data: str
    recipe: Recipe
    folder: Path

    @property
    def key(self) -> Key:
        return self.variant.label, data_name(self.data), self.recipe.seed

    @property
    def title(self) -> str:
        return f"{self.variant.label}, {data_name(self.data)}, seed {self.recipe.seed}"


@dataclass(frozen=True)
class Outcome:
    """The records, an exit code, and whether anything was trained or measured."""

    records: Records
    exit_code: int
    has_worked: bool


def run(
    study: Study,
    *,
    scale: Scale,
    data: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    pool: Path = RUNS,
    changes: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    command: Sequence[str] = sweep.COMMAND,
    console: Console | None = None,
) -> Outcome:
    """Train and measure what the records in ``out`` lack.

    Args:
        study: which.
        scale: of it.
        data: sets as ``--data`` has them.
        seeds: to train with.
        out: folder of the records.
        pool: folder of the runs.
        changes: fields of all recipes, over what the study says.
        jobs: runs at a time.
        command: what trains a recipe.
        console: where to print.
    """
    console = console or Console()
    asked = plan(study, scale, data, seeds, pool, changes or {})
    ledger = study_records.read(out)
    if ledger.torn:
        raise ValueError(
            f"expected records as JSON in {out / study_records.RECORDS}, lines {ledger.torn} are torn; "
            "delete them, and their runs are made again."
        )
    if ledger.strange:
        raise ValueError(
            f"expected records of this version in {out / study_records.RECORDS}, {ledger.strange} are of "
            "another; give another folder as --out."
        )
    runs = {_key(run): run for run in ledger.runs if run.role in ("result", "start")}
    others = [run for run in ledger.runs if run.role not in ("result", "start")]
    require_same(asked, runs)

    def save() -> Records:
        placed = in_order(asked, [*runs.values(), *others])
        study_records.write(out, placed, ledger.measured)
        return Records(scale, placed, ledger.measured)

    code, has_worked = 0, False
    for stage in stages(asked, runs):
        if not stage:
            continue
        with tempfile.TemporaryDirectory() as folder:
            files = [write(each, Path(folder)) for each in stage]
            outcome = sweep.run(files, out=pool, jobs=jobs, command=command, console=console)
        for each in stage:
            if (each.folder / "result.json").is_file():
                runs[each.key] = record_of(each)
                has_worked = True
        save()
        # A run whose loss was not finite has failed for the sweep; for a study it is a result.
        has_failed = not all(_is_there(each, runs) for each in stage)
        code = max(code, outcome.exit_code if outcome.exit_code >= 128 else int(has_failed))
        if code >= 128:
            console.print("The study was stopped; the same command resumes it.")
            return Outcome(save(), code, has_worked)
    if study.after is not None:
        for each in asked:
            record = runs.get(each.key)
            is_new = record is not None and record.state == "finished" and not record.measured
            if record is not None and is_new and each.variant.role == "result" and is_finished(each.folder):
                console.print(f"measuring {each.title}", markup=False, highlight=False)
                try:
                    measured = rounded(study.after(each.folder))
                except Exception as error:  # the other runs are measured all the same
                    said = f"measuring {each.title} failed: {type(error).__name__}: {error}"
                    console.print(said, markup=False, highlight=False)
                    code = max(code, 1)
                    continue
                runs[each.key] = dataclasses.replace(record, measured=measured)
                has_worked = True
                save()
    if study.once is not None and not ledger.measured:
        ledger.measured = [rounded(row) for row in study.once(scale, out, data, changes or {})]
        has_worked = True
    return Outcome(save(), code, has_worked)


def plan(
    study: Study,
    scale: Scale,
    data: Sequence[str],
    seeds: Sequence[int],
    pool: Path,
    changes: Mapping[str, Any],
) -> list[Planned]:
    """All runs of a call, what others start from first."""
    for field in ("seed", "data"):
        if field in changes:
            option = "--seeds" if field == "seed" else "--data"
            raise ValueError(f"{field} tells runs apart and is no change of all; say {option}.")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers, got {list(seeds)}.")
    if len({data_name(spec) for spec in data}) < len(data):
        raise ValueError(
            f"data must be different sets, got {list(data)}; a set is known by its name without folders."
        )
    found: list[Planned] = []
    for spec in data:
        variants = study.variants(scale, spec)
        for seed in seeds:
            of_seed: dict[str, Planned] = {}
            for variant in sorted(variants, key=lambda each: each.start is not None):
                recipe = combine(variant.recipe.to_mapping(), {"seed": seed, **changes})
                if variant.start is not None and variant.start not in of_seed:
                    raise ValueError(
                        f"{variant.label!r} starts from {variant.start!r}, which is no variant of the study."
                    )
                if variant.start is not None:
                    source = str(of_seed[variant.start].folder)
                    recipe = dataclasses.replace(recipe, start_from=source)
                of_seed[variant.label] = Planned(variant, spec, recipe, pool / run_name(recipe))
            folders = {each.folder for each in of_seed.values()}
            if len(folders) < len(of_seed):
                raise ValueError(
                    "with these changes two variants would be the same run; leave out of --set what the "
                    "study varies."
                )
            found += of_seed.values()
    return found


def stages(asked: Sequence[Planned], runs: Mapping[Key, RunRecord]) -> Iterable[list[Planned]]:
    """What is to be trained: what others start from, then the others; each when the one before has ended."""
    waiting = [each for each in asked if not _is_there(each, runs)]
    sources = {each.recipe.start_from for each in waiting}
    # A run whose record is there is trained again if another one needs its weights.
    needed = [each for each in asked if str(each.folder) in sources and not is_finished(each.folder)]
    first = [each for each in waiting if each.variant.start is None]
    yield list({each.folder: each for each in [*first, *needed]}.values())
    later = {each.folder: each for each in waiting if each.variant.start is not None}
    yield [each for each in later.values() if is_finished(Path(str(each.recipe.start_from)))]


def _is_there(planned: Planned, runs: Mapping[Key, RunRecord]) -> bool:
    record = runs.get(planned.key)
    return record is not None and record.state in ENDED


def require_same(asked: Sequence[Planned], runs: Mapping[Key, RunRecord]) -> None:
    """Raise if records that are there have other recipes: a mean must not be of two settings."""
    for each in asked:
        record = runs.get(each.key)
        if record is None:
            continue
        if changed := differing(each.recipe, record.recipe):
            raise ValueError(
                f"expected records of the study's own recipe, that of {each.title} has another "
                f"({', '.join(changed)}); give another folder as --out, or leave --set out."
            )


def differing(recipe: Recipe, recorded: Mapping[str, Any]) -> list[str]:
    """The fields that decide a result and that a record has otherwise."""
    wanted = json.loads(json.dumps(recipe.to_mapping()))
    asked, made = (list(map(whole, plain_calls(each))) for each in (wanted, recorded))
    # What was open in the recipe is filled in in the record.
    same = len(asked) == len(made) and all(a.items() <= b.items() for a, b in zip(asked, made, strict=True))
    fixed = wanted.keys() - _AS_ASKED - {"edits"}
    changed = [name for name in fixed if wanted[name] != recorded.get(name)]
    return sorted(changed if same else [*changed, "edits"])


def run_name(recipe: Recipe) -> str:
    """Of the folder of a run: the same on every machine, of folders it has the names.

    >>> run_name(Recipe(data="cifar10:HERE")) == run_name(Recipe(data="cifar10:THERE", workers=0))
    True
    """
    values = {name: default for name, (default, _) in REMOVED.items()} | without_folders(recipe).to_mapping()
    decisive = {
        name: value for name, value in values.items() if name not in ("workers", "device", "trackers")
    }
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:8]
    return f"{data_name(recipe.data)}-seed{recipe.seed}-{digest}"


def without_folders(recipe: Recipe) -> Recipe:
    """The recipe with names in the place of folders of this machine."""
    source = None if recipe.start_from is None else Path(recipe.start_from).name
    return dataclasses.replace(recipe, data=data_name(recipe.data), start_from=source)


def write(planned: Planned, folder: Path) -> Path:
    file = folder / f"{planned.folder.name}.toml"
    write_recipe(planned.recipe, file)
    return file


def record_of(planned: Planned) -> RunRecord:
    """Of a run that has ended."""
    result = read_object(planned.folder / "result.json")
    recipe = Recipe.from_mapping(read_recipe(planned.folder / "recipe.toml"))
    state = "finished" if is_finished(planned.folder) else "failed"
    return RunRecord(
        label=planned.variant.label,
        data=data_name(planned.data),
        seed=planned.recipe.seed,
        recipe=without_folders(recipe).to_mapping(),
        state="nonfinite" if state == "failed" and result.get("nonfinite") else state,
        result=rounded({name: result[name] for name in _RESULT if name in result}),
        curve=rounded(curve(planned.folder)),
        chosen=dict(planned.variant.chosen),
        role=planned.variant.role,
        run=planned.folder.name,
    )


def is_finished(folder: Path) -> bool:
    """Whether the folder holds a run that came to its end."""
    file = folder / "result.json"
    result = read_object(file) if file.is_file() else {}
    return bool(result.get("status", "finished" if result.get("finished") else "") == "finished")


def curve(folder: Path) -> list[dict[str, Any]]:
    """The tests of a run, each with the training loss before it."""
    tests: list[dict[str, Any]] = []
    train_loss = None
    for line in read_run(folder) if (folder / "run.jsonl").is_file() else []:
        if line["event"] == "train":
            train_loss = line.get("loss", train_loss)
        elif line["event"] == "test":
            point: dict[str, Any] = {
                name: line[name] for name in ("epoch", "loss", "accuracy") if name in line
            }
            tests.append({**point, "train_loss": train_loss})
    return thinned(tests)


def in_order(asked: Sequence[Planned], runs: Iterable[RunRecord]) -> list[RunRecord]:
    """By data set, variant and seed; those that were there first stay first."""
    runs = list(runs)
    labels = list(dict.fromkeys([*(each.variant.label for each in asked), *(run.label for run in runs)]))
    sets = list(dict.fromkeys([*(run.data for run in runs), *(data_name(each.data) for each in asked)]))
    roles = ("result", "start", "trial", "other setting")
    return sorted(
        runs,
        key=lambda run: (sets.index(run.data), labels.index(run.label), roles.index(run.role), run.seed),
    )


def _key(run: RunRecord) -> Key:
    return run.label, run.data, run.seed
