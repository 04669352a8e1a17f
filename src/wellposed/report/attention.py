"""What attention looks at: each block's and head's weights over an image, and rolled out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from wellposed.image_files import data_uri
from wellposed.records import OF_ATTENTION, Record
from wellposed.report.charts import Budget, Missing, Section, table
from wellposed.report.material import Material

TITLE = "What attention looks at"
MOST = 4
"""Runs and diagnoses with pictures on one page."""

_SIDE = 112  # of a picture, in pixels
_RED = np.array([214.0, 39.0, 40.0])
Array = np.ndarray[Any, Any]


def attention_section(material: Material, budget: Budget) -> Section | Missing:
    """In ``extra`` a strip of the blocks and one of the last block's heads; the weights in rows."""
    shown = [subject for subject in material.subjects if subject.select("attention picture")]
    drawn = [(subject, pictures_of(subject.records)) for subject in shown[:MOST]]
    drawn = [(subject, pictures) for subject, pictures in drawn if pictures]
    if not drawn:
        return Missing(TITLE, "wellposed diagnose MODEL --images DIR --what attention --out DIR")
    strips: list[dict[str, Any]] = []
    rows: list[tuple[Any, ...]] = []
    for subject, pictures in drawn:
        last = max(record.block for record, _ in pictures if record.block is not None)
        blocks = [(record, picture) for record, picture in pictures if record.head is None]
        heads = [(r, picture) for r, picture in pictures if r.head is not None and r.block == last]
        for what, some in (("blocks", blocks), (f"heads of block {last}", heads)):
            if some:
                steps = [{"label": _label(record), "src": picture} for record, picture in some]
                strips.append({"name": f"{subject.name}, {what}", "steps": steps})
        for record, _ in pictures:
            top = max(range(len(record.curve)), key=record.curve.__getitem__)
            row, column = divmod(top, record.shape[1])
            where = (record.measure, record.block, record.head)
            rows.append((subject.name, *where, max(record.curve), row, column, record.note))
    chart = table(
        "run; measure; block; head; largest=largest weight; row=in row; column=in column; note",
        rows,
        "The largest weight of each picture and the patch that has it.",
    )
    words = (
        "Attention's weights over the patches of one image, red where they are large; each picture has its "
        "own scale, from its smallest weight, or half the largest if that is less, to its largest. "
        "Rollout multiplies (A + I) / 2 over the blocks, with A the "
        "mean over the heads.",
    )
    left = len(shown) - len(drawn)
    thinned = f"{left} more have no pictures here, to keep the page small." if left > 0 else ""
    return Section(
        id="attention", title=TITLE, words=words, chart=chart, extra={"pictures": strips}, thinned=thinned
    )


def pictures_of(records: Sequence[Record]) -> list[tuple[Record, str]]:
    """The records of attention over an image, each with its picture as a data URI."""
    grey = next((record for record in records if record.measure == "image" and _is_whole(record)), None)
    found = [r for r in records if r.measure in OF_ATTENTION and _is_whole(r)]
    return [(record, _png(overlay(record, grey))) for record in found]


def overlay(record: Record, grey: Record | None) -> Array:
    """The picture (H, W, 3) of a record, over the image in grey where there is one."""
    weights = _scaled(np.asarray(record.curve).reshape(record.shape))
    under = (
        np.full_like(weights, 0.6) if grey is None else _scaled(np.asarray(grey.curve).reshape(grey.shape))
    )
    low, high = _range(record)
    share = 0.8 * (weights - low) / max(high - low, np.finfo(np.float64).tiny)
    light = 255 * (0.25 + 0.75 * under)[..., None]
    return np.asarray((1 - share[..., None]) * light + share[..., None] * _RED)


def _range(record: Record) -> tuple[float, float]:
    """The weights without and with full colour: weights that are nearly alike should look so."""
    high = max(record.curve)
    return min(min(record.curve), high / 2), high


def save_attention(
    records: Sequence[Record], path: str | Path, *, block: int | None = None, head: int | None = None
) -> None:
    """A figure of one picture, of rollout without a block; PNG, SVG or PDF by the path's ending."""
    measure = "attention rollout" if block is None else "attention picture"
    chosen = [r for r in records if (r.measure, r.block, r.head) == (measure, block, head) and _is_whole(r)]
    if not chosen:
        there = sorted({r.block for r in records if r.measure == "attention picture" and r.block is not None})
        raise ValueError(
            f"expected a picture of block {block}, head {head} in the records, which have blocks {there}; "
            'wellposed.diagnose(model, images, what="attention") makes them.'
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "this figure needs matplotlib, which is not installed: pip install 'wellposed[plot]'."
        ) from error
    grey = next((record for record in records if record.measure == "image"), None)
    figure = Figure(figsize=(3, 3.3), constrained_layout=True)
    FigureCanvasAgg(figure)
    plot = figure.subplots()
    plot.imshow(overlay(chosen[0], grey).round().astype(np.uint8), interpolation="nearest")
    low, high = _range(chosen[0])
    where = _label(chosen[0]) + ("" if head is None else f" of block {block}")
    plot.set_title(f"{where}: {low:.2%} to {high:.2%} a patch", fontsize=9)
    plot.set_axis_off()
    figure.savefig(path, dpi=200)


def _label(record: Record) -> str:
    if record.measure == "attention rollout":
        return "rollout"
    return f"block {record.block}" if record.head is None else f"head {record.head}"


def _is_whole(record: Record) -> bool:
    """A file may be made by hand."""
    sizes = [size for size in record.shape if isinstance(size, int) and size > 0]
    return len(sizes) == 2 == len(record.shape) and sizes[0] * sizes[1] == len(record.curve)


def _scaled(values: Array) -> Array:
    """To about 112 pixels, each value a rectangle."""
    longest = max(values.shape)
    rows, columns = (max(1, round(_SIDE * size / longest)) for size in values.shape)
    down = np.arange(rows) * values.shape[0] // rows
    across = np.arange(columns) * values.shape[1] // columns
    scaled: Array = np.asarray(values, np.float64)[down][:, across]
    return scaled


def _png(picture: Array) -> str:
    return data_uri(Image.fromarray(picture.round().astype(np.uint8)).quantize(64))
