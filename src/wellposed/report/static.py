"""The figures of the page as PNG and SVG files, by matplotlib, from the same rows."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from wellposed.report.charts import Budget, Section, colour_range, distinct
from wellposed.report.heat_maps import MOST_PANELS, sorted_positions
from wellposed.report.page import sections
from wellposed.report.subjects import Material
from wellposed.report.training import FEW
from wellposed.stats import median

DPI = 200
_WHOLE = Budget(points=10**9, curve=10**9)
"""A file for a paper holds every point."""

Rows = Sequence[Mapping[str, Any]]


def write_static(material: Material, folder: str | Path) -> list[Path]:
    """Write ``NAME.png`` and ``NAME.svg`` for each section that has a figure; returns the files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    found, _ = sections(material, _WHOLE)
    for section in found:
        draw = _DRAWN.get(section.id)
        has_pictures = "pictures" in (section.extra or {})
        if draw is None or section.chart is None or (section.chart.spec is None and not has_pictures):
            continue
        figure = new_figure()
        draw(figure, section)
        for kind in ("png", "svg"):
            written.append(folder / f"{section.id}.{kind}")
            # Without a date the same records give the same file.
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(written[-1], dpi=DPI, metadata=metadata)
    return written


def new_figure() -> Any:
    """An empty figure of matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "static figures need matplotlib, which is not installed: pip install 'wellposed[plot]'."
        ) from error
    figure = Figure(constrained_layout=True)
    FigureCanvasAgg(figure)
    return figure


def _plain(text: object) -> str:
    """A name as matplotlib draws it: a dollar would begin a formula."""
    return str(text).replace("$", r"\$")


def _rows(section: Section) -> Rows:
    assert section.chart is not None
    return section.chart.records()


def _panels(figure: Any, names: Sequence[str], width: float, height: float) -> list[Any]:
    columns = min(len(names), 3)
    lines = -(-len(names) // columns)
    figure.set_size_inches(width * columns, height * lines)
    plots = list(figure.subplots(lines, columns, squeeze=False).flat)
    for plot in plots[len(names) :]:
        plot.set_axis_off()
    for plot, name in zip(plots, names, strict=False):
        plot.set_title(_plain(name), fontsize=9)
    return plots


def _heat(figure: Any, section: Section, x: str, value: str, label: str, colours: str) -> None:
    rows = _rows(section)
    names = distinct(row["variant"] for row in rows)[:MOST_PANELS]
    wide, tall = (len({row[key] for row in rows}) for key in (x, "block"))
    plots = _panels(figure, names, 1.6 + 0.34 * wide, 1.5 + 0.24 * tall)
    low, high = colour_range((row[value] for row in rows), "entropy" if value == "entropy" else "ln kappa")
    image = None
    for plot, name in zip(plots, names, strict=False):
        own: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for row in rows:
            if row["variant"] == name:
                own.setdefault((row["block"], row[x]), []).append(row)
        columns, blocks = distinct(column for _, column in own), sorted({block for block, _ in own})
        if x == "position":
            columns = sorted_positions(columns)
        if x == "head":
            columns = sorted(columns, key=lambda head: (not head.isdigit(), len(head), head))
        grid = np.full((len(blocks), len(columns)), np.nan)
        bounds = []
        for (block, column), runs in own.items():
            middle = median([row[value] for row in runs], [row.get("status") == "at least" for row in runs])
            grid[place := (blocks.index(block), columns.index(column))] = middle.value
            bounds += [place] if middle.at_least else []
        image = plot.imshow(grid, aspect="auto", cmap=colours, vmin=low, vmax=high)
        turned: dict[str, Any] = {"rotation": 40, "ha": "right"} if x == "position" else {}
        plot.set_xticks(range(len(columns)), columns, fontsize=8, **turned)
        plot.set_yticks(range(len(blocks)), blocks, fontsize=8)
        plot.set_ylabel("block")
        for down, across in bounds:
            plot.text(across, down, "≥", ha="center", va="center", fontsize=8, color="white")
    figure.colorbar(image, ax=plots, label=label)


def _draw_conditioning(figure: Any, section: Section) -> None:
    _heat(figure, section, "position", "ln_kappa", "ln kappa", "YlOrRd")


def _draw_density(figure: Any, section: Section) -> None:
    _heat(figure, section, "head", "entropy", "entropy, 1 is uniform", "Blues")


def _draw_runs(figure: Any, section: Section) -> None:
    rows = [row for row in _rows(section) if row["accuracy"] is not None]
    has_changes = any(row.get("difference") is not None for row in rows)
    figure.set_size_inches(6 + 3 * has_changes, 1 + 0.4 * len(rows))
    plots = figure.subplots(1, 1 + has_changes, squeeze=False, sharey=True)[0]
    for place, row in enumerate(rows):
        plots[0].plot([row.get("lowest"), row.get("highest")], [place, place], color="C0")
        plots[0].plot(row["accuracy"], place, "o", color="C0")
        if row.get("difference") is not None:
            known = [row[end] for end in ("low", "high") if row.get(end) is not None]
            colour = {"higher": "C0", "lower": "C1"}.get(row["verdict"], "grey")
            plots[1].plot(known, [place] * len(known), color=colour)
            plots[1].plot(row["difference"], place, "o", color=colour)
    plots[0].set_yticks(range(len(rows)), [_plain(row["name"]) for row in rows], fontsize=8)
    plots[0].invert_yaxis()
    plots[0].set_xlabel("test accuracy, %: mean, lowest to highest run")
    if has_changes:
        plots[1].axvline(0, color="grey", linestyle="--", linewidth=1)
        plots[1].set_xlabel("difference, points, 95% interval")


def _draw_bounds(figure: Any, section: Section) -> None:
    rows = [row for row in _rows(section) if row["bound"] is not None]
    names = distinct(row["variant"] for row in rows)[:MOST_PANELS]
    for plot, name in zip(_panels(figure, names, 4.2, 3.6), names, strict=False):
        own = [row for row in rows if row["variant"] == name]
        for measure in distinct(row["measure"] for row in own):
            of = [row for row in own if row["measure"] == measure]
            plot.scatter(
                [row["measured"] for row in of], [row["bound"] for row in of], s=12, label=_plain(measure)
            )
        plot.axline((1, 1), slope=1, color="grey", linestyle="--", linewidth=1)
        plot.set(xscale="log", yscale="log", xlabel="measured kappa", ylabel="bound")
        plot.legend(frameon=False, fontsize=7)


def _draw_jacobian(figure: Any, section: Section) -> None:
    rows = _rows(section)
    names = distinct(row["panel"] for row in rows)[:MOST_PANELS]
    lines = distinct(row["line"] for row in rows)
    for plot, name in zip(_panels(figure, names, 4.2, 3.2), names, strict=False):
        curves: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for row in rows:
            if row["panel"] == name:
                curves.setdefault((row["line"], row["run"], row["curve"]), []).append(row)
        seen: set[str] = set()
        for (line, *_), points in curves.items():
            label = None if line in seen else _plain(line)
            seen.add(line)
            values = [max(point["value"], 1e-8) for point in points]
            style = {"color": f"C{lines.index(line) % 10}", "linewidth": 1.2}
            plot.plot([point["share"] for point in points], values, label=label, **style)
        plot.set(yscale="log", xlabel="share of the singular values", ylabel="singular value / largest")
        plot.legend(frameon=False, fontsize=7)


def _draw_training(figure: Any, section: Section) -> None:
    rows = _rows(section)
    assert section.chart is not None
    assert section.chart.spec is not None
    panels = [panel["title"]["text"] for panel in section.chart.spec["vconcat"]]
    time: str = section.chart.spec["vconcat"][0]["encoding"]["x"]["field"]
    figure.set_size_inches(6.4, 1.5 * len(panels) + 0.6)
    plots = list(figure.subplots(len(panels), 1, squeeze=False, sharex=True).flat)
    groups = distinct(row["group"] for row in rows)
    curves: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        curves.setdefault((row["panel"], row["group"], row["run"], row["number"]), []).append(row)
    for (panel, group, _, number), points in curves.items():
        style = {"color": f"C{groups.index(group) % 10}", "linestyle": "--" if number == "test loss" else "-"}
        times, values = [point[time] for point in points], [point["value"] for point in points]
        marker = "o" if len(points) <= FEW else None
        plots[panels.index(panel)].plot(times, values, linewidth=1.1, marker=marker, markersize=2.5, **style)
    for plot, panel in zip(plots, panels, strict=True):
        plot.set_title(panel, fontsize=9, loc="left")
        if panel.startswith("kappa"):
            plot.set_yscale("log")
    plots[-1].set_xlabel(time)
    for place, group in enumerate(groups):
        plots[0].plot([], [], color=f"C{place % 10}", label=_plain(group))
    figure.legend(loc="outside upper center", frameon=False, fontsize=7, ncols=2)


def _draw_pictures(figure: Any, section: Section) -> None:
    pictures = (section.extra or {})["pictures"]
    wide = max(len(picture["steps"]) for picture in pictures)
    figure.set_size_inches(1.25 * wide, 1.5 * len(pictures))
    for line, picture in zip(figure.subplots(len(pictures), wide, squeeze=False), pictures, strict=True):
        for plot in line:
            plot.set_axis_off()
        for plot, step in zip(line, picture["steps"], strict=False):
            content = base64.b64decode(step["src"].partition(",")[2])
            plot.imshow(np.asarray(Image.open(io.BytesIO(content)).convert("RGB")), interpolation="nearest")
            plot.set_title(_plain(step["label"]).replace(", ", "\n"), fontsize=7)


_DRAWN: Mapping[str, Callable[[Any, Section], None]] = {
    "runs": _draw_runs,
    "conditioning": _draw_conditioning,
    "density": _draw_density,
    "bounds": _draw_bounds,
    "jacobian": _draw_jacobian,
    "training": _draw_training,
    "graying": _draw_pictures,
    "attention": _draw_pictures,
}
