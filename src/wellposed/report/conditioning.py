"""The heat map: ln kappa of each block and position, and the spectrum that a click opens."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from wellposed.records import Record
from wellposed.report.charts import (
    Budget,
    Chart,
    Missing,
    Section,
    colour_range,
    columns,
    finite,
    most_told,
    picked,
)
from wellposed.report.subjects import Material, Subject

TITLE = "Conditioning, block by block"
_STORED = columns(
    run="run",
    block="block",
    module="module",
    position="position",
    kappa="kappa",
    ln_kappa="ln kappa",
    status="status",
    low="lower quartile",
    high="upper quartile",
    images="images",
    estimator="estimator",
    spectrum="-spectrum",
)
# Its digits would be a third of the page's data.
_COLUMNS = tuple(replace(each, log_of="kappa") if each.key == "ln_kappa" else each for each in _STORED)


def conditioning_section(material: Material, budget: Budget) -> Section | Missing:
    spectra = _Spectra(budget.curve)
    rows = [row for subject in material.subjects for row in _rows(subject, spectra)]
    if not rows:
        return Missing(TITLE, "wellposed diagnose MODEL --images DIR --out DIR")
    logs = [row[5] for row in rows]
    words = [
        "Natural logarithm of the condition number kappa of the token matrix, median over the images: the "
        "darker (in the dark, the brighter), the worse. ≥ marks a lower bound: the arithmetic cannot tell "
        "more."
    ]
    if spectra.curves:
        words.append("Choose a cell, or a place in the menu below, to see its singular values.")
    else:
        words.append(
            "These records have no spectra; wellposed diagnose MODEL --images DIR --out DIR adds them."
        )
    positions = sorted_positions(row[3] for row in rows)
    chart = Chart(
        columns=_COLUMNS,
        rows=tuple(rows),
        spec=heat_map(
            x=("position", "position", positions),
            y=("block", "block"),
            colour=("ln_kappa", "ln kappa", colour_range(logs, "ln kappa")),
            tooltips=("block", "module", "position", "kappa", "ln_kappa", "status", "low", "high"),
            mark_bounds=True,
        ),
        describe="Heat map of ln kappa, a row for each block and a column for each position. "
        "The table below has the same numbers.",
        choose="run",
        choose_title="run",
        chosen=most_told(rows),
        opens="spectrum" if spectra.curves else "",
    )
    return Section(
        id="conditioning",
        title=TITLE,
        words=tuple(words),
        chart=chart,
        thinned=spectra.thinned(),
        extra={"spectra": spectra.curves} if spectra.curves else None,
    )


def sorted_positions(positions: Iterable[str]) -> list[str]:
    """In the order in which tokens pass them.

    >>> sorted_positions(["ffn.branch", "attention.sum", "attention.branch", "input"])
    ['input', 'attention.branch', 'attention.sum', 'ffn.branch']
    """
    parts, roles = ("branch", "skip", "sum"), ("", "local", "mixer", "attention", "ffn")

    def place(position: str) -> tuple[int, str, int]:
        role, _, part = position.rpartition(".")
        known = roles.index(role) if role in roles else len(roles)
        return known, role, parts.index(part) if part in parts else -1

    return sorted(set(positions), key=place)


def heat_map(
    *,
    x: tuple[str, str, Sequence[Any]],
    y: tuple[str, str],
    colour: tuple[str, str, tuple[float, float]],
    tooltips: Sequence[str],
    mark_bounds: bool = False,
    ramp: bool = False,
) -> dict[str, Any]:
    """Rectangles of one height; the colour's range is that of all subjects, so that they compare."""
    field, title, (low, high) = colour
    scale: dict[str, Any] = {"domain": [low, high if high > low else low + 1]}
    if ramp:
        scale["range"] = "ramp"
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "rect", "cursor": "pointer"},
            "encoding": {
                "color": {
                    "field": field,
                    "type": "quantitative",
                    "title": title,
                    "scale": scale,
                    "legend": {"orient": "top", "gradientLength": 180},
                },
                "tooltip": [{"field": name} for name in tooltips],
            },
        }
    ]
    if mark_bounds:
        layers.append(
            {
                "transform": [{"filter": {"field": "status", "oneOf": ["at least", "at most"]}}],
                "mark": {"type": "text", "text": "≥", "fontSize": 13, "fontWeight": "bold", "tooltip": None},
                "encoding": {
                    "color": {"value": "#ffffff"},
                    "stroke": {"value": "#000000"},
                    "strokeWidth": {"value": 0.4},
                },
            }
        )
        layers.append(
            {
                "data": {"name": "picked"},
                "mark": {
                    "type": "rect",
                    "filled": False,
                    "strokeWidth": 3,
                    "tooltip": None,
                    "style": "picked",
                },
            }
        )
    return {
        "height": {"step": 24},
        "encoding": {
            "x": {
                "field": x[0],
                "type": "ordinal",
                "title": x[1],
                "sort": list(x[2]),
                "axis": {"labelAngle": -35 if any(len(str(v)) > 4 for v in x[2]) else 0, "labelLimit": 160},
            },
            "y": {"field": y[0], "type": "ordinal", "title": y[1]},
        },
        "layer": layers,
    }


class _Spectra:
    """The curves that a click opens, each stored once: a skip carries the spectrum of what came before it."""

    def __init__(self, most: int) -> None:
        self.most, self.longest = most, 0
        self.curves: list[dict[str, Any]] = []
        self._places: dict[tuple[float, ...], int] = {}

    def add(self, curve: tuple[float, ...]) -> int:
        if curve not in self._places:
            self._places[curve] = len(self.curves)
            self.longest = max(self.longest, len(curve))
            chosen = picked(curve, self.most)
            self.curves.append({"index": [i + 1 for i, _ in chosen], "value": [value for _, value in chosen]})
        return self._places[curve]

    def thinned(self) -> str:
        if self.longest <= self.most:
            return ""
        return f"Of each spectrum (up to {self.longest} values) {self.most} evenly spaced values are kept."


def _rows(subject: Subject, spectra: _Spectra) -> list[tuple[Any, ...]]:
    curves = {(r.block, r.position): r.curve for r in subject.select("spectrum") if r.curve}
    return [
        _row(
            subject,
            record,
            spectra.add(curves[place]) if (place := (record.block, record.position)) in curves else None,
        )
        for record in subject.select("kappa")
        if record.head is None and record.block is not None and (finite(record.value) or 0) > 0
    ]


def _row(subject: Subject, record: Record, spectrum: int | None) -> tuple[Any, ...]:
    assert record.value is not None
    return (
        subject.name,
        record.block,
        record.module,
        record.position,
        record.value,
        math.log(record.value),
        record.status,
        finite(record.low),
        finite(record.high),
        record.images or None,
        record.estimator,
        spectrum,
    )
