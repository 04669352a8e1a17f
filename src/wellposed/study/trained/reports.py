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
    """A row a data set: means with deviations, and beside them the tests over the epochs."""
    canvas = figures.Canvas(2, max(1, len(records.datasets)))
    for row, data in enumerate(records.datasets):
        mean, curve = canvas.plots[2 * row : 2 * row + 2]
        draw_means(mean, records, data, paper)
        figures.curves(
            curve, {label: records.of(label, data) for label in records.labels}, "accuracy", scale=100.0
        )
        curve.set(title=f"{data}: tests", ylabel="percent")
    canvas.save(path)


def draw_means(plot: Any, records: StudyRecords, data: str, paper: Mapping[str, float] = {}) -> None:
    """Accuracy of each variant on a data set, on its own axis: sets differ more than variants do."""
    found = {
        label: compare.spread(compare.accuracies(records.of(label, data)).values())
        for label in records.labels
    }
    figures.means(plot, found, paper=paper)
    plot.set(title=f"{data}: accuracy" + (", dashed: the paper's" if paper else ""), ylabel="percent")
