"""The growth of the cost as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wellposed.bench.growth import AXES, PASSES, GrowthRow

_COLORS = {"spectral": "C0", "dct": "C1", "svd": "C3", "svd-gesvda": "C4", "eigh": "C2"}
_SAID = {"tokens": "tokens, 768 channels", "channels": "channels, 196 tokens", "batch": "batch, 196 x 768"}


def draw_growth(rows: Sequence[GrowthRow], path: Path, device: str = "") -> None:
    """Time an image over each axis, both axes logarithmic; the floors are dotted."""
    axes = [axis for axis in AXES if any(row.axis == axis and row.microseconds is not None for row in rows)]
    if not axes:
        raise ValueError("nothing to draw: no row of the growth table has a time.")
    figure_class, canvas = _matplotlib()
    figure = figure_class(figsize=(4.2 * len(axes), 6.4), constrained_layout=True)
    canvas(figure)
    grid = figure.subplots(len(PASSES), len(axes), squeeze=False, sharey=True)
    for line, passes in enumerate(PASSES):
        for column, axis in enumerate(axes):
            here = [row for row in rows if (row.axis, row.passes) == (axis, passes)]
            _draw(grid[line][column], [row for row in here if row.microseconds is not None], axis)
            grid[line][column].set_title(passes, fontsize=10)
        grid[line][0].set_ylabel("microseconds an image")
    grid[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"Cost of graying{f', {device}' if device else ''}; dotted: least possible", fontsize=11)
    figure.savefig(path, dpi=120)


def _draw(plot: Any, rows: Sequence[GrowthRow], axis: str) -> None:
    for method in dict.fromkeys(row.method for row in rows):
        own = sorted((row for row in rows if row.method == method), key=lambda row: row.size)
        sizes = [row.size for row in own]
        (drawn,) = plot.plot(
            sizes,
            [row.microseconds for row in own],
            marker="o",
            markersize=4,
            label=method,
            color=_COLORS.get(method),
        )
        if method in ("spectral", "dct") and all(row.floor is not None for row in own):
            plot.plot(sizes, [row.floor for row in own], ":", color=drawn.get_color(), linewidth=1)
    all_sizes = sorted({row.size for row in rows})
    plot.set(xscale="log", yscale="log", xlabel=_SAID[axis])
    plot.set_xticks(all_sizes, [str(size) for size in all_sizes], fontsize=7)
    plot.minorticks_off()
    plot.grid(alpha=0.3)
    plot.spines[["top", "right"]].set_visible(False)


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the picture needs matplotlib: pip install 'wellposed[plot]', then "
            "wellposed bench graying --from DIR draws it from the tables."
        ) from error
    return Figure, FigureCanvasAgg
