"""Training curves, with kappa and density on the same time axis."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from wellposed.records import AT_LEAST
from wellposed.report.charts import (
    LOG_AXIS,
    Budget,
    Chart,
    Missing,
    Section,
    channel,
    columns,
    distinct,
    finite,
    nominal,
    thin,
    tips,
)
from wellposed.report.material import Material, Subject

TITLE = "Training"
_LEAST = 12  # points of a line, however many lines there are
_KINDS = ("loss", "accuracy", "kappa", "entropy")
"""Of numbers, in the order of their panels."""
FEW = 40  # points of a line that are drawn as such


class Curve(NamedTuple):
    """One number of one run over its updates."""

    subject: Subject
    kind: str  # one of _KINDS
    panel: str
    number: str
    times: list[tuple[float | None, int | None]]  # epoch, update
    values: list[float]
    bounds: list[bool]  # whether a value is a lower bound


def training_section(material: Material, budget: Budget) -> Section | Missing:
    curves = [curve for subject in material.subjects for curve in curves_of(subject)]
    if not curves:
        return Missing(TITLE, "wellposed train --out RUN, then RUN in this report")
    most = max(budget.points // len(curves), _LEAST)
    has_epochs = all(epoch is not None for curve in curves for epoch, _ in curve.times)
    rows: list[tuple[Any, ...]] = []
    for curve in curves:
        for place, value in thin(curve.values, most):
            epoch, update = curve.times[place]
            rows.append(
                (
                    curve.subject.group,
                    curve.subject.name,
                    curve.panel,
                    curve.number,
                    epoch,
                    update,
                    value,
                    "at least" if curve.bounds[place] else "ok",
                )
            )
    kinds = {curve.panel: curve.kind for curve in curves}
    panels = sorted(kinds, key=lambda panel: (_KINDS.index(kinds[panel]), panel))
    time, groups = _time(rows, has_epochs), distinct(row[0] for row in rows)
    total, longest = sum(len(curve.values) for curve in curves), max(len(curve.values) for curve in curves)
    thinned = ""
    if longest > most:
        thinned = (
            f"{len(rows):,} of {total:,} points are drawn, at most {most} of a line: of each stretch of a "
            "line the lowest and the highest, so that no spike is lost. The files of the runs have them all."
        )
    words: tuple[str, ...] = (
        "Loss (solid in training, dashed in tests), accuracy of the tests, the condition number of the "
        "worst block at each position, and the mean entropy of attention, all over the same time.",
    )
    if any(any(curve.bounds) for curve in curves):
        words += (
            'Where the status of a kappa is "at least", it exceeds float32 resolution and is a lower bound.',
        )
    chart = Chart(
        columns=columns("group=variant; run; panel=-panel; number; epoch; update; value; status"),
        rows=tuple(rows),
        spec={
            "vconcat": [
                _panel(
                    panel, kinds[panel], time, groups, is_last=panel == panels[-1], is_short=longest <= FEW
                )
                for panel in panels
            ],
            "spacing": 14,
        },
        describe="Line charts one below the other with a common time axis: "
        + ", ".join(panels)
        + ". The table below has the same numbers.",
    )
    return Section(id="training", title=TITLE, words=words, chart=chart, thinned=thinned)


def curves_of(subject: Subject) -> Iterator[Curve]:
    """The numbers of a run that are drawn."""
    yield from _curve(subject, "train", "loss", "loss", "loss", "training loss")
    yield from _curve(subject, "test", "loss", "loss", "loss", "test loss")
    yield from _curve(subject, "test", "accuracy", "accuracy", "accuracy", "test accuracy")
    keys = distinct(key for line in subject.lines if line["event"] == "monitor" for key in line)
    for key in keys:
        if key.startswith("kappa/") and key.endswith("/worst"):
            panel = f"kappa {key.split('/')[1]}"
            yield from _curve(subject, "monitor", key, "kappa", panel, f"{panel}, worst block")
    yield from _curve(subject, "monitor", "entropy/mean", "entropy", "entropy", "entropy, mean")


def _curve(subject: Subject, event: str, name: str, kind: str, panel: str, number: str) -> Iterator[Curve]:
    lines: list[Mapping[str, Any]] = [
        line for line in subject.lines if line["event"] == event and finite(line.get(name)) is not None
    ]
    if lines:
        times = [(line.get("epoch"), line.get("update")) for line in lines]
        bounds = [bool(line.get(name + AT_LEAST)) for line in lines]
        yield Curve(subject, kind, panel, number, times, [line[name] for line in lines], bounds)


class Time(NamedTuple):
    """The axis that all panels share."""

    field: str
    first: float
    last: float


def _time(rows: Sequence[Sequence[Any]], has_epochs: bool) -> Time:
    field, place = ("epoch", 4) if has_epochs else ("update", 5)
    known = [row[place] for row in rows if row[place] is not None]
    return Time(field, 0, max(known, default=1) or 1)


def _panel(
    panel: str, kind: str, time: Time, groups: list[str], *, is_last: bool, is_short: bool
) -> dict[str, Any]:
    scale: dict[str, Any] = {"zero": False}
    axis: dict[str, Any] = {"minExtent": 46, "maxExtent": 46, "tickCount": 4}
    if kind == "kappa":
        scale, axis = {"type": "log", "nice": False}, {**axis, **LOG_AXIS, "tickCount": 4}
    elif kind == "accuracy":
        axis |= {"format": ".0%"}
    encoding: dict[str, Any] = {
        "x": channel(
            time.field,
            time.field if is_last else None,
            scale={"domain": [time.first, time.last], "nice": False},
            axis={"labels": is_last, "ticks": is_last, "tickCount": 10, "labelOverlap": True},
        ),
        "y": channel("value", None, scale=scale, axis=axis),
        "color": nominal("group", sort=groups),
        "detail": tips("run", "number"),
        "tooltip": tips("run", "number", "status"),
    }
    if kind == "loss":
        dash = {"domain": ["training loss", "test loss"], "range": [[1, 0], [5, 3]]}
        encoding["strokeDash"] = nominal("number", legend=None, scale=dash)
    return {
        "title": {"text": panel, "anchor": "start", "fontSize": 12, "offset": 4},
        "height": 110,
        "transform": [{"filter": {"field": "panel", "equal": panel}}],
        "mark": {
            "type": "line",
            "strokeWidth": 1.6,
            "opacity": 0.85,
            "point": {"size": 14} if is_short else False,
        },
        "encoding": encoding,
    }
