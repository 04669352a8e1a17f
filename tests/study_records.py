"""Runs that studies are measured on, and records made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from wellposed.study import RunRecord, StudyRecords


def kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As ``measured.jsonl`` gives them back."""
    return [json.loads(json.dumps(row, allow_nan=False)) for row in rows]


def records(runs: dict[tuple[str, int], list[dict[str, Any]]], measured: Any = ()) -> StudyRecords:
    made = [
        RunRecord(label, "digits", seed, {}, {}, {}, "finished", {}, measured=rows)
        for (label, seed), rows in runs.items()
    ]
    return StudyRecords("any", "small", made, measured)


def draws(report: Any, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    report.draw(folder / "figure.png")
    assert (folder / "figure.png").stat().st_size > 1000
