"""The folder of a study as subjects: the one place that knows its files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from wellposed.records import Record, from_dict
from wellposed.report.environment_words import environment_text
from wellposed.report.subjects import JacobianCurve, Subject, edits_of

RECORDS, SUMMARY = "records.jsonl", "summary.json"
_JACOBIAN = "jacobian spectrum"
_KNOWN = {field.name for field in fields(Record)}


def is_study(folder: Path) -> bool:
    return (folder / RECORDS).is_file() and (folder / SUMMARY).is_file()


def read_study(folder: Path) -> tuple[list[Subject], list[str]]:
    """A subject for each run that stands for its variant, and what the study concluded."""
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (folder / RECORDS).read_text(encoding="utf-8").splitlines() if line]
    study = str(summary.get("study", folder.name))
    runs = [
        line for line in lines if "label" in line and line.get("best", True) and line.get("reported", True)
    ]
    several = len({line.get("data") for line in runs}) > 1
    subjects = [_subject(line, summary, study, several) for line in runs]
    alone = [line for line in lines if "label" not in line]
    if alone:
        subjects.append(_without_run(alone, summary, study))
    said = f"Study {study} ({summary.get('paper', '')}): {summary.get('claim', '')} "
    said += f"Verdict: {summary.get('verdict', 'none')}. {summary.get('reason', '')}"
    return subjects, [said.strip()]


def _subject(line: Mapping[str, Any], summary: Mapping[str, Any], study: str, several: bool) -> Subject:
    recipe, result = line.get("recipe") or {}, line.get("result") or {}
    label = f"{line['label']}, {line.get('data')}" if several else str(line["label"])
    measured = line.get("measured") or []
    return Subject(
        name=f"{study}: {label}, seed {line.get('seed')}",
        group=f"{study}: {label}",
        kind="run",
        seed=line.get("seed"),
        edits=edits_of(recipe),
        key=(study, str(recipe.get("model")), str(line.get("data"))),
        recipe=recipe,
        lines=[event for point in line.get("curve") or [] for event in _events(point)],
        summary={**result, "finished": line.get("state") == "finished"},
        records=_records(measured),
        measured_on=f"study {study}, {_weights(measured)} weights" if measured else "",
        jacobians=_jacobians(measured, str(line["label"])),
        provenance=_provenance(summary, study)
        | {"data": str(line.get("data")), "seed": str(line.get("seed")), "state": str(line.get("state"))}
        | {f"recipe: {key}": str(value) for key, value in recipe.items()},
        notes=tuple(map(str, summary.get("notes", []))),
    )


def _without_run(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], study: str) -> Subject:
    return Subject(
        name=f"study {study}",
        kind="diagnosis",
        key=(study,),
        records=_records(rows),
        measured_on=f"study {study}",
        jacobians=_jacobians(rows, study),
        provenance=_provenance(summary, study),
        notes=tuple(map(str, summary.get("notes", []))),
    )


def _events(point: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A test of the curve, and the training loss before it, as lines of a run."""
    told: dict[str, Any] = {"event": "test", "epoch": point.get("epoch")}
    told |= {name: point[name] for name in ("loss", "accuracy") if point.get(name) is not None}
    if point.get("train_loss") is None:
        return [told]
    return [{"event": "train", "epoch": point.get("epoch"), "loss": point["train_loss"]}, told]


def _weights(rows: Sequence[Mapping[str, Any]]) -> str:
    """Whose measurements count where a run was measured at several moments."""
    present = {row.get("weights") for row in rows}
    return next((name for name in ("best", "last") if name in present), "the run's")


def _records(rows: Sequence[Mapping[str, Any]]) -> tuple[Record, ...]:
    wanted = _weights(rows)
    return tuple(
        from_dict({"value": None} | {name: value for name, value in row.items() if name in _KNOWN})
        for row in rows
        if row.get("measure") != _JACOBIAN and "measure" in row and row.get("weights", wanted) == wanted
    )


def _jacobians(rows: Sequence[Mapping[str, Any]], label: str) -> tuple[JacobianCurve, ...]:
    found = []
    for row in rows:
        if row.get("measure") == _JACOBIAN and row.get("relative"):
            trained = row.get("where") == "as trained"
            panel = "trained with graying" if trained else f"{row.get('method')} graying, {row.get('where')}"
            found.append(
                JacobianCurve(
                    panel=f"block {row.get('block')}, {row.get('position')}: {panel}",
                    line=label if trained else f"eps {row.get('eps')}",
                    eps=row.get("eps"),
                    image=int(row.get("image", 0)),
                    points=int(row.get("points", len(row["relative"]))),
                    values=tuple(row["relative"]),
                )
            )
    return tuple(found)


def _provenance(summary: Mapping[str, Any], study: str) -> dict[str, str]:
    told = {"study": study, "command": str(summary.get("command", ""))}
    return told | environment_text(summary.get("environment") or {})
