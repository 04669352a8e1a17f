"""The table at the end of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from wellposed.records import named_text, short
from wellposed.text import aligned
from wellposed.train.recipe import Recipe
from wellposed.train.report.status import duration, percent, rate

FILES = {
    "best": "weights of the best test, with a card",
    "last": "weights at the end",
    "checkpoints": "to resume from",
    "tensorboard": "for tensorboard --logdir",
    "run.jsonl": "all numbers",
    "result.json": "the numbers of this table",
}


class EndTable:
    """Rows of a name and a value; prints as plain text, and in a rich console as a table."""

    def __init__(self, rows: Sequence[tuple[str, str]]) -> None:
        self.rows = tuple(rows)

    def __str__(self) -> str:
        # A value of several lines, such as the table of edits, stays under its own column.
        split = [
            (name if index == 0 else "", line)
            for name, value in self.rows
            for index, line in enumerate(value.splitlines() or [""])
        ]
        return aligned(split) if split else ""

    def __rich__(self) -> Table:
        table = Table(show_header=False, box=None, pad_edge=False)
        for name, value in self.rows:
            table.add_row(Text(name, style="bold"), Text(value))
        return table


def end_table(recipe: Recipe, summary: Mapping[str, Any], about: Mapping[str, Any], folder: Path) -> EndTable:
    """All of a run on one screen.

    Args:
        recipe: of the run.
        summary: of :func:`wellposed.train.report.summary.summarise`.
        about: what only the trainer knows, shown as it is; a number is shown with separators.
        folder: of the run; the files that are there are named.
    """
    rows = [("model", recipe.model), ("data", recipe.data), ("epochs", _epochs(recipe, summary))]
    rows[2:2] = [(name.replace("_", " "), _shown(value)) for name, value in about.items()]
    rows += _results(summary)
    if summary["images_per_second"] is not None:
        rows.append(("images/s", f"{rate(summary['images_per_second'])} (median)"))
    rows.append(("time", duration(summary["seconds"])))
    rows += [
        (f"kappa {position}", f"{_change(values)} (worst block)")
        for position, values in summary["kappa"].items()
    ]
    if summary["entropy"] is not None:
        first, last = (f"{summary['entropy'][when]:.4f}" for when in ("first", "last"))
        rows.append(("attention entropy", f"{first} -> {last} (mean, 1 is uniform)"))
    if summary["starts"] > 1:
        rows.append(("started", f"{summary['starts']} times"))
    for name, word in (("nonfinite", "non-finite"), ("rollbacks", "rollbacks")):
        if summary[name]:
            rows.append((word, str(summary[name])))
    if summary["collapsed"]:
        rows.append(("collapsed", "ended early, see collapse_patience"))
    present = [name for name in FILES if (folder / name).exists()]
    named = aligned([(name, FILES[name]) for name in present]) if present else ""
    rows.append(("files", f"{folder}\n{named}".rstrip()))
    return EndTable(rows)


def _epochs(recipe: Recipe, summary: Mapping[str, Any]) -> str:
    updates = f"{summary['updates']:,} updates"
    is_whole = summary["finished"] and not summary["collapsed"]
    return f"{recipe.epochs} ({updates})" if is_whole else f"of {recipe.epochs}: {updates}"


def _results(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Tests and losses; a task without labels has no accuracy."""
    rows = []
    best, test, train = summary["best"], summary["test"], summary["train"]
    for name, line in (("best", best), ("last", test)):
        if line is None:
            continue
        told = [f"loss {short(line['loss'])}"] if line.get("loss") is not None else []
        if line.get("accuracy") is not None:
            told.insert(0, percent(line["accuracy"]))
        if line.get("ema_accuracy") is not None:
            told.insert(1, f"EMA {percent(line['ema_accuracy'])}")
        rows.append((f"{name} test", f"{', '.join(told)} (epoch {line['epoch']})"))
    if train is not None and train.get("loss") is not None:
        rows.append(("last training loss", short(train["loss"])))
    return rows


def _change(values: Mapping[str, float]) -> str:
    first, last = (named_text(values, when) for when in ("first", "last"))
    return f"{first} -> {last}"


def _shown(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else short(value)
