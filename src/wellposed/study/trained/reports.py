"""The report that most studies share: accuracy by variant, means and curves, and the grid behind them."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from wellposed.study import compare, figures
from wellposed.study.plan import StudyRecords, StudyReport


def accuracy_report(
    records: StudyRecords,
    claims: Sequence[compare.Claim],
    *,
    baseline: str | None = None,
    paper: Mapping[str, float] | None = None,
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    notes: Sequence[str] = (),
) -> StudyReport:
    """Accuracy of each variant beside the paper's, with further tables."""
    verdict, reason = compare.verdict(claims)
    made = {
        "table": compare.accuracy_table(records, baseline, paper),
        "grid": compare.grid_table(records),
        **(tables or {}),
    }
    return StudyReport(made, partial(draw_accuracy, records, paper or {}), verdict, reason, notes)


def draw_accuracy(records: StudyRecords, paper: Mapping[str, float], path: Path) -> None:
    """Means with deviations, and beside them the tests over the epochs of each data set."""
    canvas = figures.Canvas(1 + len(records.datasets))
    first, *others = canvas.plots
    figures.means(first, accuracy_groups(records), paper=paper)
    first.set(title="test accuracy" + (", dashed: the paper's" if paper else ""), ylabel="percent")
    for plot, data in zip(others, records.datasets, strict=True):
        runs = {label: records.of(label, data) for label in records.labels}
        figures.curves(plot, runs, "accuracy", scale=100.0)
        plot.set(title=data, ylabel="percent")
    canvas.save(path)


def accuracy_groups(records: StudyRecords) -> dict[str, dict[str, compare.Spread | None]]:
    """By data set and variant."""
    return {
        data: {
            label: compare.spread(compare.accuracies(records.of(label, data)).values())
            for label in records.labels
        }
        for data in records.datasets
    }
