"""The folder of a study as subjects: the one place that knows its files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from wellposed.records import Record, from_dict
from wellposed.report.damage import Damage, json_object, torn_lines
from wellposed.report.environment_words import environment_text
from wellposed.report.states import state as state_in_words
from wellposed.report.subjects import Conclusion, Found, JacobianCurve, Subject, edits_of
from wellposed.study_records import RECORDS, SUMMARY, RunRecord, claim_from_dict, sentence
from wellposed.study_records import read as read_records

_JACOBIAN = "jacobian spectrum"
_KNOWN = {field.name for field in fields(Record)}


def is_study(folder: Path) -> bool:
    return (folder / RECORDS).is_file() and (folder / SUMMARY).is_file()


def read_study(folder: Path) -> Found:
    """A subject for each run that is a result, and what the study concluded."""
    damage: list[Damage] = []
    summary = json_object(folder / SUMMARY, damage)
    ledger = read_records(folder)
    damage += torn_lines(folder / RECORDS, ledger.torn)
    study = str(summary.get("study", folder.name))
    shown = [run for run in ledger.runs if run.role == "result"]
    several = len({run.data for run in shown}) > 1
    subjects = [_subject(run, summary, study, several) for run in shown]
    if ledger.measured:
        subjects.append(_without_run(ledger.measured, summary, study))
    if not (summary or ledger.strange):  # a summary that cannot be read concludes nothing
        return Found(subjects, [], damage)
    return Found(subjects, [_conclusion(study, summary, ledger.strange)], damage)


def _conclusion(study: str, summary: Mapping[str, Any], strange: int) -> Conclusion:
    """What the study set out to test, and a sentence for each claim with its verdict."""
    claims = [claim_from_dict(each) for each in summary.get("claims", [])]
    said = f"Study {study} ({summary.get('paper', '')}): {summary.get('claim', '')}"
    if strange:
        said += f" ({strange} records of another version of wellposed are skipped)"
    if claims:
        counts = Counter(claim.verdict.value for claim in claims)
        said += (
            f" {len(claims)} claims: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()) + "."
        )
    return Conclusion(said.strip(), tuple(map(sentence, claims)))


def _subject(run: RunRecord, summary: Mapping[str, Any], study: str, several: bool) -> Subject:
    recipe = run.recipe
    label = f"{run.label}, {run.data}" if several else run.label
    ended = {**run.result, "finished": run.state == "finished"}
    state = state_in_words(ended, run.state)
    told = {"data": run.data, "seed": str(run.seed), "state": state}
    return Subject(
        name=f"{study}: {label}, seed {run.seed}",
        group=f"{study}: {label}",
        kind="run",
        seed=run.seed,
        edits=edits_of(recipe),
        key=(study, str(recipe.get("model")), run.data),
        recipe=recipe,
        lines=[event for point in run.curve for event in _events(point)],
        summary=ended,
        state=state,
        records=_records(run.measured),
        measured_on=f"study {study}, {_weights(run.measured)} weights" if run.measured else "",
        jacobians=_jacobians(run.measured, run.label),
        provenance=_provenance(summary, study)
        | told
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
    return next((name for name in ("last", "best") if name in present), "the run's")


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
    surroundings = summary.get("environments") or [{}]
    return told | environment_text(surroundings[-1])
