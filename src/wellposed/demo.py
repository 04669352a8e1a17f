"""A small ViT on handwritten digits, with and without its skips and with each edit: what changes?

Real images that come with the package, so it runs offline. The variants are recipes of the trainer, one
process each beside the others; then each is diagnosed, and the numbers of this run become a table and a page.

An interrupted demo goes on when it is called again; a finished one is made anew.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from wellposed import __version__
from wellposed.environment import usable_cores
from wellposed.files import alone_in, read_object, write_json
from wellposed.train.recipe import Recipe
from wellposed.train.sweep import COMMAND, Run, failures, train_runs

if TYPE_CHECKING:
    from wellposed.probes.diagnose import What
    from wellposed.records import Record

MARK, RUNS, PAGE = "demo.json", "runs", "report.html"
PROBE_IMAGES = 64
WHAT: Sequence["What"] = ("conditioning", "density", "bounds")
PLAIN, NO_FFN, NO_ATTENTION = "all-skips", "no-ffn-skips", "no-attention-skips"

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
    "init": "xavier",
    "monitor_every": 42,
    "trackers": (),
    # On a GPU so small a model gains nothing, and the table would be that of another device.
    "device": "cpu",
}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    NO_FFN: {"edits": ["remove_skips which=ffn"]},
    NO_ATTENTION: {"edits": ["remove_skips which=attention"]},
    "grayed-spectral-0.7": {"edits": ["gray_tokens eps=0.7"]},
    "grayed-dct-0.95": {"edits": ["gray_tokens method=dct eps=0.95"]},
    "cb": {"edits": ["broadcast_context"]},
}


@dataclass(frozen=True)
class Row:
    """Of the table: medians over images and blocks, of the last weights.

    Args:
        name: of the variant and of the folder of its run.
        accuracy: on all test images, from 0 to 1.
        kappa_in: of the tokens that the first block gets.
        kappa_attention, kappa_ffn: of what the branches add, without their skips.
        entropy: of the attention rows.
    """

    name: str
    accuracy: float
    kappa_in: "Record"
    kappa_attention: "Record"
    kappa_ffn: "Record"
    entropy: "Record"

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
    epochs: int = 25,
    seed: int = 0,
    console: Console | None = None,
) -> Outcome:
    """Train and measure every variant, print the table, write the page.

    Args:
        out: gets ``report.html``, ``demo.json`` and the folder ``runs``.
        epochs: passes over the training images.
        seed: of the split, the weights and the order of the images.
        console: where to print.
    """
    out, console = Path(out), console or Console()
    own = {"epochs": epochs, "seed": seed}
    recipes = {name: Recipe(**{**COMMON, **edit, **own}) for name, edit in VARIANTS.items()}
    runs = [Run(name, name, recipe, out / RUNS / name) for name, recipe in recipes.items()]
    _make_room(out, {name: recipe.to_mapping() for name, recipe in recipes.items()})
    jobs = min(usable_cores() or 1, len(runs))
    children, code = train_runs(runs, out=out / RUNS, jobs=jobs, command=COMMAND, console=console)
    for text in failures(children):
        _say(console, text)
    if any(child.state in ("waiting", "interrupted") for child in children):
        _say(console, "stopped; the same command goes on where it was.")
        return Outcome([], code)
    folders = [child.run.folder for child in children if child.state == "finished"]
    if not folders:
        return Outcome([], code)
    rows = [measure(folder) for folder in track(folders, "measuring", console=console, transient=True)]
    console.print(as_table(rows, folders[0], epochs, seed))
    for sentence in findings(rows):
        _say(console, sentence)
    _write(out, folders, rows)
    where = (out / PAGE).resolve().as_uri()
    _say(console, f"\nwritten to {out}: {PAGE}, {MARK}, {RUNS}\nopen {out / PAGE} in a browser: {where}")
    return Outcome(rows, code)


def measure(folder: Path) -> Row:
    """Diagnose the last weights of a finished run; the diagnosis goes into its folder."""
    import wellposed
    from wellposed.diagnosing import trained_model

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
    return Row(
        name=folder.name,
        accuracy=_result(folder)["test"]["accuracy"],
        kappa_in=_median(diagnosis.select("kappa", block=0, position="input")),
        kappa_attention=_median(diagnosis.select("kappa", position="attention.branch")),
        kappa_ffn=_median(diagnosis.select("kappa", position="ffn.branch")),
        entropy=_median(diagnosis.select("entropy", head=None)),
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

    from wellposed.probes.summary import Sample, summarize

    values = torch.tensor([value for record in records for value in record.samples], dtype=torch.float64)
    flags = [index in record.at_least for record in records for index in range(len(record.samples))]
    return summarize(records[0].measure, Sample(values, torch.tensor(flags)))


def as_table(rows: Sequence[Row], folder: Path, epochs: int, seed: int) -> Table:
    """The table; how many images there were is read from one of the runs."""
    about = _result(folder)["about"]
    table = Table(
        title="A small ViT on handwritten digits, with and without its skips and with each edit",
        caption=(
            f"{about['train_images']:,} training and {about['test_images']} test images, {epochs} epochs, "
            f"one run each, seed {seed}. All start from Xavier's weights: without skips a ViT does not start "
            "to learn from timm's. kappa: condition number of the token matrix, median over "
            f"{PROBE_IMAGES} test images and all blocks, in float64, after training; 'into block 0' are the "
            "tokens that the first block gets, the others what a branch adds, without its skip. ≥: float32 "
            "cannot tell more. entropy: of the attention rows, 1 is uniform."
        ),
        caption_justify="left",
    )
    table.add_column("model", no_wrap=True)
    for title in ("accuracy", "kappa into\nblock 0", "kappa of\nattention", "kappa\nof FFN", "entropy"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(row.name, f"{row.accuracy:.1%}", *(record.text() for record in row.measured))
    return table


def findings(rows: Sequence[Row]) -> list[str]:
    """What removing either kind of skip did, in sentences, also where it is not what the paper saw."""
    by_name = {row.name: row for row in rows}
    if not by_name.keys() >= {PLAIN, NO_FFN, NO_ATTENTION}:
        return []
    plain, no_ffn, no_attention = (by_name[name] for name in (PLAIN, NO_FFN, NO_ATTENTION))
    as_in_paper = no_attention.accuracy < no_ffn.accuracy
    return [
        _change("Without the FFN's skips", plain, no_ffn),
        _change("Without attention's skips", plain, no_attention),
        "The paper lost 2 points without the FFN's skips and 22 without attention's (ViT-Tiny, CIFAR-10); "
        f"in accuracy this run {'shows' if as_in_paper else 'does not show'} that order. It is one short run "
        "on digits: --seed N makes another.",
    ]


def _change(title: str, plain: Row, edited: Row) -> str:
    points = 100 * (edited.accuracy - plain.accuracy)
    return (
        f"{title}: accuracy {points:+.1f} points, kappa of what attention adds "
        f"{plain.kappa_attention.text()} -> {edited.kappa_attention.text()}, entropy "
        f"{plain.entropy.text()} -> {edited.entropy.text()}."
    )


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
    told = {
        name: {"median": record.value, "status": record.status}
        for name, record in zip(names, row.measured, strict=True)
    }
    return {"name": row.name, "accuracy": row.accuracy, **told}


def _result(folder: Path) -> dict[str, Any]:
    return read_object(folder / "result.json")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
