"""What graying costs, in a training step and alone.

    python -m benchmarks graying [--what steps,growth,peers] [--out DIR] [--from DIR]

Without a GPU the sizes are small, so that there is an answer within a minute. The tables go to CSV files with
their environment beside them, and ``--from`` shows and draws them again.
"""

import csv
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import graying_steps as steps
from benchmarks.floors import peaks_of
from benchmarks.graying_growth import (
    AXES,
    METHODS,
    PASSES,
    GrowthRow,
    Measured,
    Point,
    crossovers,
    grow,
    operation,
    points,
    spectral_code,
)
from benchmarks.graying_peers import run_peers
from benchmarks.graying_steps import StepRow, step_floors
from benchmarks.timing import device_name, message, usual_device, write_environment
from wellposed.commands.app import device_named, plain_errors
from wellposed.commands.options import numbers, parts
from wellposed.files import read_object, write_cells
from wellposed.records import short
from wellposed.train.recipe import Recipe

PARTS = ("steps", "growth", "peers")
USUAL_PARTS = PARTS[:2]
"""Peers are for a CPU, and take minutes."""


@dataclass(frozen=True)
class StepsPlan:
    """What is timed in a training step."""

    model: str = "vit_base_patch16_224"
    image_size: int = 224
    batch_size: int = 256
    precision: str = "bf16"
    compile: bool = True
    edits: Sequence[str] = field(default=steps.USUAL)
    rounds: int = 5
    updates: int = 10
    seed: int = 0


@dataclass(frozen=True)
class GrowthPlan:
    """What is timed alone, in which sizes; ``limit`` is the most seconds of one call."""

    methods: Sequence[str] = METHODS
    tokens: Sequence[int] = (64, 196, 256, 576, 1024, 2048, 4096)
    channels: Sequence[int] = (192, 384, 768, 1024, 1280)
    batches: Sequence[int] = (1, 8, 32, 128, 256)
    limit: float = 2.0
    seed: int = 0


def usual_steps(device: torch.device, given: dict[str, Any]) -> StepsPlan:
    """The plan for a device; of ``given`` what is not None goes over it."""
    small: dict[str, Any] = {
        "model": "vit_tiny_patch16_224",
        "batch_size": 4,
        "precision": "fp32",
        "compile": False,
        "rounds": 3,
        "updates": 2,
    }
    return StepsPlan(**(({} if device.type == "cuda" else small) | _told(given)))


def usual_growth(device: torch.device, given: dict[str, Any]) -> GrowthPlan:
    """The plan for a device; of ``given`` what is not None goes over it."""
    small: dict[str, Any] = {
        "methods": tuple(name for name in METHODS if name != "svd-gesvda"),
        "tokens": (64, 196, 256, 576),
        "channels": (192, 384, 768),
        "batches": (1, 4, 8),
        "limit": 0.5,
    }
    return GrowthPlan(**(({} if device.type == "cuda" else small) | _told(given)))


def _told(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def run_steps(
    plan: StepsPlan, device: torch.device, out: Path | None, console: Console
) -> list[steps.StepRow]:
    """Time the steps, print the table; with ``out`` the file is written anew after every round."""
    recipe = Recipe(
        model=plan.model,
        image_size=plan.image_size,
        batch_size=plan.batch_size,
        precision=plan.precision,  # type: ignore[arg-type]
        compile=plan.compile,
        seed=plan.seed,
    )
    about = _about(plan, device)
    edits = steps.checked_edits(plan.edits)
    floors = _floors(recipe, edits, device, console)
    if out is not None:
        write_environment(out, STEPS, about)
    rows: list[steps.StepRow] = []
    measured = steps.measure_steps(
        recipe, edits, device, rounds=plan.rounds, updates=plan.updates, tell=_teller(console)
    )
    for results in measured:
        rows = steps.step_rows(results, floors)
        if out is not None:
            write_rows(rows, out, STEPS)
    show_steps(rows, about, console)
    return rows


def _about(plan: StepsPlan | GrowthPlan, device: torch.device) -> dict[str, Any]:
    return {**asdict(plan), "device": device_name(device), "spectral_is": spectral_code(device)}


def _floors(recipe: Recipe, edits: list[str], device: torch.device, console: Console) -> dict[str, float]:
    peaks = peaks_of(device_name(device))
    if peaks is None:
        return {}
    try:
        return step_floors(recipe, edits, peaks)
    except Exception as error:  # a model whose floors are not known can still be timed
        _teller(console)(f"no floors: {message(error)}")
        return {}


def run_growth(plan: GrowthPlan, device: torch.device, out: Path | None, console: Console) -> list[GrowthRow]:
    """Time the methods alone, print the tables; with ``out`` the file is written anew after every method."""
    about = _about(plan, device)
    operations = [operation(name) for name in plan.methods]
    if out is not None:
        write_environment(out, GROWTH, about)
    tell, peaks = _teller(console), peaks_of(device_name(device))
    rows: list[GrowthRow] = []
    known: dict[tuple[str, Point], Measured] = {}
    for axis in AXES:
        sizes = points(axis, plan.tokens, plan.channels, plan.batches)
        for each in operations:
            tell(f"{each.name} over {axis} {', '.join(str(point.size) for point in sizes)}")
            rows += grow(each, sizes, device, limit=plan.limit, peaks=peaks, seed=plan.seed, known=known)
            if out is not None:
                write_rows(rows, out, GROWTH)
    show_growth(rows, about, console)
    if out is not None:
        try:
            draw_growth(rows, out / PICTURE, about["device"])
        except (ImportError, ValueError) as error:
            tell(f"no picture: {error}")
    return rows


def show_steps(rows: Sequence[steps.StepRow], about: dict[str, Any], console: Console) -> None:
    console.print(steps_table(rows, about))
    _say_code(about, console)


def _say_code(about: dict[str, Any], console: Console) -> None:
    if "spectral_is" in about:
        console.print(f"spectral is {about['spectral_is']}", markup=False, highlight=False)


def show_growth(rows: Sequence[GrowthRow], about: dict[str, Any], console: Console) -> None:
    for table in growth_tables(rows, about):
        console.print(table)
    _say_code(about, console)
    for line in [*growth_notes(rows), *map(str, crossovers(rows))]:
        console.print(line, markup=False, highlight=False)


def show_saved(folder: Path, console: Console | None = None) -> None:
    """Print the tables of an earlier run again, and draw its picture."""
    console = wide(console or Console())
    step_rows, growth_rows = read_steps(folder), read_growth(folder)
    if not step_rows and not growth_rows:
        raise ValueError(
            f"expected {STEPS}.csv or {GROWTH}.csv in {folder}, found neither; "
            "python -m benchmarks graying --out DIR writes them."
        )
    if step_rows:
        show_steps(step_rows, read_about(folder, STEPS), console)
    if growth_rows:
        about = read_about(folder, GROWTH)
        show_growth(growth_rows, about, console)
        draw_growth(growth_rows, folder / PICTURE, about.get("device", ""))
        console.print(f"drawn: {folder / PICTURE}", markup=False, highlight=False)


def run(
    what: Sequence[str] = USUAL_PARTS,
    *,
    device: str | None = None,
    steps_options: dict[str, Any] | None = None,
    growth_options: dict[str, Any] | None = None,
    out: Path | None = None,
    console: Console | None = None,
) -> None:
    """Run the parts named and print their tables.

    Args:
        what: some of :data:`PARTS`.
        device: None is a GPU if there is one.
        steps_options, growth_options: fields of :class:`StepsPlan` and :class:`GrowthPlan`; None in them is
            what is usual for the device.
        out: folder for the files.
    """
    for name in what:
        if name not in PARTS:
            raise ValueError(f"what must be some of {', '.join(PARTS)}, got {name!r}.")
    console, on = wide(console or Console()), usual_device(device)
    # Growth first: it needs no compiler, and the models of the steps would stand in its memory.
    if "growth" in what:
        run_growth(usual_growth(on, growth_options or {}), on, out, console)
    if "peers" in what:
        if on.type != "cpu":
            raise ValueError(f"peers are measured on a CPU, got {on}; add --device cpu.")
        run_peers(out, console)
    if "steps" in what:
        run_steps(usual_steps(on, steps_options or {}), on, out, console)
    if out is not None:
        console.print(f"written to {out}", markup=False, highlight=False)


def _teller(console: Console) -> Any:
    return lambda text: console.print(text, style="dim", markup=False, highlight=False)


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


STEPS, GROWTH, PICTURE = "graying-steps", "graying-growth", "graying-growth.png"


def write_rows(rows: Sequence[StepRow] | Sequence[GrowthRow], folder: Path, name: str) -> Path:
    """Write ``name``.csv, one line a row; the file is replaced whole, so that it can always be read."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    kind = GrowthRow if name == GROWTH else StepRow
    columns = [field.name for field in dataclasses.fields(kind)]
    cells = ([_text(getattr(row, column)) for column in columns] for row in rows)
    write_cells(path, [columns, *cells], lineterminator="\n")
    return path


def read_steps(folder: Path) -> list[StepRow]:
    return [StepRow(**values) for values in _read(folder / f"{STEPS}.csv", StepRow)]


def read_growth(folder: Path) -> list[GrowthRow]:
    return [GrowthRow(**values) for values in _read(folder / f"{GROWTH}.csv", GrowthRow)]


def read_about(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    about = read_object(path).get("about", {}) if path.is_file() else {}
    return dict(about)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _read(path: Path, kind: type) -> list[dict[str, Any]]:
    """The rows of a file; none where there is no file."""
    if not path.is_file():
        return []
    types = {name: _type(hint) for name, hint in get_type_hints(kind).items()}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        unknown = sorted(set(reader.fieldnames or ()) - types.keys())
        if unknown:
            raise ValueError(
                f"{path} has the unknown columns {', '.join(unknown)}; another release wrote it."
            )
        return [
            {name: types[name](text) if text or types[name] is str else None for name, text in row.items()}
            for row in reader
        ]


def _type(hint: Any) -> type:
    """The type of a column: of ``float | None`` it is float."""
    return next((kind for kind in get_args(hint) if kind is not type(None)), hint)  # type: ignore[no-any-return]


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
            _draw_axis(grid[line][column], [row for row in here if row.microseconds is not None], axis)
            grid[line][column].set_title(passes, fontsize=10)
        grid[line][0].set_ylabel("microseconds an image")
    grid[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"Cost of graying{f', {device}' if device else ''}; dotted: least possible", fontsize=11)
    figure.savefig(path, dpi=120)


def _draw_axis(plot: Any, rows: Sequence[GrowthRow], axis: str) -> None:
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
            "python -m benchmarks graying --from DIR draws it from the tables."
        ) from error
    return Figure, FigureCanvasAgg


_BY_DEVICE = r"\[default: on a GPU "
"""Elsewhere the benchmark takes what is done in a minute."""


def main(
    what: Annotated[
        list[str] | None,
        typer.Option(
            help="steps: what edits add to a training step; growth: graying alone; peers: other ways to gray "
            r"on a CPU, in turns. \[default: steps, growth]"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=rf"Of timm, for steps. {_BY_DEVICE}vit_base_patch16_224]")
    ] = None,
    image_size: Annotated[int | None, typer.Option(min=1, help=r"\[default: 224]")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help=rf"Of a step. {_BY_DEVICE}256]")] = None,
    precision: Annotated[str | None, typer.Option(help=rf"fp32 or bf16. {_BY_DEVICE}bf16]")] = None,
    compile: Annotated[bool | None, typer.Option(help=r"Compile the steps. \[default: on a GPU]")] = None,
    edits: Annotated[
        list[str] | None,
        typer.Option(
            help="Some, with commas, of spectral-pixels, spectral-embedding, dct-pixels, dct-embedding, cb, "
            r"cb_s, svd-pixels, svd-embedding. \[default: all but svd]"
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help=rf"In which all steps take turns. {_BY_DEVICE}5]")
    ] = None,
    updates: Annotated[int | None, typer.Option(min=1, help=rf"In one round. {_BY_DEVICE}10]")] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Some of spectral, dct, svd-gesvda, eigh, svd for growth; NAME-compiled through "
            r"torch.compile. \[default: all]"
        ),
    ] = None,
    tokens: Annotated[
        list[str] | None, typer.Option(help=rf"Sizes for growth, at 768 channels. {_BY_DEVICE}64,...,4096]")
    ] = None,
    channels: Annotated[
        list[str] | None, typer.Option(help=rf"Sizes for growth, at 196 tokens. {_BY_DEVICE}192,...,1280]")
    ] = None,
    batches: Annotated[
        list[str] | None, typer.Option(help=rf"Sizes for growth, at 196 x 768. {_BY_DEVICE}1,...,256]")
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(help=rf"Seconds of a call after which larger sizes are skipped. {_BY_DEVICE}2]"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help=r"cpu, cuda, ... \[default: a GPU if there is one]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and tokens.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for graying-steps.csv, graying-growth.csv, .json, .png.")
    ] = None,
    saved: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Measure nothing; show and draw what --out wrote there."),
    ] = None,
) -> None:
    """What graying and broadcasting cost: in a training step, and how it grows with the size.

    Without a GPU the sizes are small, for an answer within a minute.
    """
    with plain_errors():
        if saved is not None:
            show_saved(saved)
            return
        steps: dict[str, Any] = {
            "model": model,
            "image_size": image_size,
            "batch_size": batch_size,
            "precision": precision,
        }
        steps |= {"compile": compile, "edits": parts(edits), "rounds": rounds, "updates": updates}
        sizes = {"tokens": _sizes(tokens), "channels": _sizes(channels), "batches": _sizes(batches)}
        growth = {"methods": parts(methods), "limit": limit, **sizes}
        run(
            parts(what) or USUAL_PARTS,
            device=None if device is None else device_named(device),
            steps_options={**steps, "seed": seed},
            growth_options={**growth, "seed": seed},
            out=out,
        )


def _sizes(given: list[str] | None) -> list[int] | None:
    found = numbers(given, "sizes")
    if found is not None and min(found) < 1:
        raise ValueError(f"sizes must be positive, got {min(found)}; 64,196,576 are examples.")
    return found
