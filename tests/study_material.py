"""Records of studies made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from studies.study import Records, Report
from wellposed.stats import Claim, Verdict, judged
from wellposed.study_records import RunRecord


def kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As ``records.jsonl`` gives them back."""
    return [json.loads(json.dumps(row, allow_nan=False)) for row in rows]


def record(label: str, seed: int, accuracy: float | None = None, **fields: Any) -> RunRecord:
    """A run with an accuracy in percent."""
    result = {} if accuracy is None else {"test": {"accuracy": accuracy / 100}}
    usual: dict[str, Any] = {"data": "digits", "recipe": {}, "state": "finished", "run": f"{label}-{seed}"}
    return RunRecord(label=label, seed=seed, result=result, **usual | fields)


def records(runs: dict[tuple[str, int], list[dict[str, Any]]], measured: Any = ()) -> Records:
    made = [record(label, seed, measured=rows) for (label, seed), rows in runs.items()]
    return Records("small", made, measured)


def verdicts(report: Report) -> list[Verdict]:
    """Of each claim, after Holm's correction."""
    return [claim.verdict for claim in judged(report.claims)]


def claim_of(report: Report, words: str) -> Claim:
    """The only claim that has these words, in its name or in what it compares."""
    (found,) = (claim for claim in judged(report.claims) if words in f"{claim.name} ({claim.contrast})")
    return found


def draws(report: Report, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    assert report.draw is not None
    report.draw(folder / "figure.png")
    assert (folder / "figure.png").stat().st_size > 1000
