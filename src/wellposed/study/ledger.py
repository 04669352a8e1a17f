"""``records.jsonl``: one line a run, and then what was measured without one.

It is what a report is made from, and it remembers: a run whose record stands there is not trained again,
though its folder and its weights may be gone.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wellposed.files import parse_json, read_bytes
from wellposed.study.compact import POINTS, packed_rows, rounded, thinned, unpacked_rows
from wellposed.study.files import write_lines
from wellposed.study.plan import RunRecord
from wellposed.train.log import read_run
from wellposed.train.recipe import Recipe
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
    for number, line in enumerate(read_bytes(path, 2**32).splitlines() if path.exists() else [], 1):
        values = _values(line)
        if values is None:
            if torn is None:
                raise ValueError(
                    f"expected a record as JSON in line {number} of {path}, it is torn; delete the line, and "
                    "the study makes its run again."
                )
            torn.append(number)
        elif "label" not in values:
            measured.append(values)
        elif values.keys() <= _NAMES and values.get("run"):
            runs.append(_unpacked(values))
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
    lines = [*map(packed, runs), *map(rounded, measured), *map(json.loads, strange)]
    write_lines(folder / RECORDS, lines)


def add_dropped(folder: Path, runs: Sequence[RunRecord], strange: Sequence[str]) -> None:
    """Keep what is no longer reported beside: it may have taken days."""
    lines = [json.dumps(packed(run), ensure_ascii=False) for run in runs] + list(strange)
    with (folder / DROPPED).open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def packed(run: RunRecord) -> dict[str, Any]:
    """A record as a line; of the recipe what is not the default."""
    values = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    default = Recipe().to_mapping()
    values["recipe"] = {
        name: value for name, value in run.recipe.items() if name not in default or default[name] != value
    }
    values["curve"] = packed_rows(rounded(list(run.curve)))
    values["measured"] = packed_rows(rounded(list(run.measured)))
    return {name: rounded(value) for name, value in values.items()}


def _unpacked(values: Mapping[str, Any]) -> RunRecord:
    rows = {name: unpacked_rows(values.get(name, ())) for name in ("curve", "measured")}
    return RunRecord(**{**values, **rows})


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
