"""Runs side by side: one row a variant, with n and the deviation over its seeds."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wellposed.records import Record
from wellposed.report.charts import Budget, Chart, Section, columns, finite, of, tooltip
from wellposed.report.subjects import COLLAPSED, Material, Subject, mark
from wellposed.stats import spread

TITLE = "Side by side"


def accuracy(subject: Subject) -> float | None:
    """Of the last test, in percent; the best one is chosen on the test images."""
    value = finite(subject.test.get("accuracy"))
    return None if value is None else 100.0 * value


def worst(subject: Subject) -> Record | None:
    """The record of the largest kappa of a block's tokens."""
    kappas = [r for r in subject.select("kappa") if (finite(r.value) or 0) > 0 and r.head is None]
    return max(kappas, key=lambda record: record.value or 0.0, default=None)


def worst_places(subject: Subject) -> list[Record]:
    """The records of which each may be the worst: those that are bounds, and a number above all of these."""
    largest = worst(subject)
    bounds = [r for r in subject.select("kappa") if r.status == "at least" and r.head is None]
    return bounds if largest is None or largest.status == "at least" else [largest, *bounds]


def log_worst(subject: Subject) -> float | None:
    record = worst(subject)
    return None if record is None else record.log


def largest_log(subject: Subject, position: str) -> float | None:
    """Ln kappa at a position, the largest over the blocks."""
    logs = [r.log for r in subject.select("kappa") if r.position == position and r.head is None]
    return max((log for log in logs if log is not None), default=None)


def mean_log(subject: Subject, position: str) -> float | None:
    """Ln kappa at a position, the mean over the blocks."""
    logs = [r.log for r in subject.select("kappa") if r.position == position and r.head is None]
    known = [log for log in logs if log is not None]
    return statistics.fmean(known) if known else None


def has_bounds(subject: Subject, position: str) -> bool:
    """Whether a kappa at the position is a lower bound, and so :func:`mean_log` too."""
    return any(r.status == "at least" for r in subject.select("kappa") if r.position == position)


def mean_entropy(subject: Subject) -> float | None:
    """Over the blocks."""
    known = [r.value for r in subject.select("entropy") if r.head is None and r.value is not None]
    return statistics.fmean(known) if known else None


_MEASURES: Mapping[str, tuple[str, Any]] = {
    "accuracy": ("accuracy, %", accuracy),
    "loss": ("test loss", lambda subject: finite(subject.test.get("loss"))),
    "ln_kappa": ("ln kappa, worst place", log_worst),
    "entropy": ("entropy, mean", mean_entropy),
    "images_per_second": ("images/s", lambda s: finite(s.summary.get("images_per_second"))),
}


def comparing_section(material: Material, budget: Budget) -> Section:
    titles: dict[str, str] = {"name": "variant", "n": "n"}
    for key, (title, _) in _MEASURES.items():
        titles |= {key: title, f"{key}_deviation": "±"}
    titles |= {"bound": "of ln kappa", "place": "worst place", "state": "state", "edits": "edits"}
    rows = [row for name, subjects in material.groups().items() for row in _rows(name, subjects)]
    empty = {
        key for index, key in enumerate(titles) if index > 1 and all(row[index] in (None, "") for row in rows)
    }
    kept = [index for index, key in enumerate(titles) if key not in empty]
    shown = tuple(tuple(row[index] for index in kept) for row in rows)
    words = [
        "n runs each; mean, and ± the standard deviation of the sample over the seeds. Accuracy and loss "
        "are of the last test. ln kappa is of the worst block and position, entropy the mean over the "
        "blocks (1 is uniform)."
    ]
    if "accuracy" in empty:
        words = [
            "ln kappa is of the worst block and position, entropy the mean over the blocks (1 is uniform)."
        ]
    if material.unfinished:
        words.append(_unfinished(len(material.unfinished)))
    chart = Chart(
        columns=columns(**{key: title for key, title in titles.items() if key not in empty}),
        rows=shown,
        spec=_spec([row[0] for row in rows]) if "accuracy" not in empty and len(rows) > 1 else None,
        describe="Accuracy of each variant as a point, with a bar of one deviation to each side. "
        "The table below has the same numbers.",
        table_open=True,
    )
    return Section(id="runs", title=TITLE, words=tuple(words), chart=chart)


def _unfinished(count: int) -> str:
    runs, have = ("1 run is", "it has a row") if count == 1 else (f"{count} runs are", "they have rows")
    return (
        f"{runs} not finished and not counted in n, mean and deviation; {have} with n = 0 and the last "
        "numbers so far."
    )


def _rows(name: str, subjects: Sequence[Subject]) -> Iterator[tuple[Any, ...]]:
    """One of the runs that count, and one for each that does not."""
    counted = [subject for subject in subjects if subject.counts]
    if counted:
        yield _row(name, counted, len(counted), _collapsed(counted))
    for subject in subjects:
        if not subject.counts:
            yield _row(subject.name, [subject], 0, subject.state)


def _collapsed(subjects: Sequence[Subject]) -> str:
    count = sum(mark(subject.summary) == COLLAPSED for subject in subjects)
    return f"{count} of {len(subjects)} {COLLAPSED}" if count else ""


def _row(name: str, subjects: Sequence[Subject], n: int, state: str) -> tuple[Any, ...]:
    cells: list[Any] = [name, n]
    places = [(record, len(worst_places(each))) for each in subjects if (record := worst(each)) is not None]
    bad, count = max(places, key=lambda place: place[0].value or 0.0, default=(None, 0))
    is_bound = any(record.status == "at least" for record, _ in places)
    for key, (_, measure) in _MEASURES.items():
        found = spread(measure(subject) for subject in subjects)
        # The spread of bounds is not that of the numbers.
        is_known = not (is_bound and key == "ln_kappa")
        cells += [None, None] if found is None else [found.mean, found.deviation if is_known else None]
    cells.append("lower bound" if is_bound else "")
    one = "" if bad is None else f"block {bad.block}, {bad.position}"
    cells.append(f"one of {count}, which are bounds" if count > 1 else one)
    cells += [state, "; ".join(subjects[0].edits) or "none"]
    return tuple(cells)


def _spec(names: Sequence[str]) -> dict[str, Any]:
    place = of("name", "nominal", title=None, sort=list(names))
    value = {"type": "quantitative", "title": "test accuracy, %", "scale": {"zero": False, "padding": 12}}
    # Without a deviation there is no bar.
    low, high = "datum.accuracy - datum.accuracy_deviation", "datum.accuracy + datum.accuracy_deviation"
    return {
        "height": {"step": 30},
        "transform": [
            {"filter": {"field": "accuracy", "valid": True}},
            {"calculate": low, "as": "accuracy_low"},
            {"calculate": high, "as": "accuracy_high"},
        ],
        "encoding": {"y": place},
        "layer": [
            {
                "transform": [{"filter": {"field": "accuracy_deviation", "valid": True}}],
                "mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.5},
                "encoding": {
                    "x": {"field": "accuracy_low", **value},
                    "x2": {"field": "accuracy_high"},
                    "color": of("name", "nominal", sort=list(names), legend=None),
                },
            },
            {
                "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
                "encoding": {
                    "x": {"field": "accuracy", **value},
                    "color": of("name", "nominal", sort=list(names), legend=None),
                    "tooltip": tooltip("name", "n", "accuracy", "accuracy_deviation"),
                },
            },
        ],
    }
