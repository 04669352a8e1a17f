"""``wellposed bench graying``: what graying costs, in a training step and alone.

Without a GPU the sizes are small, so that there is an answer within a minute.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from wellposed.bench import files, steps
from wellposed.bench.crossover import crossovers
from wellposed.bench.floors import peaks_of
from wellposed.bench.growth import AXES, GrowthRow, Measured, Point, grow, points
from wellposed.bench.operations import METHODS, operation, spectral_code
from wellposed.bench.peers import run_peers
from wellposed.bench.picture import draw_growth
from wellposed.bench.step_floors import step_floors
from wellposed.bench.tables import growth_notes, growth_tables, steps_table, wide
from wellposed.bench.timing import device_name, message
from wellposed.train.recipe import Recipe

PARTS = ("steps", "growth", "peers")
"""The last on a CPU only."""


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


def usual_device(name: str | None) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


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
        files.write_environment(out, files.STEPS, about)
    rows: list[steps.StepRow] = []
    measured = steps.measure_steps(
        recipe, edits, device, rounds=plan.rounds, updates=plan.updates, tell=_teller(console)
    )
    for results in measured:
        rows = steps.step_rows(results, floors)
        if out is not None:
            files.write_rows(rows, out, files.STEPS)
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
        files.write_environment(out, files.GROWTH, about)
    tell, peaks = _teller(console), peaks_of(device_name(device))
    rows: list[GrowthRow] = []
    known: dict[tuple[str, Point], Measured] = {}
    for axis in AXES:
        sizes = points(axis, plan.tokens, plan.channels, plan.batches)
        for each in operations:
            tell(f"{each.name} over {axis} {', '.join(str(point.size) for point in sizes)}")
            rows += grow(each, sizes, device, limit=plan.limit, peaks=peaks, seed=plan.seed, known=known)
            if out is not None:
                files.write_rows(rows, out, files.GROWTH)
    show_growth(rows, about, console)
    if out is not None:
        try:
            draw_growth(rows, out / files.PICTURE, about["device"])
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
    step_rows, growth_rows = files.read_steps(folder), files.read_growth(folder)
    if not step_rows and not growth_rows:
        raise ValueError(
            f"expected {files.STEPS}.csv or {files.GROWTH}.csv in {folder}, found neither; "
            "wellposed bench graying --out DIR writes them."
        )
    if step_rows:
        show_steps(step_rows, files.read_about(folder, files.STEPS), console)
    if growth_rows:
        about = files.read_about(folder, files.GROWTH)
        show_growth(growth_rows, about, console)
        draw_growth(growth_rows, folder / files.PICTURE, about.get("device", ""))
        console.print(f"drawn: {folder / files.PICTURE}", markup=False, highlight=False)


def run(
    what: Sequence[str] = PARTS,
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
    if "peers" in what and on.type == "cpu":
        run_peers(out, console)
    if "steps" in what:
        run_steps(usual_steps(on, steps_options or {}), on, out, console)
    if out is not None:
        console.print(f"written to {out}", markup=False, highlight=False)


def _teller(console: Console) -> Any:
    return lambda text: console.print(text, style="dim", markup=False, highlight=False)
