"""From paths to subjects: folders of runs, sweeps and studies, and diagnoses.

A file that cannot be read is named, and what lies next to it is shown all the same.
"""

import contextlib
import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from wellposed import graying_pictures
from wellposed.environment import without_secrets
from wellposed.files import parse_json, parse_toml, read_bytes
from wellposed.records import Record, Status, from_dict, read_json
from wellposed.report.charts import finite
from wellposed.report.material import (
    SEED_FIELDS,
    Conclusion,
    Damage,
    Found,
    JacobianCurve,
    Material,
    Subject,
    calls_of,
    edits_of,
    state_of_run,
    with_marks,
    with_unique_names,
)
from wellposed.report.material import state as state_in_words
from wellposed.run_records import NAME as RUN
from wellposed.run_records import of_blocks, read_run, summarise
from wellposed.study_records import RECORDS, SUMMARY, RunRecord, claim_from_dict, sentence
from wellposed.study_records import read as read_records


class DamagedError(ValueError):
    """Of a file without which there is nothing to show."""

    def __init__(self, path: Path, what: str) -> None:
        self.damage = Damage(str(path), what)
        super().__init__(str(self.damage))


@contextlib.contextmanager
def needed(path: Path, what: str, *errors: type[Exception]) -> Iterator[None]:
    """What is read inside must be right; else ``what`` says in words what was expected, around {error}."""
    try:
        yield
    except errors as error:
        raise DamagedError(path, what.format(error=error)) from error


def json_object(path: Path, found: list[Damage]) -> dict[str, Any]:
    """The object in a file next to a run's numbers; empty without the file, and where ``found`` says why."""
    if not path.exists():
        return {}
    try:
        values = parse_json(read_bytes(path))
        why = "" if isinstance(values, dict) else f"got a {type(values).__name__}"
    except ValueError as error:
        values, why = {}, str(error)
    if why:
        found.append(Damage(str(path), f"expected a JSON object ({why}); the report does without this file."))
        return {}
    read: dict[str, Any] = values
    return read


def torn_lines(path: Path, numbers: Iterable[int]) -> list[Damage]:
    """The lines of a file that are no JSON objects, if there are any.

    >>> torn_lines(Path("run.jsonl"), [3, 8])
    [Damage(path='run.jsonl', what='lines 3, 8 are torn and skipped.')]
    """
    known = list(map(str, numbers))
    if not known:
        return []
    lines = f"line {known[0]} is" if len(known) == 1 else f"lines {', '.join(known)} are"
    return [Damage(str(path), f"{lines} torn and skipped.")]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def environment_text(values: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text, without what is not known."""
    values = _mapping(values)
    git, packages = (_mapping(values.get(name)) for name in ("git", "packages"))
    commit = git.get("commit")
    changed = " with changes" if git.get("changed") else ""
    command, devices = values.get("command"), values.get("devices")
    known = {
        "command": shlex.join(map(str, command)) if isinstance(command, list) else command,
        "time": values.get("time"),
        "commit": f"{commit}{changed}" if commit else None,
        "python": values.get("python"),
        "platform": values.get("platform"),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "CPU": values.get("cpu"),
        "accelerators": ", ".join(map(str, devices if isinstance(devices, list) else [])),
        "processes": values.get("processes"),
    }
    return {key: without_secrets(str(value)) for key, value in known.items() if value not in (None, "")}


DIAGNOSIS = "diagnosis.json"


def read_material(paths: Sequence[str | Path]) -> Material:
    """Read what the paths hold.

    Args:
        paths: folder of a run, of a sweep, of a study, or a folder of such; a diagnosis, as a JSON file or
            the folder that ``wellposed diagnose --out`` wrote.

    Returns:
        Runs and diagnoses in one form, with what could not be read.

    Example:
        ``read_material(["runs/plain", "diagnosed"]).subjects``
    """
    if not paths:
        raise ValueError("expected runs or diagnoses to report, got none; name their folders.")
    subjects, conclusions, damage = _together(map(Path, paths))
    if not subjects:
        said_there = " ".join([*(each.sentence for each in conclusions), *map(str, damage)])
        raise ValueError(
            f"expected records of runs in {', '.join(map(str, paths))}, got none that this version can read "
            f"({said_there}); the command that made them makes them again."
        )
    named = with_unique_names(with_marks(_grouped(subjects)))
    return Material(tuple(named), tuple(conclusions), tuple(damage))


def _together(paths: Iterable[Path]) -> Found:
    """What all of them hold; one of which nothing can be read does not hide the others."""
    together = Found([], [], [])
    for path in paths:
        try:
            found = _read(path)
        except DamagedError as error:
            found = Found([], [], [error.damage])
        together.subjects.extend(found.subjects)
        together.conclusions.extend(found.conclusions)
        together.damage.extend(found.damage)
    return together


def _read(path: Path) -> Found:
    if not path.exists():
        raise FileNotFoundError(f"expected a run or a diagnosis, there is no {path}.")
    if path.is_file():
        return Found([read_diagnosis(path)], [], [])
    if is_study(path):
        return read_study(path)
    if (path / RUN).is_file():
        return read_run_folder(path)
    if (path / DIAGNOSIS).is_file():
        return Found([read_diagnosis(path / DIAGNOSIS)], [], [])
    inside = sorted(
        child
        for child in path.iterdir()
        if child.is_dir() and (is_study(child) or (child / RUN).is_file() or (child / DIAGNOSIS).is_file())
    )
    if not inside:
        raise ValueError(
            f"expected a run ({RUN}), a study (records.jsonl) or a diagnosis ({DIAGNOSIS}) in {path} or in "
            "its folders, found none; wellposed train --out and wellposed diagnose --out write them."
        )
    return _together(inside)


def read_diagnosis(path: Path) -> Subject:
    """A file of ``Diagnosis.to_json``."""
    what = "expected a diagnosis as JSON ({error}); wellposed diagnose --out writes one."
    with needed(path, what, ValueError, TypeError):
        records, about = read_json(path)
        name = path.parent.resolve().name if path.name == DIAGNOSIS else path.stem
        return diagnosis_subject(records, about, name)


def diagnosis_subject(records: Sequence[Record], about: Mapping[str, Any], name: str = "") -> Subject:
    """The subject of a diagnosis that is at hand."""
    model, (words, calls) = str(about.get("model", "model")), _edits_of(about)
    known = {
        "model": model,
        "weights": about.get("weights"),
        "data": about.get("data"),
        "images": about.get("images"),
        "seed": about.get("seed"),
        "device": about.get("device"),
        "torch": about.get("torch"),
        "measured": ", ".join(map(str, about.get("what", []))) or None,
    }
    provenance = {key: str(value) for key, value in known.items() if value not in (None, "")}
    return Subject(
        name=name or model,
        kind="diagnosis",
        edits=words,
        calls=calls,
        key=(model, "diagnosis"),
        records=tuple(records),
        measured_on=f"a diagnosis of {about.get('images', 'some')} images",
        jacobians=_jacobians(records),
        provenance=provenance | environment_text(about.get("environment") or {}),
        notes=tuple(map(str, about.get("notes", []))),
        is_random=about.get("random") is True,
    )


def read_run_folder(folder: Path) -> Found:
    """A run, with the diagnosis that lies next to its numbers if there is one."""
    what = "expected the files of a run, got other values in them ({error}); it is skipped."
    with needed(folder, what, TypeError, AttributeError, KeyError, IndexError):
        return _run_folder(folder)


def _run_folder(folder: Path) -> Found:
    lines, path = read_run(folder), folder / "recipe.toml"
    what = "expected the numbers of a run ({error}); without them it is skipped."
    with needed(folder / RUN, what, TypeError, ValueError):
        summary = summarise(lines)
    with needed(
        path, "expected the recipe of a run as TOML ({error}); without it the run is skipped.", ValueError
    ):
        recipe = parse_toml(read_bytes(path).decode()) if path.is_file() else {}
    damage = torn_lines(folder / RUN, (line["line"] for line in lines if line["event"] == "torn"))
    result = json_object(folder / "result.json", damage)
    updates = next((line["updates"] for line in lines if line.get("updates")), None)
    epochs = recipe.get("epochs")
    if updates and epochs:
        lines = [{**line, "epoch": line.get("update", 0) * epochs / updates} for line in lines]
    measured = _monitored(lines)
    try:
        if (folder / DIAGNOSIS).is_file():
            diagnosed = read_diagnosis(folder / DIAGNOSIS)
            measured = {name: getattr(diagnosed, name) for name in ("records", "measured_on", "jacobians")}
    except DamagedError as error:
        damage.append(error.damage)
    graying = None
    try:
        graying = graying_pictures.read(folder)
    except ValueError as error:
        damage.append(Damage(str(folder / graying_pictures.NAME), f"{error}; the report does without it."))
    state = state_of_run(lines, summary)
    environment = json_object(folder / "environment.json", damage) or result.get("environment") or {}
    known = {
        "folder": folder.name,
        "model": recipe.get("model"),
        "data": recipe.get("data"),
        "seed": recipe.get("seed"),
        "epochs": epochs,
        "precision": recipe.get("precision"),
        "state": state,
        "device": (result.get("about") or {}).get("device"),
    }
    fields = {key: without_secrets(str(value)) for key, value in known.items() if value is not None}
    whole = {f"recipe: {key}": without_secrets(str(value)) for key, value in recipe.items()}
    subject = Subject(
        name=folder.resolve().name,
        kind="run",
        seed=recipe.get("seed"),
        edits=edits_of(recipe),
        calls=calls_of(recipe),
        key=(str(recipe.get("model")), str(recipe.get("data"))),
        recipe=recipe,
        lines=lines,
        summary=summary,
        state=state,
        **measured,
        provenance=fields | environment_text(environment) | whole,
        notes=tuple(str(line["text"]) for line in lines if line["event"] == "warning" and "text" in line),
        graying=graying,
    )
    return Found([subject], [], damage)


def _grouped(subjects: Sequence[Subject]) -> list[Subject]:
    """Runs of one recipe with several seeds get a group, named by their edits if these distinguish them."""
    keys = [
        json.dumps(
            {k: v for k, v in each.recipe.items() if k not in SEED_FIELDS}, sort_keys=True, default=str
        )
        if each.kind == "run" and each.recipe and not each.group
        else None
        for each in subjects
    ]
    counts = Counter(key for key in keys if key is not None)
    labels: dict[str, str] = {}
    for key, subject in zip(keys, subjects, strict=True):
        if key is not None and counts[key] > 1 and key not in labels:
            label = ", ".join(subject.edits) or "no edits"
            labels[key] = label if label not in labels.values() else f"{label} ({subject.name} and others)"
    return [
        dataclasses.replace(each, group=labels[key]) if key in labels else each
        for key, each in zip(keys, subjects, strict=True)
    ]


def _monitored(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The monitor's last look: fields of a subject."""
    last = next((line for line in reversed(lines) if line["event"] == "monitor"), None)
    if last is None:
        return {}
    found = []
    for measure in ("kappa", "entropy"):
        for (block, position), (value, is_bound) in of_blocks(last, measure).items():
            if finite(value) is not None:
                status: Status = "at least" if is_bound else "ok"
                where: dict[str, Any] = {"block": block, "position": position, "status": status}
                found.append(Record(measure=measure, value=value, **where))
    said = f"the monitor's last look, at update {last.get('update')}"
    return {"records": tuple(found), "measured_on": said}


def _jacobians(records: Sequence[Record]) -> tuple[JacobianCurve, ...]:
    return tuple(
        JacobianCurve(
            panel=f"block {record.block}, {record.position}",
            points=len(record.curve),
            values=tuple(value / record.curve[0] for value in record.curve),
        )
        for record in records
        if record.measure == "jacobian kappa" and record.curve and record.curve[0] > 0
    )


def _edits_of(about: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The edits of a diagnosed model in words, those of a kind at several blocks as one, and as calls.

    Versions before 0.2.0 wrote each as a text, which is shown as it is.
    """
    if "edited" not in about:
        return tuple(map(str, about.get("edits", []))), ()
    names = ("edit", "where", "module", "detail")
    alike: dict[tuple[str, str], list[list[str]]] = {}
    for edit in about["edited"]:
        fields = [str(edit.get(name, "")) for name in names]
        alike.setdefault((fields[0], fields[1]), []).append(fields)
    words = (
        " ".join(filter(None, own[0]))
        if len(own) == 1
        else f"{' '.join(filter(None, call))} in {len(own)} places: {own[0][-1]}"
        for call, own in alike.items()
    )
    return tuple(words), tuple(alike)


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
    subjects = [_study_subject(run, summary, study, several) for run in shown]
    if ledger.measured:
        name = f"study {study}"
        measured = _measured_in(ledger.measured, summary, study, study) | {"measured_on": name}
        subjects.append(Subject(name=name, kind="diagnosis", key=(study,), **measured))
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


def _study_subject(run: RunRecord, summary: Mapping[str, Any], study: str, several: bool) -> Subject:
    recipe = run.recipe
    label = f"{run.label}, {run.data}" if several else run.label
    ended = {**run.result, "finished": run.state == "finished"}
    state = state_in_words(ended, run.state)
    known = {"data": run.data, "seed": str(run.seed), "state": state}
    measured = _measured_in(run.measured, summary, study, run.label)
    measured["provenance"] |= known | {f"recipe: {key}": str(value) for key, value in recipe.items()}
    return Subject(
        name=f"{study}: {label}, seed {run.seed}",
        group=f"{study}: {label}",
        kind="run",
        seed=run.seed,
        edits=edits_of(recipe),
        calls=calls_of(recipe),
        key=(study, str(recipe.get("model")), run.data),
        recipe=recipe,
        lines=[event for point in run.curve for event in _events(point)],
        summary=ended,
        state=state,
        **measured,
    )


def _measured_in(
    rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], study: str, label: str
) -> dict[str, Any]:
    """Fields of a subject: what a study measured, and how."""
    surroundings = summary.get("environments") or [{}]
    known = {"study": study, "command": str(summary.get("command", ""))}
    return {
        "records": _study_records(rows),
        "measured_on": f"study {study}, {_weights(rows)} weights" if rows else "",
        "jacobians": _study_jacobians(rows, label),
        "provenance": known | environment_text(surroundings[-1]),
        "notes": tuple(map(str, summary.get("notes", []))),
    }


def _events(point: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A test of the curve, and the training loss before it, as lines of a run."""
    known: dict[str, Any] = {"event": "test", "epoch": point.get("epoch")}
    known |= {name: point[name] for name in ("loss", "accuracy") if point.get(name) is not None}
    if point.get("train_loss") is None:
        return [known]
    return [{"event": "train", "epoch": point.get("epoch"), "loss": point["train_loss"]}, known]


def _weights(rows: Sequence[Mapping[str, Any]]) -> str:
    """Whose measurements count where a run was measured at several moments."""
    present = {row.get("weights") for row in rows}
    return next((name for name in ("last", "best") if name in present), "the run's")


def _study_records(rows: Sequence[Mapping[str, Any]]) -> tuple[Record, ...]:
    wanted = _weights(rows)
    return tuple(
        from_dict({"value": None} | {name: value for name, value in row.items() if name in _KNOWN})
        for row in rows
        if row.get("measure") != _JACOBIAN and "measure" in row and row.get("weights", wanted) == wanted
    )


def _study_jacobians(rows: Sequence[Mapping[str, Any]], label: str) -> tuple[JacobianCurve, ...]:
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
