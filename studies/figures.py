"""Shared drawing. Matplotlib is an extra of the package; without it the tables are still written."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.compare import Spread, accuracies, spread
from studies.study import Records
from wellposed.study_records import RunRecord

DPI = 120
INSIDE = 5
"""So many names fit next to the lines of a plot."""
COUNTS = ("epoch", "block")
"""What an axis counts has no halves."""
FEW = 12
"""So few points of a curve are marked, or one alone would not be seen."""
STYLES = ("solid", "dashed", "dotted", "dashdot")
"""Ten colours each."""


class Canvas:
    """Plots side by side in one file.

    >>> import tempfile
    >>> canvas = Canvas(1)
    >>> canvas.plots[0].set_title("kappa")
    Text(0.5, 1.0, 'kappa')
    >>> canvas.save(Path(tempfile.mkdtemp()) / "figure.png")
    """

    def __init__(self, columns: int, rows: int = 1, *, width: float = 4.6, height: float = 3.6) -> None:
        figure_class, canvas = _matplotlib()
        self._columns = columns
        self.figure = figure_class(figsize=(width * columns, height * rows), constrained_layout=True)
        canvas(self.figure)
        self.plots: list[Any] = list(self.figure.subplots(rows, columns, squeeze=False).flat)
        for plot in self.plots:
            plot.spines[["top", "right"]].set_visible(False)
            plot.grid(alpha=0.3)

    def save(self, path: Path) -> None:
        for number, plot in enumerate(self.plots):
            labels = plot.get_legend_handles_labels()[1]
            if len(labels) > INSIDE:
                # Next to the last plot of a row that has these lines; inside it would lie over them.
                is_last = (number + 1) % self._columns == 0
                if is_last or self.plots[number + 1].get_legend_handles_labels()[1] != labels:
                    plot.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
            elif labels:
                plot.legend(frameon=False, fontsize=8)
            if plot.get_xlabel() in COUNTS:
                _count(plot.xaxis)
        self.figure.savefig(path, dpi=DPI)


def _count(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    if isinstance(axis.get_major_locator(), MaxNLocator):  # not where the ticks are given
        axis.get_major_locator().set_params(integer=True)


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the figure needs matplotlib: pip install 'wellposed[plot]', then the same command draws it "
            "from the records."
        ) from error
    return Figure, FigureCanvasAgg


def means(plot: Any, found: Mapping[str, Spread | None], *, paper: Mapping[str, float] = {}) -> None:
    """Means with their deviations, a point a variant; the paper's as dashes.

    Points and not bars: bars would have to start at 0, where half of a point could not be seen.
    """
    for place, (label, each) in enumerate(found.items()):
        if each is not None:
            plot.errorbar(
                [place], [each.mean], yerr=[each.deviation or 0.0], color=f"C{place % 10}", fmt="o", capsize=3
            )
        if label in paper:
            plot.hlines(
                paper[label], place - 0.4, place + 0.4, colors="black", linestyles="dashed", linewidth=1
            )
    plot.set_xticks(range(len(found)), list(found), rotation=40, ha="right", fontsize=8)
    plot.margins(y=0.15)


def curves(plot: Any, runs: Mapping[str, Sequence[RunRecord]], number: str, *, scale: float = 1.0) -> None:
    """A number of the tests over the epochs, the mean over the seeds as a line and the range as a band."""
    for index, (label, of_label) in enumerate(runs.items()):
        by_epoch: dict[int, list[float]] = {}
        for run in of_label:
            for line in run.curve:
                if isinstance(line.get(number), (int, float)):
                    by_epoch.setdefault(line["epoch"], []).append(scale * line[number])
        if not by_epoch:
            continue
        epochs = sorted(by_epoch)
        color = f"C{index % 10}"
        plot.plot(
            epochs,
            [statistics.fmean(by_epoch[epoch]) for epoch in epochs],
            color=color,
            linestyle=STYLES[index // 10 % len(STYLES)],
            marker="o" if len(epochs) <= FEW else None,
            markersize=3,
            label=label,
        )
        plot.fill_between(
            epochs,
            [min(by_epoch[epoch]) for epoch in epochs],
            [max(by_epoch[epoch]) for epoch in epochs],
            color=color,
            alpha=0.2,
            linewidth=0,
        )
    plot.set_xlabel("epoch")


def over_steps(plot: Any, lines: Mapping[str, Mapping[float, Spread | None]]) -> None:
    """Lines over a number (eps, depth, block) with error bars."""
    for index, (label, points) in enumerate(lines.items()):
        known = [(x, each) for x, each in sorted(points.items()) if each is not None]
        if known:
            plot.errorbar(
                [x for x, _ in known],
                [each.mean for _, each in known],
                yerr=[each.deviation or 0.0 for _, each in known],
                label=label,
                color=f"C{index % 10}",
                linestyle=STYLES[index // 10 % len(STYLES)],
                marker="o",
                markersize=4,
                capsize=2,
            )


def draw_means(plot: Any, records: Records, data: str, paper: Mapping[str, float] = {}) -> None:
    """Accuracy of each variant on a data set, on its own axis: sets differ more than variants do."""
    found = {label: spread(accuracies(records.of(label, data)).values()) for label in records.labels}
    means(plot, found, paper=paper)
    plot.set(title=f"{data}: accuracy" + (", dashed: the paper's" if paper else ""), ylabel="percent")


def draw_accuracy(records: Records, paper: Mapping[str, float], path: Path) -> None:
    """A row a data set: means with deviations, and next to them the tests over the epochs."""
    canvas = Canvas(2, max(1, len(records.datasets)))
    for row, data in enumerate(records.datasets):
        mean, curve = canvas.plots[2 * row : 2 * row + 2]
        draw_means(mean, records, data, paper)
        curves(curve, {label: records.of(label, data) for label in records.labels}, "accuracy", scale=100.0)
        curve.set(title=f"{data}: tests", ylabel="percent")
    canvas.save(path)


def draw_differences(rows: Sequence[Mapping[str, Any]], name: str, path: Path) -> None:
    """A plot a data set: the columns difference, low and high of a table, a line for each ``name``.

    Hollow marks are undecided: zero lies in their interval, or there is none.
    """
    sets = list(dict.fromkeys(row["data"] for row in rows))
    drawn = [row for row in rows if row["difference"] is not None]
    shown = {data: [row for row in drawn if row["data"] == data] for data in sets}
    longest = max((len(each) for each in shown.values()), default=1)
    canvas = Canvas(1, max(1, len(sets)), width=6.4, height=1.2 + 0.3 * longest)
    for plot, (data, lines) in zip(canvas.plots, shown.items(), strict=True):
        for place, row in enumerate(lines):
            points, low, high = (row[each] for each in ("difference", "low", "high"))
            has_interval = low is not None and high is not None
            is_decided = has_interval and (low > 0 or high < 0)
            plot.errorbar(
                [points],
                [place],
                xerr=[[points - low], [high - points]] if has_interval else None,
                fmt="o",
                color="C0",
                markerfacecolor="C0" if is_decided else "white",
                capsize=2,
            )
        plot.axvline(0.0, color="black", linewidth=0.8)
        plot.set_yticks(range(len(lines)), [row[name] for row in lines])
        plot.set_ylim(len(lines) - 0.5, -0.5)
        plot.set(title=f"{data}: difference by seed, 95% intervals", xlabel="points of accuracy")
    canvas.save(path)
