"""A small ViT on handwritten digits, with and without its skips and with each edit: what changes?

Real images that come with the package, so it runs offline. The variants are recipes of the trainer, each
with several seeds, one process a run; then each is diagnosed, and the numbers of these runs become two
tables, some sentences and a page.

An interrupted demo resumes when it is called again; a finished one starts over.
"""

import json
import math
import shutil
import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table

from wellposed import __version__
from wellposed.environment import usable_cores
from wellposed.files import alone_in, read_object, write_json
from wellposed.train.recipe import Recipe
from wellposed.train.sweep import COMMAND, Run, failures, train_runs

if TYPE_CHECKING:
    from wellposed.probes import Diagnosis
    from wellposed.probes.diagnose import What
    from wellposed.records import Record

MARK, RUNS, PAGE = "demo.json", "runs", "report.html"
EPOCHS, SEEDS = 12, 3
PROBE_IMAGES = 32
WHAT: Sequence["What"] = ("conditioning", "density")
PLAIN, NO_FFN, NO_ATTENTION = "all-skips", "no-ffn-skips", "no-attention-skips"
GRAYED, CB = "grayed-0.7", "cb"
EPS = 0.7

DIGITS: Mapping[str, Any] = {
    "model": "vit_tiny_patch16_224",
    # The digits have 16 patches; a wide model has nothing to learn from them.
    "model_options": {"embed_dim": 48, "depth": 6, "num_heads": 3},
    "epochs": 30,
    "batch_size": 64,
    "lr": 1e-3,
    "mixup": 0.0,
    "eval_every": 2,
}
"""A ViT for the digits that a laptop trains in half a minute; the studies have it too."""
COMMON: Mapping[str, Any] = {
    **DIGITS,
    "data": "digits",
    "lr": 1.5e-3,
    "init": "xavier",
    "eval_every": 4,
    "monitor_every": 0,
    "trackers": (),
    # On a GPU so small a model gains nothing, and the table would be that of another device.
    "device": "cpu",
}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    NO_FFN: {"edits": ["remove_skips which=ffn"]},
    NO_ATTENTION: {"edits": ["remove_skips which=attention"]},
    # All tokens that the first block reads, so that what it does to them is seen there.
    GRAYED: {"edits": [f"gray_tokens eps={EPS} where=blocks blocks=0"]},
    CB: {"edits": ["broadcast_context"]},
}


@dataclass(frozen=True)
class Row:
    """Of the table: medians over images and blocks, of the last weights of all seeds.

    Args:
        name: of the variant.
        accuracy: of each seed, on all test images, from 0 to 1.
        kappa_in: of the tokens that the first block reads.
        kappa_attention, kappa_ffn: of the outputs of the branches, without their skips.
        entropy: of the attention rows.
        leaving: kappa of the tokens that leave each block, in their order.
    """

    name: str
    accuracy: Mapping[int, float]
    kappa_in: "Record"
    kappa_attention: "Record"
    kappa_ffn: "Record"
    entropy: "Record"
    leaving: tuple["Record", ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracy.values())

    @property
    def measured(self) -> tuple["Record", ...]:
        return (self.kappa_in, self.kappa_attention, self.kappa_ffn, self.entropy)


@dataclass(frozen=True)
class Outcome:
    """The rows of the table, and the exit code of the command."""

    rows: list[Row]
    exit_code: int


def run(
    out: str | Path = "demo",
    *,
    epochs: int = EPOCHS,
    seed: int = 0,
    seeds: int = SEEDS,
    console: Console | None = None,
) -> Outcome:
    """Train and measure every variant, print the tables, write the page.

    Args:
        out: gets ``report.html``, ``demo.json`` and the folder ``runs``.
        epochs: passes over the training images.
        seed: the first one, of the split, the weights and the order of the images.
        seeds: how many runs each variant has.
        console: where to print.
    """
    out, console = Path(out), console or Console()
    recipes = {
        f"{name}-{each}": Recipe(**{**COMMON, **edit, "epochs": epochs, "seed": each})
        for each in range(seed, seed + seeds)
        for name, edit in VARIANTS.items()
    }
    runs = [Run(name, name.rpartition("-")[0], recipe, out / RUNS / name) for name, recipe in recipes.items()]
    _make_room(out, {name: recipe.to_mapping() for name, recipe in recipes.items()})
    jobs = min(usable_cores() or 1, len(runs))
    children, code = train_runs(runs, out=out / RUNS, jobs=jobs, command=COMMAND, console=console)
    for text in failures(children):
        _say(console, text)
    if any(child.state in ("waiting", "interrupted") for child in children):
        _say(console, "stopped; the same command resumes.")
        return Outcome([], code)
    finished = [child.run for child in children if child.state == "finished"]
    if not finished:
        return Outcome([], code)
    diagnoses = {each.name: diagnosis for each, diagnosis in _diagnosed(finished, console)}
    rows = [
        row_of(name, {each.recipe.seed: (each.folder, diagnoses[each.name]) for each in own})
        for name in VARIANTS
        if (own := [each for each in finished if each.group == name])
    ]
    console.print(as_table(rows, finished[0].folder, epochs))
    console.print(leaving_table(rows))
    if (differences := differences_table(rows)) is not None:
        console.print(differences)
    _write(out, [each.folder for each in finished], rows)
    where = (out / PAGE).resolve().as_uri()
    _say(console, f"\nwritten to {out}: {PAGE}, {MARK}, {RUNS}\nopen {out / PAGE} in a browser: {where}")
    for sentence in closing(rows):
        _say(console, f"\n{sentence}")
    return Outcome(rows, code)


def _diagnosed(runs: Sequence[Run], console: Console) -> Iterator[tuple[Run, "Diagnosis"]]:
    # The spinner and the clock move while one run is measured.
    columns = (SpinnerColumn(), *Progress.get_default_columns()[:3], TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for each in progress.track(runs, description="measuring"):
            yield each, diagnosed(each.folder)


def diagnosed(folder: Path) -> "Diagnosis":
    """Measure the last weights of a finished run; the diagnosis goes into its folder."""
    import wellposed
    from wellposed.targets import trained_model

    target = trained_model(str(folder), None, weights="last", count=PROBE_IMAGES, device="cpu")
    images = len(target.images)
    with _one_thread():
        diagnosis = wellposed.diagnose(
            target.model,
            target.images,
            what=WHAT,
            attention_images=images,
            batch_size=images,
            progress=False,
        )
    diagnosis.about.update(target.about)
    diagnosis.notes.extend(target.notes)
    diagnosis.to_json(folder / "diagnosis.json")
    return diagnosis


def row_of(name: str, runs: Mapping[int, tuple[Path, "Diagnosis"]]) -> Row:
    """One variant, of its folders and diagnoses by their seeds."""
    diagnoses = [diagnosis for _, diagnosis in runs.values()]

    def median(measure: str, **where: Any) -> "Record":
        return _median([record for each in diagnoses for record in each.select(measure, **where)])

    depth = 1 + max(record.block or 0 for record in diagnoses[0].select("kappa", position="ffn.sum"))
    return Row(
        name=name,
        accuracy={seed: _result(folder)["test"]["accuracy"] for seed, (folder, _) in runs.items()},
        kappa_in=median("kappa", block=0, position="input"),
        kappa_attention=median("kappa", position="attention.branch"),
        kappa_ffn=median("kappa", position="ffn.branch"),
        entropy=median("entropy", head=None),
        leaving=tuple(median("kappa", block=block, position="ffn.sum") for block in range(depth)),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from more, and wait for each other on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _median(records: Sequence["Record"]) -> "Record":
    """Over the images of all the records."""
    import torch

    from wellposed.probes.passes import Sample, summarize

    values = torch.tensor([value for record in records for value in record.samples], dtype=torch.float64)
    flags = [index in record.at_least for record in records for index in range(len(record.samples))]
    return summarize(records[0].measure, Sample(values, torch.tensor(flags)))


def as_table(rows: Sequence[Row], folder: Path, epochs: int) -> Table:
    """The table; how many images there were is read from one of the runs."""
    about = _result(folder)["about"]
    n = max(len(row.accuracy) for row in rows)
    table = _table(
        "A small ViT on handwritten digits: its skips, and each edit",
        "model",
        *("accuracy", "kappa into\nblock 0", "kappa of\nattention", "kappa\nof FFN", "entropy"),
        caption=(
            f"{about['train_images']:,} training and {about['test_images']} test images, {epochs} epochs, "
            f"Xavier's initialisation; {'one run' if n == 1 else f'means of {n} runs'} each. kappa is the "
            "condition number of the tokens after training, the median over images, blocks and runs; 1 is "
            "best. For attention and the FFN it is that of their output, before the skip adds to it. ≥ is "
            "a lower bound: float32 resolves no more. Entropy is that of attention, 1 is uniform."
        ),
    )
    for row in rows:
        table.add_row(row.name, f"{row.mean:.1%}", *(record.text() for record in row.measured))
    return table


def _table(title: str, first: str, *numbers: str, caption: str) -> Table:
    """An empty one: a column of names, then columns of numbers."""
    table = Table(title=title, caption=caption, caption_justify="left")
    table.add_column(first, no_wrap=True)
    for each in numbers:
        table.add_column(each, justify="right")
    return table


def leaving_table(rows: Sequence[Row]) -> Table:
    """What the blocks do to the tokens one after the other, as powers of ten."""
    blocks = map(str, range(max(len(row.leaving) for row in rows)))
    title = "log10 of kappa of the tokens that leave each block"
    table = _table(title, "block", *blocks, caption="Each step of 1 is ten times worse.")
    for row in rows:
        table.add_row(row.name, *map(_power, row.leaving))
    return table


def _power(record: "Record") -> str:
    if not record.value:
        return "-"
    return f"{'≥' if record.status == 'at least' else ''}{math.log10(record.value):.1f}"


def differences_table(rows: Sequence[Row]) -> Table | None:
    """Accuracy of each variant against the plain model, seed by seed; None without that."""
    from wellposed.stats import paired

    plain = next((row for row in rows if row.name == PLAIN), None)
    if plain is None or len(rows) < 2:
        return None
    title, caption = f"Accuracy compared with {PLAIN}, in points", "Differences are taken seed by seed."
    table = _table(title, "model", "difference", "95% interval", caption=caption)
    table.add_column("so accuracy is")
    for row in rows:
        found = paired(_percent(row), _percent(plain)) if row is not plain else None
        if found is not None:
            interval, why = f"{found.low:+.1f} to {found.high:+.1f}", ": zero is inside"
            if found.p is None:
                interval, why = "-", ": one run" if found.n == 1 else ": no spread"
            verdict = found.direction + ("" if found.is_decided else why)
            table.add_row(row.name, f"{found.mean:+.1f}", interval, verdict)
    return table


def _percent(row: Row) -> dict[Hashable, float]:
    return {seed: 100 * accuracy for seed, accuracy in row.accuracy.items()}


def closing(rows: Sequence[Row]) -> list[str]:
    """What was seen, and what to do next, in two sentences."""
    by_name = {row.name: row for row in rows}
    if not by_name.keys() >= {PLAIN, NO_FFN, NO_ATTENTION}:
        return []
    plain, no_ffn, no_attention = (by_name[name].leaving[-1] for name in (PLAIN, NO_FFN, NO_ATTENTION))
    least = max(plain.value or 0, no_ffn.value or 0)
    # Of two lower bounds neither is known to be the larger.
    is_worst = (no_attention.value or 0) > least and no_ffn.status != "at least"
    seen = (
        "attention's skips hold the conditioning; without them the tokens leave the last block with kappa "
        f"{no_attention.text()} instead of {plain.text()}."
        if is_worst
        else "these runs do not show that attention's skips hold the conditioning; the tokens leave the last "
        f"block with kappa {no_attention.text()} without them, and with {no_ffn.text()} without the FFN's."
    )
    return [
        f"Seen: {seen}",
        "Next: measure your own model with wellposed diagnose MODEL --images DIR, and look up what you see "
        "in docs/fix-my-model.md.",
    ]


def _make_room(out: Path, recipes: Mapping[str, Any]) -> None:
    """Keep the runs of an interrupted demo of these recipes; delete those of any other demo."""
    strangers = [] if not out.exists() else [path.name for path in out.iterdir()]
    if strangers and not (out / MARK).is_file():
        raise ValueError(
            f"expected a new folder or that of a demo, {out} holds {sorted(strangers)[0]!r} and no {MARK}; "
            "take another --out."
        )
    asked = json.loads(json.dumps({"version": __version__, "recipes": recipes}))
    (out / RUNS).mkdir(parents=True, exist_ok=True)
    with alone_in(out / RUNS):
        before = read_object(out / MARK) if strangers else {}
        if before.get("finished") is False and {name: before.get(name) for name in asked} == asked:
            return
        (out / PAGE).unlink(missing_ok=True)
        for path in (out / RUNS).iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix == ".toml":
                path.unlink()
        write_json(out / MARK, {"finished": False, **asked})


def _write(out: Path, folders: Sequence[Path], rows: Sequence[Row]) -> None:
    from wellposed.report import read_material, report_page
    from wellposed.report.page import write

    write(report_page(read_material(folders), title="wellposed demo"), out / PAGE)
    mark = read_object(out / MARK)
    write_json(out / MARK, mark | {"finished": True, "table": [_plain(row) for row in rows]})


def _plain(row: Row) -> dict[str, Any]:
    names = ("kappa_in", "kappa_attention", "kappa_ffn", "entropy")
    medians = {
        name: {"median": record.value, "status": record.status}
        for name, record in zip(names, row.measured, strict=True)
    }
    by_seed = {str(seed): accuracy for seed, accuracy in row.accuracy.items()}
    leaving = [{"median": each.value, "status": each.status} for each in row.leaving]
    return {"name": row.name, "accuracy": row.mean, "by_seed": by_seed, **medians, "leaving": leaving}


def _result(folder: Path) -> dict[str, Any]:
    return read_object(folder / "result.json")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
