"""What a study leaves behind: tables, a figure, a summary with the claims, and the README of its folder."""

import dataclasses
import math
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from studies import compare, figures
from studies.compare import accuracies, spread
from studies.study import ROOT, Records, Report, Scale, Study, data_name
from wellposed.environment import environment
from wellposed.files import read_object, write_cells, write_json, write_text
from wellposed.stats import Claim, Estimate, Verdict, judged
from wellposed.study_records import SUMMARY, claim_from_dict, claim_to_dict
from wellposed.text import aligned

AND = " && "
"""Between commands, where data sets have other seeds."""


def accuracy_report(
    records: Records,
    claims: Sequence[Claim],
    *,
    baseline: str | None = None,
    paper: Mapping[str, float] | None = None,
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    notes: Sequence[str] = (),
    unseen: bool = False,
    draw: Callable[[Path], None] | None = None,
) -> Report:
    """The report that most studies share: accuracy of each variant, next to the paper's, and every run."""
    made = {
        "table": compare.accuracy_table(records, baseline, paper, unseen=unseen),
        "grid": compare.grid_table(records),
        **(tables or {}),
    }
    draw = draw or partial(figures.draw_accuracy, records, paper or {})
    return Report(made, claims, draw, notes)


def write_report(
    name: str,
    study: Study,
    records: Records,
    folder: Path,
    *,
    data: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    has_worked: bool = False,
    draw: bool = True,
) -> tuple[Report, list[Claim]]:
    """Write tables, figure and summary, and the README if the folder is the study's own.

    Args:
        name: of the study.
        study: which.
        records: all that are reported.
        folder: where.
        data: sets as ``--data`` has them, of this call.
        changes: fields of all recipes.
        has_worked: whether something was trained or measured on this machine.
        draw: whether to draw the figure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = study.report(records)
    # As they will be read again: the page and the terminal say the same.
    claims = [claim_from_dict(claim_to_dict(claim)) for claim in judged(report.claims)]
    for table, rows in report.tables.items():
        write_table(folder / f"{table}.csv", rows)
    write_table(folder / "claims.csv", [in_table(claim) for claim in claims])
    notes = list(report.notes)
    if draw and report.draw is not None:
        staged = folder / f".figure.{os.getpid()}.png"
        try:
            report.draw(staged)
            staged.replace(folder / "figure.png")
        except ImportError as error:
            notes.append(str(error))
        finally:
            staged.unlink(missing_ok=True)
    about = details(name, study, records, read_summary(folder), data, changes, has_worked)
    summary = {**about, "claims": list(map(claim_to_dict, claims)), "notes": notes}
    write_json(folder / SUMMARY, {**summary, "accuracy": accuracy_summary(records)})
    if folder.parent == ROOT / name.replace("-", "_"):
        write_text(folder.parent / "README.md", readme(name, study, folder.parent))
    return report, claims


def read_summary(folder: Path) -> dict[str, Any]:
    """The one of an earlier call; empty if there is none."""
    path = folder / SUMMARY
    return read_object(path) if path.exists() else {}


def details(
    name: str,
    study: Study,
    records: Records,
    before: Mapping[str, Any],
    data: Sequence[str],
    changes: Mapping[str, Any] | None,
    has_worked: bool,
) -> dict[str, Any]:
    """What the records are of, and where they were made; earlier calls may have made some of them."""
    specs = {**before.get("data", {}), **{data_name(spec): shown(spec) for spec in data}}
    sets = {each: specs.get(each, each) for each in records.datasets or specs}
    changes = dict(before.get("changes", {}) if changes is None else changes)
    if changes.get("start_from"):
        changes["start_from"] = Path(str(changes["start_from"])).name
    by_seeds: dict[tuple[int, ...], list[str]] = {}
    for each in sets:
        own = sorted({run.seed for run in records.runs if run.data == each and run.role == "result"})
        by_seeds.setdefault(tuple(own), []).append(sets[each])
    environments = list(before.get("environments", []))
    if has_worked:
        now = environment()
        now.pop("command")
        environments = [each for each in environments if {**each, "time": None} != {**now, "time": None}]
        environments.append(now)
    return {
        "study": name,
        "title": study.title,
        "paper": study.paper,
        "claim": study.claim,
        "command": AND.join(
            command(name, records.scale, of_seeds, seeds, changes)
            for seeds, of_seeds in (by_seeds or {(): []}).items()
        ),
        "scale": records.scale,
        "data": sets,
        "seeds": sorted({run.seed for run in records.runs}),
        "changes": changes,
        "environments": environments,
    }


def command(
    name: str, scale: Scale, data: Sequence[str], seeds: Sequence[int], changes: Mapping[str, Any]
) -> str:
    """The command that does the same.

    >>> command("both", "small", ["cifar10:DIR"], [0, 1, 2], {"epochs": 3})
    'python -m studies both --scale small --data cifar10:DIR --seeds 0-2 --set epochs=3'
    >>> command("training-time", "small", [], [], {})
    'python -m studies training-time --scale small'
    """
    parts = ["python", "-m", "studies", name, "--scale", scale]
    for spec in data:
        parts += ["--data", shown(spec)]
    if seeds:
        is_range = list(seeds) == list(range(seeds[0], seeds[-1] + 1)) and len(seeds) > 1
        parts += ["--seeds", f"{seeds[0]}-{seeds[-1]}" if is_range else ",".join(map(str, seeds))]
    for field, value in changes.items():
        given = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, each in given:
            parts += ["--set", f"{field}{'.' if key else ''}{key}={'none' if each is None else each}"]
    return shlex.join(parts)


def shown(spec: str) -> str:
    """A data set without the folders of this machine.

    >>> [shown(spec) for spec in ("digits", "cifar10:/a/DIR", "packed:/a/b.npz", "/a/imagenet")]
    ['digits', 'cifar10:DIR', 'packed:b.npz', 'imagenet']
    """
    kind, colon, rest = spec.partition(":")
    return f"{kind}:{Path(rest).name or rest}" if colon else Path(kind).name


def in_table(claim: Claim) -> dict[str, Any]:
    """A claim as a row of ``claims.csv``."""
    found = claim.estimate or Estimate(math.nan, 0)
    numbers = {"difference": found.mean, "low": found.low, "high": found.high, "p": found.p}
    numbers |= {"adjusted_p": claim.adjusted, "margin": claim.margin, "paper": claim.paper}
    return {
        "claim": claim.name,
        "contrast": claim.contrast,
        "says": claim.says,
        "n": found.n,
        "at_least": found.at_least,
        **{each: _digits(value) for each, value in numbers.items()},
        "verdict": claim.verdict.value,
        "differs": claim.differs,
    }


def _digits(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def accuracy_summary(records: Records) -> list[dict[str, Any]]:
    """Mean and deviation of each variant on each data set, where runs classify."""
    rows = []
    for data in records.datasets:
        for label in records.labels:
            found = spread(accuracies(records.of(label, data)).values())
            if found is not None:
                rows.append({"data": data, "variant": label, **dataclasses.asdict(found)})
    return rows


def counted(claims: Iterable[Claim]) -> str:
    """How many claims have each verdict.

    >>> counted([Claim("CB helps", "CB - none", "higher", None)])
    '1 undecided'
    """
    counts = Counter(claim.verdict for claim in claims)
    return ", ".join(f"{counts[each]} {each.value}" for each in Verdict if counts[each]) or "no claim"


def columns_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """All names, in the order in which they come."""
    return list(dict.fromkeys(name for row in rows for name in row))


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a row; what a row has not is empty."""
    names = columns_of(rows)
    write_cells(path, [names, *([row.get(name) for name in names] for row in rows)])


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """For the terminal."""
    names = columns_of(rows)
    cells = [[_shown(row.get(name)) for name in names] for row in rows]
    numeric = [
        index
        for index, name in enumerate(names)
        if all(isinstance(row.get(name), (int, float, type(None))) for row in rows)
    ]
    return aligned([[name.replace("_", " ") for name in names], *cells], right=numeric)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) and abs(value) >= 0.1 else str(value)


def readme(name: str, study: Study, folder: Path) -> str:
    """The page of a study's folder: the claim, what was measured, each verdict, the command.

    What was seen besides, ``notes.md`` written by hand, is part of it.
    """
    lines = [f"# {study.title[0].upper()}{study.title[1:]}", "", f"*{study.paper}.* {study.claim}", ""]
    for file in sorted(folder.glob(f"*/{SUMMARY}"), reverse=True):
        lines += _scale_section(read_object(file), file.parent)
    if not list(folder.glob(f"*/{SUMMARY}")):
        seeds = f"{study.seeds[0]}-{study.seeds[-1]}"
        lines += [
            "## Not run yet",
            "",
            "```",
            f"python -m studies {name} --data DATA --seeds {seeds}",
            "```",
            "",
        ]
    notes = folder / "notes.md"
    if notes.is_file():
        lines += ["## What else was seen", "", notes.read_text(encoding="utf-8").strip(), ""]
    if study.decides:
        lines += [f"**What would decide it:** {study.decides}", ""]
    lines += [
        "Made by `python -m studies`; the code is in [study.py](study.py). Verdicts hold over all claims of "
        "a table together (Holm's correction, 5%); intervals are of 95%; one run decides nothing.",
    ]
    return "\n".join(lines) + "\n"


def _scale_section(summary: Mapping[str, Any], folder: Path) -> list[str]:
    claims = [claim_from_dict(each) for each in summary.get("claims", [])]
    lines = [f"## {folder.name}: {counted(claims)}", ""]
    lines += ["```", *summary["command"].split(AND), "```", ""]
    if claims:
        lines += [
            "| claim | measured | n | difference [95%] | the paper | verdict |",
            "| - | - | - | - | - | - |",
        ]
        lines += [_claim_row(claim) for claim in claims]
        lines.append("")
    if (folder / "figure.png").is_file():
        lines += [f"![{summary['title']}]({folder.name}/figure.png)", ""]
    lines += [f"- {note}" for note in summary.get("notes", [])]
    lines += [""] if summary.get("notes") else []
    files = sorted(each.name for each in folder.iterdir() if each.suffix in (".csv", ".jsonl", ".json"))
    lines += ["Files: " + ", ".join(f"[{each}]({folder.name}/{each})" for each in files) + ".", ""]
    return lines


def _claim_row(claim: Claim) -> str:
    found = claim.estimate
    numbers = "not measured"
    if found is not None:
        numbers = str(found).removesuffix(f", {found.comparison}").removesuffix(f", n = {found.n}")
        numbers += f" ({found.comparison})" if found.comparison != "paired" else ""
    margin = "" if claim.margin is None else f" (margin {claim.margin:g})"
    paper = "" if claim.paper is None else f"{claim.paper:+g}"
    why = f" ({claim.differs})" if claim.differs else ""
    count = 0 if found is None else found.n
    cells = [claim.name + margin, claim.contrast, str(count), numbers, paper, claim.verdict.value + why]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
