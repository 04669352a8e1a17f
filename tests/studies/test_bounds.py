"""Measured kappa compared with its bounds."""

from typing import Any

import pytest

from studies.bounds import study as bounds
from study_material import claim_of, draws, kept, records
from wellposed.records import VERDICTS


def test_bounds_are_measured_through_training_and_counted(run, tmp_path):
    rows = kept(bounds.bounds_of_run(run))
    of_block = [row for row in rows if row["block"] == 0 and row.get("head") is None]
    assert {(row["measure"], row["epoch"]) for row in of_block} == {
        (measure, epoch) for measure in bounds.MEASURES for epoch in (0, 1, 2, 3)
    }
    assert all(sum(row["verdicts"]) == bounds.IMAGES for row in of_block)
    report = bounds.report(records({("all skips", 0): rows}))
    table = {(row["measure"], row["heads"]): row for row in report.tables["table"]}
    ffn = table["kappa ffn linear", "all as one"]
    assert sum(ffn[name] for name in VERDICTS) == 4 * 2 * bounds.IMAGES
    assert ffn["ln bound, end"] > ffn["ln kappa, end"]
    draws(report, tmp_path)


def bound_row(measure: str, violated: int, log_bound: float, head: str | None = None) -> dict[str, Any]:
    row = {"measure": measure, "block": 0, "weights": "last", "update": 1, "epoch": 1.0, "log": 3.0}
    return row | {"log_bound": log_bound, "verdicts": [4 - violated, 0, violated, 0], "head": head}


@pytest.mark.parametrize(
    ("violated", "with_skip", "expected"),
    [(0, 5.0, "supported"), (1, 5.0, "supported"), (0, 12.0, "contradicted")],
)
def test_a_violated_bound_or_a_higher_one_with_the_skip_is_reported(violated, with_skip, expected):
    rows = [bound_row("kappa 4.1 linear", violated, 10.0), bound_row("kappa 4.2 linear", 0, with_skip)]
    rows.append(bound_row("kappa 4.1 linear", 2, 6.0, "each"))
    # A little apart, or no interval could be given.
    runs = {
        ("all skips", seed): [
            row | {"log_bound": row["log_bound"] + 0.01 * seed * (row is rows[1])} for row in rows
        ]
        for seed in range(3)
    }
    report = bounds.report(records(runs))
    assert claim_of(report, "attention's skip lowers its bound").verdict == expected
    said = f"digits, all skips: {3 * violated or 'none'} of 24 bounds violated"
    assert any(note.startswith(said) for note in report.notes)
    assert any("head by head, kappa 4.1 linear is violated in 6 of 12" in note for note in report.notes)
