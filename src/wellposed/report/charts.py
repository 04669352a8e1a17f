"""A section of the page: words, one chart and the rows that it is drawn from, in few bytes.

The rows are the chart's data, the table next to it and the CSV file at once, so they cannot differ.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from wellposed.records import Record

Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """Of a table.

    Args:
        key: for the chart.
        title: for people.
        hidden: not in the table.
        log_of: key of the column, of positive numbers, whose natural logarithm it is; empty for none.
    """

    key: str
    title: str
    hidden: bool = False
    log_of: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Rows, and how Vega-Lite draws them.

    Args:
        columns: of the rows.
        rows: one cell a column.
        spec: Vega-Lite without data and width; none for a table alone.
        describe: what is to be seen, for those who do not see it.
        facet: key of the column of which each value has a panel; all panels share their scales.
        median: the column of which the median over a variant's runs is drawn, then those that make a cell.
        most: a column, and how many of its values are drawn before a button asks for all.
        opens: what a click on a mark opens: ``"spectrum"``, or nothing.
        table_open: whether the table is unfolded from the start.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    describe: str
    spec: dict[str, Any] | None = None
    facet: str = ""
    median: tuple[str, ...] = ()
    most: tuple[str, int] = ("", 0)
    opens: str = ""
    table_open: bool = False

    def records(self) -> list[dict[str, Cell]]:
        """The rows by key."""
        keys = [column.key for column in self.columns]
        return [dict(zip(keys, row, strict=True)) for row in self.rows]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Part of the page.

    Args:
        id: of its heading, and of the files it can be saved to.
        title: the heading.
        words: paragraphs.
        chart: None for words alone.
        thinned: what was skipped of the data, in a sentence; empty for nothing.
        extra: data besides the rows, such as the spectra that a click opens.
    """

    id: str
    title: str
    words: tuple[str, ...] = ()
    chart: Chart | None = None
    thinned: str = ""
    extra: dict[str, Any] | None = None


@dataclass(frozen=True)
class Missing:
    """A section whose records are not there, and what would add them."""

    title: str
    remedy: str


@dataclass(frozen=True)
class Budget:
    """How much of the data goes into a page.

    Args:
        points: of all training curves together.
        curve: values of one spectrum.
        heads: whether single heads are in it.
        seeds: whether all runs of a variant are, or one of each.
    """

    points: int = 9000
    curve: int = 64
    heads: bool = True
    seeds: bool = True

    def smaller(self) -> "Budget":
        """The next one; the same where nothing more can be skipped."""
        curve = max(self.curve // 2, 8)
        heads, seeds = self.heads and self.curve > 8, self.seeds and self.heads
        return Budget(max(self.points // 2, 1), curve, heads, seeds)


def columns(text: str) -> tuple[Column, ...]:
    """From ``"key=title; key"``; a title that starts with ``-`` is of a column that is not shown.

    >>> [(column.key, column.title) for column in columns("block; low=lower quartile; image_kappa")]
    [('block', 'block'), ('low', 'lower quartile'), ('image_kappa', 'image kappa')]
    """
    pairs = [part.partition("=") for part in text.split("; ")]
    titles = [(key, title or key.replace("_", " ")) for key, _, title in pairs]
    return tuple(Column(key=key, title=title.lstrip("-"), hidden=title[:1] == "-") for key, title in titles)


def table(keys: str, rows: Iterable[tuple[Cell, ...]], describe: str, *, is_open: bool = False) -> Chart:
    """Rows that nothing draws; ``keys`` as :func:`columns` takes them."""
    return Chart(columns=columns(keys), rows=tuple(rows), describe=describe, table_open=is_open)


ALL = "all"
"""What stands for the head of a record that is about all heads."""


def cells(record: Record, names: str) -> tuple[Any, ...]:
    """Fields of a record, without what JSON cannot hold."""
    return tuple(_cell(name, getattr(record, name)) for name in names.split())


def _cell(name: str, value: Any) -> Any:
    if name == "head":
        return ALL if value is None else str(value)
    if name == "images":
        return value or None
    return finite(value) if isinstance(value, float) else value


LOG_AXIS: Mapping[str, Any] = {
    "format": "~e",
    "tickCount": 6,
    "labelOverlap": True,
    "labelExpr": "datum.value >= 1 && datum.value < 10000 ? '' + datum.value : replace(datum.label, '+', '')",
}
"""Of condition numbers and singular values: 200, 5e6, 1e-3."""


Spec = dict[str, Any]
"""A part of a chart, as Vega-Lite has it."""


def channel(field: str, title: str | None, kind: str = "quantitative", **more: Any) -> Spec:
    """A field on an axis, or as colour."""
    return {"field": field, "type": kind, "title": title, **more}


def nominal(field: str, **more: Any) -> Spec:
    """A name, whose axis or legend needs no title."""
    return channel(field, None, "nominal", **more)


def tips(*names: str) -> list[Spec]:
    """What a tooltip shows."""
    return [{"field": name} for name in names]


def layer(mark: str, encoding: Spec, where: Any = None, **style: Any) -> Spec:
    """A mark, of the rows ``where`` a filter holds."""
    chosen = {"transform": [{"filter": where}]} if where is not None else {}
    return {**chosen, "mark": {"type": mark, **style}, "encoding": encoding}


def known(field: str) -> Spec:
    """A filter: the rows that have the field."""
    return {"field": field, "valid": True}


def finite(value: object) -> float | int | None:
    """A number that JSON has; None for NaN, infinity and what is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if float("-inf") < value < float("inf") else None


def colour_range(values: Iterable[float], measure: str) -> tuple[float, float]:
    """From light to dark, and no narrower than a difference that matters: 0.1 of entropy, 1 of ln kappa.

    >>> colour_range([0.9994, 0.9995], "entropy")[0] < 0.9, colour_range([2.0, 9.0], "ln kappa")
    (True, (2.0, 9.0))
    """
    values = list(values)
    low, high = min(values), max(values)
    return (min(low, high - 0.1), high) if measure == "entropy" else (low, max(high, low + 1.0))


def distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def picked(values: Sequence[float], most: int) -> list[tuple[int, float]]:
    """At most ``most`` of the values with their indices, evenly, the first and the last among them.

    >>> picked([9.0, 8.0, 7.0, 6.0, 5.0], 3)
    [(0, 9.0), (2, 7.0), (4, 5.0)]
    """
    count = len(values)
    if count <= most:
        return list(enumerate(values))
    chosen = distinct(round(i * (count - 1) / (most - 1)) for i in range(most))
    return [(index, values[index]) for index in chosen]


def pack(values: Sequence[Any]) -> dict[str, Any]:
    """As ``values``, with ``levels`` where they are names and ``repeats`` where that is shorter."""
    packed: dict[str, Any] = {}
    if any(isinstance(value, str) for value in values):
        levels = {value: code for code, value in enumerate(dict.fromkeys(values))}
        packed["levels"], values = list(levels), [levels[value] for value in values]
    stretches = [(value, len(list(equal))) for value, equal in itertools.groupby(values)]
    if 2 * len(stretches) < len(values):
        return packed | {"values": [value for value, _ in stretches], "repeats": [n for _, n in stretches]}
    return packed | {"values": list(values)}


def unpacked(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Key -> values of each column, all of one length.

    >>> unpacked([{"key": "kappa", "values": [1.0], "repeats": [2]}, {"key": "ln", "log_of": "kappa"}])
    {'kappa': [1.0, 1.0], 'ln': [0.0, 0.0]}
    """
    filled = {column["key"]: _filled(column) for column in columns if "log_of" not in column}
    return {
        column["key"]: [math.log(value) for value in filled[column["log_of"]]]
        if "log_of" in column
        else filled[column["key"]]
        for column in columns
    }


def _filled(column: Mapping[str, Any]) -> list[Any]:
    values = column["values"]
    if "repeats" in column:
        pairs = zip(values, column["repeats"], strict=True)
        values = [value for value, count in pairs for _ in range(count)]
    return [column["levels"][code] for code in values] if "levels" in column else values


class Point(NamedTuple):
    """Of a curve; ``place`` is its index in the record."""

    place: int
    value: float


def thin(values: Sequence[float], most: int) -> list[Point]:
    """At most ``most`` points (at least 4), in order, with the first, the last, the lowest and the highest.

    >>> [point.place for point in thin([0, 1, 0, 9, 0, 1, -5, 1, 0, 1], 6)]
    [0, 2, 3, 5, 6, 9]
    """
    points = [Point(place, value) for place, value in enumerate(values)]
    if len(points) <= most:
        return points
    stretches = max((most - 2) // 2, 1)
    inner = points[1:-1]
    kept = {points[0], points[-1]}
    for number in range(stretches):
        stretch = inner[number * len(inner) // stretches : (number + 1) * len(inner) // stretches]
        if stretch:
            kept.add(min(stretch, key=lambda point: point.value))
            kept.add(max(stretch, key=lambda point: point.value))
    return sorted(kept)
