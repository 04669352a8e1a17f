"""The results on the screen."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from wellposed.bench.growth import AXES, PASSES, GrowthRow
from wellposed.bench.steps import StepRow
from wellposed.records import short


def steps_table(rows: Sequence[StepRow], about: dict[str, Any]) -> Table:
    compiled = "compiled" if about.get("compile") else "eager"
    title = (
        f"A training step of {about.get('model')}, {about.get('image_size')} px, batch "
        f"{about.get('batch_size')}, {about.get('precision')}, {compiled}, {about.get('device')}"
    )
    caption = (
        "Medians over the rounds, in parentheses the smallest and the largest. Ratio: to the plain step of "
        "the same round. Floor: least time for the operations and bytes on this chip."
    )
    table = _table(title, caption, "edit")
    for name in ("ms", "ratio", "ms added", "GiB over plain", "floor ms", "floor ms added"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.status != "ok":
            table.add_row(row.edit, Text(f"{row.status}: {row.note}", style="red"))
            continue
        table.add_row(
            row.edit,
            _spread(row.milliseconds, row.low, row.high, ".2f"),
            _spread(row.ratio, row.ratio_low, row.ratio_high, ".4f"),
            _number(row.added, ".2f"),
            _number(row.peak_gib_over_plain, ".2f"),
            _number(row.floor, ".2f"),
            _number(row.added_floor, ".2f"),
        )
    return table


def growth_tables(rows: Sequence[GrowthRow], about: dict[str, Any]) -> list[Table]:
    """For each axis the times, and the memory where it was measured."""
    device = about.get("device", "")
    tables = []
    for axis in AXES:
        of_axis = [row for row in rows if row.axis == axis]
        if not of_axis:
            continue
        times = f"Graying over {axis}: microseconds an image (floor), {device}"
        tables.append(_pivot(of_axis, times, _time_cell))
        if any(row.peak_mib is not None for row in of_axis):
            tables.append(_pivot(of_axis, f"Graying over {axis}: peak memory, MiB an image", _memory_cell))
    return tables


def growth_notes(rows: Iterable[GrowthRow]) -> list[str]:
    """What was left out or failed, and why, each reason once."""
    notes = (f"{row.method}: {row.status}, {row.note}" for row in rows if row.note)
    return list(dict.fromkeys(notes))


def wide(console: Console) -> Console:
    """A console whose tables are not folded when they go into a file."""
    return console if console.is_terminal else Console(file=console.file, width=150)


def _pivot(rows: Sequence[GrowthRow], title: str, cell: Callable[[GrowthRow], str]) -> Table:
    """A line for each size and pass, a column for each method."""
    methods = list(dict.fromkeys(row.method for row in rows))
    axis = rows[0].axis
    table = _table(title, "", axis)
    if axis != "batch":
        table.add_column("batch", justify="right")
    table.add_column("pass")
    for method in methods:
        table.add_column(method, justify="right")
    for passes in PASSES:
        for size in sorted({row.size for row in rows}):
            here = {row.method: row for row in rows if (row.size, row.passes) == (size, passes)}
            if not here:
                continue
            batch = max(row.batch for row in here.values())
            if any(row.batch != batch for row in here.values()):
                table.caption = "x 8: measured with 8 images, since more would have taken too long."
            cells = [
                cell(here[name]) + (f" x {here[name].batch}" if here[name].batch != batch else "")
                if name in here
                else ""
                for name in methods
            ]
            table.add_row(str(size), *([] if axis == "batch" else [str(batch)]), passes, *cells)
        table.add_section()
    return table


def _time_cell(row: GrowthRow) -> str:
    if row.microseconds is None:
        return row.status
    floor = "" if row.floor is None else f" ({short(row.floor)})"
    return short(row.microseconds) + floor


def _memory_cell(row: GrowthRow) -> str:
    return row.status if row.status != "ok" else _number(row.peak_mib, ".2f")


def _table(title: str, caption: str, first: str) -> Table:
    table = Table(title=title, caption=caption, caption_justify="left", title_justify="left")
    table.add_column(first, no_wrap=True)
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _spread(value: float | None, low: float | None, high: float | None, form: str) -> str:
    if value is None or low is None or high is None:
        return "-"
    return f"{value:{form}} ({low:{form}} to {high:{form}})"
