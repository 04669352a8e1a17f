"""Heat maps: ln kappa of each block and position with its spectrum, and the entropy of each head."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from wellposed.records import Record
from wellposed.report.charts import (
    ALL,
    Budget,
    Chart,
    Missing,
    Section,
    cells,
    channel,
    colour_range,
    columns,
    distinct,
    finite,
    layer,
    picked,
    tips,
)
from wellposed.report.material import Material, Subject

CONDITIONING = "Conditioning, block by block"
MOST_PANELS = 12
"""Drawn before a button asks for all."""
_STORED = columns(
    "run; block; module; position; kappa; ln_kappa; status; low=lower quartile; high=upper "
    "quartile; images; estimator; variant; spectrum=-spectrum"
)
# Its digits would be a third of the page's data.
_COLUMNS = tuple(replace(each, log_of="kappa") if each.key == "ln_kappa" else each for each in _STORED)


def conditioning_section(material: Material, budget: Budget) -> Section | Missing:
    spectra = _Spectra(budget.curve)
    rows = [row for subject in material.subjects for row in _rows(subject, spectra)]
    if not rows:
        return Missing(CONDITIONING, "wellposed diagnose MODEL --images DIR --out DIR")
    logs = [row[5] for row in rows]
    words = [
        "Natural logarithm of the condition number kappa of the tokens, the median over images and over the "
        "runs of a variant, on one scale for all. Larger is worse. ≥ marks a lower bound: "
        "kappa exceeds float32 resolution."
    ]
    if spectra.curves:
        words.append("Choose a cell, or a place in the menu, to see its singular values.")
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
            tooltips=("block", "module", "position", "kappa", "ln_kappa", "status", "low", "high", "runs"),
            mark_bounds=True,
        ),
        describe="Heat maps of ln kappa, one a variant, with a row for each block and a column for each "
        "position. The table below has the numbers of each run.",
        facet="variant",
        median=("kappa", "variant", "block", "position"),
        most=("variant", MOST_PANELS),
        opens="spectrum" if spectra.curves else "",
    )
    return Section(
        id="conditioning",
        title=CONDITIONING,
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
    legend = {"orient": "top", "gradientLength": 180}
    coloured = {"color": channel(field, title, scale=scale, legend=legend), "tooltip": tips(*tooltips)}
    layers = [layer("rect", coloured, cursor="pointer")]
    if mark_bounds:
        middle = {"type": "threshold", "domain": [(low + high) / 2], "range": "bound"}
        bound = {"field": "status", "oneOf": ["at least", "at most"]}
        text = {"text": "≥", "fontSize": 13, "fontWeight": "bold", "tooltip": None}
        layers.append(layer("text", {"fill": channel(field, None, scale=middle, legend=None)}, bound, **text))
        here = "datum.block + '|' + datum.position === picked"
        layers.append(layer("rect", {}, here, filled=False, strokeWidth=3, tooltip=None, style="picked"))
    axis = {"labelAngle": -35 if any(len(str(v)) > 4 for v in x[2]) else 0, "labelLimit": 160}
    return {
        "height": {"step": 20},
        "encoding": {
            "x": channel(x[0], x[1], "ordinal", sort=list(x[2]), axis=axis),
            "y": channel(y[0], y[1], "ordinal", axis={"labelOverlap": True}),
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
    rows = []
    for record in subject.kappas():
        curve = curves.get((record.block, record.position))
        shown = cells(record, "block module position value log status low high images estimator")
        rows.append((subject.name, *shown, subject.variant, None if curve is None else spectra.add(curve)))
    return rows


DENSITY = "Density of attention"
NO_HEADS = "Single heads are skipped to keep the page small; report fewer runs together to see them."


def density_section(material: Material, budget: Budget) -> Section | Missing:
    rows: list[tuple[Any, ...]] = [
        (subject.name, *cells(r, "block head value low high images"), subject.variant)
        for subject in material.subjects
        for r in subject.select("entropy")
        if finite(r.value) is not None and r.block is not None and (budget.heads or r.head is None)
    ]
    if not rows:
        return Missing(DENSITY, "wellposed diagnose MODEL --images DIR --what density --out DIR")
    values = [row[3] for row in rows]
    heads = sorted(distinct(row[2] for row in rows), key=lambda head: (head == ALL, len(head), head))
    chart = Chart(
        columns=columns(
            "run; block; head; entropy; low=lower quartile; high=upper quartile; images; variant"
        ),
        rows=tuple(rows),
        spec=heat_map(
            x=("head", "head", heads),
            y=("block", "block"),
            colour=("entropy", "entropy, 1 is uniform", colour_range(values, "entropy")),
            tooltips=("block", "head", "entropy", "low", "high", "runs"),
            ramp=True,
        ),
        describe="Heat maps of the entropy of attention, one a variant, with a row for each block and a "
        "column for each head. The table below has the numbers of each run.",
        facet="variant",
        median=("entropy", "variant", "block", "head"),
        most=("variant", MOST_PANELS),
    )
    words = [
        "Entropy of the attention rows over its maximum, the median over images and over the runs of a "
        "variant. 1 is uniform attention."
    ]
    thinned = ""
    if not budget.heads:
        thinned = NO_HEADS
    elif heads == [ALL]:
        words.append(
            "These records have no single heads; wellposed diagnose MODEL --images DIR --what density --out "
            "DIR measures them."
        )
    return Section(id="density", title=DENSITY, words=tuple(words), chart=chart, thinned=thinned)


CELL, LEFT, TOP, LETTER = 24, 60, 58, 6.2
LEAST_WIDTH = 360  # for the title
_LIGHT, _DARK = (255, 245, 200), (150, 20, 40)
_MOST_ROWS = 64


def charts_html(records: Sequence[Record]) -> str:
    """Heat maps of ln kappa and, where it was measured, of the entropy of attention."""
    kappas = {
        (str(r.block), r.position): r.log
        for r in records
        if r.measure == "kappa" and r.head is None and r.block is not None and r.log is not None
    }
    entropies = {
        (str(r.block), ALL if r.head is None else str(r.head)): r.value
        for r in records
        if r.measure == "entropy" and r.block is not None and r.value is not None
    }
    drawn = [heat_svg("ln kappa", kappas, colour_range(kappas.values(), "ln kappa"))] if kappas else []
    if entropies:
        drawn.append(heat_svg("entropy of attention", entropies, colour_range(entropies.values(), "entropy")))
    return "".join(drawn)


def heat_svg(title: str, values: Mapping[tuple[str, str], float], colours: tuple[float, float]) -> str:
    """Rectangles, a row a block; the number of each is its tooltip. At most 64 rows are drawn."""
    rows, columns = distinct(row for row, _ in values)[:_MOST_ROWS], distinct(column for _, column in values)
    low, high = colours
    wide = max(CELL, *(int(LETTER * len(column)) + 8 for column in columns))
    width, height = max(LEFT + wide * len(columns) + 10, LEAST_WIDTH), TOP + CELL * len(rows) + 10
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' role='img' width='{width}' height='{height}' viewBox='0 0 "
        f"{width} {height}' font-family='sans-serif' font-size='11' "
        f"fill='currentColor'><title>{html.escape(title)}, {low:.3g} to {high:.3g}</title><text x='4' y='16' "
        f"font-weight='bold'>{html.escape(title)}, {low:.3g} (light) to {high:.3g} (dark)</text><text x='4' "
        f"y='{TOP - 8}'>block</text>"
    ]
    for place, column in enumerate(columns):
        middle = LEFT + wide * (place + 0.5)
        parts.append(f"<text x='{middle}' y='{TOP - 8}' text-anchor='middle'>{html.escape(column)}</text>")
    for line, row in enumerate(rows):
        y = TOP + CELL * line
        parts.append(f"<text x='{LEFT - 8}' y='{y + 16}' text-anchor='end'>{html.escape(row)}</text>")
        for place, column in enumerate(columns):
            value = values.get((row, column))
            if value is not None:
                share = (value - low) / (high - low) if high > low else 0.5
                fill = ",".join(str(round(a + share * (b - a))) for a, b in zip(_LIGHT, _DARK, strict=True))
                words = html.escape(f"block {row}, {column}: {value:.4g}")
                parts.append(
                    f"<rect x='{LEFT + wide * place}' y='{y}' width='{wide - 1}' height='{CELL - 1}' "
                    f"fill='rgb({fill})'><title>{words}</title></rect>"
                )
    return "".join(parts) + "</svg>"
