"""Small charts as SVG text, for a notebook: no JavaScript, so they also show where scripts are not trusted.

>>> svg = heat_svg("ln kappa", ["0"], ["input"], {("0", "input"): 4.5})
>>> svg.startswith("<svg") and "input" in svg
True
"""

import html
from collections.abc import Mapping, Sequence

from wellposed.records import Record
from wellposed.report.charts import colour_range

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
        (str(r.block), "all" if r.head is None else str(r.head)): r.value
        for r in records
        if r.measure == "entropy" and r.block is not None and r.value is not None
    }
    parts = [
        heat_svg(
            title,
            list(dict.fromkeys(b for b, _ in values)),
            list(dict.fromkeys(p for _, p in values)),
            values,
        )
        for title, values in (("ln kappa", kappas), ("entropy of attention", entropies))
        if values
    ]
    return "".join(parts)


def heat_svg(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Mapping[tuple[str, str], float | None]
) -> str:
    """Rectangles, a row a block; the number of each is its tooltip. At most 64 rows are drawn."""
    rows = rows[:_MOST_ROWS]
    known = [value for value in values.values() if value is not None]
    low, high = colour_range(known, "entropy" if title.startswith("entropy") else "ln kappa")
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
