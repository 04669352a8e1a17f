"""What a study leaves behind: records, tables, a figure, and a summary that says how they were made."""

import csv
import dataclasses
import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wellposed.study.compare import accuracies, spread
from wellposed.study.plan import Scale, Study, StudyRecords, StudyReport
from wellposed.text import aligned
from wellposed.train.environment import environment
from wellposed.train.report import write_json
from wellposed.train.report.run_log import plain


def about(
    study: Study, scale: Scale, data: Sequence[str], seeds: Sequence[int], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """What was asked, and where it ran; the command names sets of data, not folders of this machine."""
    surroundings = environment()
    surroundings.pop("command")
    return {
        "study": study.name,
        "title": study.title,
        "paper": study.paper,
        "claim": study.claim,
        "command": command(study.name, scale, data, seeds, changes),
        "seeds": list(seeds),
        "environment": surroundings,
    }


def command(
    name: str, scale: Scale, data: Sequence[str], seeds: Sequence[int], changes: Mapping[str, Any]
) -> str:
    """The command that does the same.

    >>> command("both", "small", ["cifar10:DIR"], [0, 1], {"epochs": 3})
    'wellposed study both --data cifar10:DIR --scale small --seeds 0,1 --set epochs=3'
    """
    parts = ["wellposed", "study", name]
    for spec in data:
        kind, colon, rest = spec.partition(":")
        shown = f"{kind}:{Path(rest).name or rest}" if colon else Path(kind).name
        parts += ["--data", shown]
    parts += ["--scale", scale, "--seeds", ",".join(map(str, seeds))]
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
    lines = [rounded(dataclasses.asdict(run)) for run in records.runs]
    write_lines(folder / "records.jsonl", [*lines, *map(rounded, records.measured)])
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
    write_json(folder / "summary.json", {**summary, "accuracy": accuracy_summary(records)})
    for name, rows in report.tables.items():
        if rows and name == "table":
            said.append(text_table(rows))
    said += [f"note: {note}" for note in notes]
    said.append(f"{details['paper']}: {details['claim']}\nverdict: {report.verdict} ({report.reason})")
    written = [path.name for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."]
    said.append(f"written to {folder}: {', '.join(written)}")
    return said


def rounded(value: Any) -> Any:
    """Numbers to six digits: more are not measured, and the files are for keeping.

    >>> rounded({"kappa": [123.456789, 1e-9], "n": 3})
    {'kappa': [123.457, 1e-09], 'n': 3}
    """
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


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
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with staged.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow(["" if row.get(name) is None else row[name] for name in columns])
    staged.replace(path)


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
    text = "".join(json.dumps(plain(row), allow_nan=False, ensure_ascii=False) + "\n" for row in rows)
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    staged.write_text(text, encoding="utf-8")
    staged.replace(path)
