"""``records.jsonl``: the recipe that the runs share, one line a run, and then what was measured without one.

It is what a report is made from, and it remembers: a run whose record stands there is not trained again,
though its folder and its weights may be gone. A recipe in it is whole: the first line has the values that
the runs share, and each run what differs from them. No default of the program stands between.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wellposed.files import parse_json, read_bytes
from wellposed.run_records import read_run
from wellposed.study.compact import POINTS, packed_rows, rounded, thinned, unpacked_rows
from wellposed.study.files import write_lines
from wellposed.study.plan import RunRecord
from wellposed.train.sweep.processes import is_finished, read_result

RECORDS = "records.jsonl"
DROPPED = "records-dropped.jsonl"
ENDED = ("finished", "nonfinite")
"""States that another try would not change."""

Key = tuple[str, bool]
"""The name of a run, and whether it stands there as a trial."""

_RESULT = ("updates", "seconds", "images_per_second", "train", "test", "best", "nonfinite", "collapsed")
_NAMES = {field.name for field in dataclasses.fields(RunRecord)}


def key_of(record: RunRecord) -> Key:
    return record.run, record.trial


def read(
    folder: Path, torn: list[int] | None = None
) -> tuple[list[RunRecord], list[dict[str, Any]], list[str]]:
    """The runs, what was measured without one, and lines that this version cannot read.

    Args:
        folder: of the study.
        torn: gets the numbers of the lines that are no JSON; without it such a line is an error.
    """
    path = folder / RECORDS
    runs: list[RunRecord] = []
    measured: list[dict[str, Any]] = []
    strange: list[str] = []
    base: Mapping[str, Any] | None = None
    for number, line in enumerate(read_bytes(path, 2**32).splitlines() if path.exists() else [], 1):
        values = _values(line)
        if values is None:
            if torn is None:
                raise ValueError(
                    f"expected a record as JSON in line {number} of {path}, it is torn; delete the line, and "
                    "the study makes its run again."
                )
            torn.append(number)
        elif values.keys() == {"base"}:
            base = values["base"]
        elif "label" not in values:
            measured.append(values)
        elif values.keys() <= _NAMES and values.get("run") and base is not None:
            runs.append(_unpacked(values, base))
        else:
            strange.append(line.decode())
    return runs, measured, strange


def _values(line: bytes) -> dict[str, Any] | None:
    try:
        values = parse_json(line.decode())
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def write(
    folder: Path,
    runs: Iterable[RunRecord],
    measured: Iterable[Mapping[str, Any]],
    strange: Iterable[str] = (),
) -> None:
    """``strange`` are lines that this version cannot read; they stay as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / RECORDS, [*packed(runs), *map(rounded, measured), *map(json.loads, strange)])


def add_dropped(folder: Path, runs: Sequence[RunRecord], strange: Sequence[str]) -> None:
    """Keep what is no longer reported beside: it may have taken days."""
    lines = [json.dumps(line, ensure_ascii=False) for line in packed(runs)] + list(strange)
    with (folder / DROPPED).open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def packed(runs: Iterable[RunRecord]) -> list[dict[str, Any]]:
    """Records as lines: the base of their recipes, then the runs."""
    runs = list(runs)
    if not runs:
        return []
    base = shared([run.recipe for run in runs])
    lines: list[dict[str, Any]] = [{"base": rounded(base)}]
    for run in runs:
        values = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
        values["recipe"] = {
            name: run.recipe[name]
            for name in sorted(run.recipe)
            if name not in base or base[name] != run.recipe[name]
        }
        values["curve"] = packed_rows(rounded(list(run.curve)))
        values["measured"] = packed_rows(rounded(list(run.measured)))
        lines.append({name: rounded(value) for name, value in values.items()})
    return lines


def shared(recipes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the fields that all recipes have, the value that most of them have.

    >>> shared([{"lr": 0.1, "seed": 0}, {"lr": 0.1, "seed": 1, "eps": 0.7}, {"lr": 0.2, "seed": 1}])
    {'lr': 0.1, 'seed': 1}
    """
    found = {}
    for name in sorted(recipes[0]):
        values = [recipe[name] for recipe in recipes if name in recipe]
        if len(values) == len(recipes):
            counts = Counter(json.dumps(value, sort_keys=True) for value in values)
            found[name] = json.loads(counts.most_common(1)[0][0])
    return found


def _unpacked(values: Mapping[str, Any], base: Mapping[str, Any]) -> RunRecord:
    rows = {name: unpacked_rows(values.get(name, ())) for name in ("curve", "measured")}
    return RunRecord(**{**values, **rows, "recipe": {**base, **values["recipe"]}})


def state_of(folder: Path) -> str:
    """Of a run, from its ``result.json``."""
    result = read_result(folder)
    if is_finished(result):
        return "finished"
    return "nonfinite" if result.get("nonfinite") else "failed"


def result_of(folder: Path) -> dict[str, Any]:
    """What a record keeps of ``result.json``; the rest is in the run's folder."""
    result = read_result(folder)
    return {name: result[name] for name in _RESULT if name in result}


def curve(folder: Path, points: int = POINTS) -> list[dict[str, Any]]:
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
    return thinned(tests, points)
