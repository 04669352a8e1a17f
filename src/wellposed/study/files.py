"""What a study leaves behind: records, tables, a figure, and a summary that says how they were made."""

import dataclasses
import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.environment import environment
from wellposed.files import plain, read_object, write_cells, write_json, write_text
from wellposed.study.compare import accuracies, one_by_one, spread
from wellposed.study.plan import Scale, StudyRecords, StudyReport, data_name
from wellposed.text import aligned

if TYPE_CHECKING:
    from wellposed.study.session import Session

SUMMARY = "summary.json"
AND = " && "
"""Between commands, where data sets have other seeds."""


def about(session: "Session", records: StudyRecords, before: Mapping[str, Any]) -> dict[str, Any]:
    """What all the records are of, and where they were made.

    Args:
        session: the call.
        records: all that are reported.
        before: the summary that stands there: other calls may have made some of the records.
    """
    study = session.study
    specs = {**before.get("data", {}), **{data_name(spec): shown(spec) for spec in session.data}}
    data, seeds = {}, []
    if study.cells(session.scale):  # what trains nothing depends on neither
        data = {name: specs.get(name, name) for name in records.datasets or specs}
        seeds = sorted({run.seed for run in records.runs}) or list(session.seeds)
    return {
        "study": study.name,
        "title": study.title,
        "paper": study.paper,
        "claim": study.claim,
        "command": AND.join(
            command(study.name, session.scale, [data[name] for name in of_seeds], each, session.changes)
            for each, of_seeds in (_by_seeds(records, data, seeds) or {(): []}).items()
        ),
        "scale": session.scale,
        "data": data,
        "seeds": seeds,
        "changes": session.changes,
        "environments": _environments(before.get("environments", []), session.has_worked),
    }


def _by_seeds(
    records: StudyRecords, data: Iterable[str], seeds: Sequence[int]
) -> dict[tuple[int, ...], list[str]]:
    """The sets that ran with the same seeds; one without runs counts to ``seeds``."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name in data:
        own = sorted({run.seed for run in records.runs if run.data == name and not run.trial})
        found.setdefault(tuple(own or seeds), []).append(name)
    return found


def write_details(session: "Session") -> None:
    """What is known before the report: a later call that only reports cannot tell where the runs were."""
    before = read_summary(session.folder)
    write_json(session.folder / SUMMARY, {**before, **about(session, session.records(), before)})


def _environments(before: Sequence[Mapping[str, Any]], has_worked: bool) -> list[Mapping[str, Any]]:
    """Of the calls that trained or measured, each once, with its latest time."""
    if not has_worked:
        return list(before)
    now = environment()
    now.pop("command")
    others = [each for each in before if {**each, "time": None} != {**now, "time": None}]
    return [*others, now]


def read_summary(folder: Path) -> dict[str, Any]:
    """The one of an earlier call; empty if there is none."""
    path = folder / SUMMARY
    return read_object(path) if path.exists() else {}


def shown(spec: str) -> str:
    """A data set without the folders of this machine.

    >>> [shown(spec) for spec in ("digits", "cifar10:/a/DIR", "packed:/a/b.npz", "/a/imagenet")]
    ['digits', 'cifar10:DIR', 'packed:b.npz', 'imagenet']
    """
    kind, colon, rest = spec.partition(":")
    return f"{kind}:{Path(rest).name or rest}" if colon else Path(kind).name


def command(
    name: str, scale: Scale, data: Sequence[str], seeds: Sequence[int], changes: Mapping[str, Any]
) -> str:
    """The command that does the same.

    >>> command("both", "small", ["cifar10:DIR"], [0, 1], {"epochs": 3})
    'wellposed study both --data cifar10:DIR --scale small --seeds 0,1 --set epochs=3'
    >>> command("training-time", "small", [], [], {})
    'wellposed study training-time --scale small'
    """
    parts = ["wellposed", "study", name]
    for spec in data:
        parts += ["--data", shown(spec)]
    parts += ["--scale", scale]
    if seeds:
        parts += ["--seeds", ",".join(map(str, seeds))]
    for field, value in changes.items():
        given = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, each in given:
            parts += ["--set", f"{field}{'.' if key else ''}{key}={'none' if each is None else each}"]
    return shlex.join(parts)


def write_report(
    folder: Path, records: StudyRecords, report: StudyReport, details: Mapping[str, Any]
) -> list[str]:
    """Write all files; returns what to print."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in report.tables.items():
        write_table(folder / f"{name}.csv", rows)
    said, notes = [], list(report.notes)
    if report.draw is not None:
        staged = folder / f".figure.{os.getpid()}.png"
        try:
            report.draw(staged)
            staged.replace(folder / "figure.png")
        except ImportError as error:
            notes.append(str(error))
        finally:
            staged.unlink(missing_ok=True)
    summary = {**details, "verdict": report.verdict, "reason": report.reason, "notes": notes}
    write_json(folder / SUMMARY, {**summary, "accuracy": accuracy_summary(records)})
    for name, rows in report.tables.items():
        if rows and name == "table":
            said.append(text_table(rows))
    said += [f"note: {note}" for note in notes]
    together, each = one_by_one(report.reason)
    said.append(f"{details['paper']}: {details['claim']}\nverdict: {report.verdict} ({together})")
    said += [f"- {claim}" for claim in each]
    written = [path.name for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."]
    said.append(f"written to {folder}: {', '.join(written)}")
    return said


def accuracy_summary(records: StudyRecords) -> list[dict[str, Any]]:
    """Mean and deviation of each variant on each data set, where runs classify."""
    rows = []
    for data in records.datasets:
        for label in records.labels:
            found = spread(accuracies(records.of(label, data)).values())
            if found is not None:
                rows.append({"data": data, "variant": label, **dataclasses.asdict(found)})
    return rows


def columns_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A CSV file that is replaced whole."""
    columns = columns_of(rows)
    cells = ([row.get(name) for name in columns] for row in rows)
    write_cells(path, [columns, *cells], lineterminator="\n")


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """For a terminal; columns that hold nothing are left out."""
    columns = [name for name in columns_of(rows) if any(row.get(name) not in (None, "") for row in rows)]
    cells = [[_shown(row.get(name)) for name in columns] for row in rows]
    numeric = [
        index
        for index, name in enumerate(columns)
        if all(isinstance(row.get(name), (int, float, type(None))) for row in rows)
    ]
    return aligned([[name.replace("_", " ") for name in columns], *cells], right=numeric)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) and abs(value) >= 0.1 else str(value)


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line; the file is whole or not there."""
    dump = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode
    text = "".join(dump(plain(row)) + "\n" for row in rows)
    write_text(path, text)
