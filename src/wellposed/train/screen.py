"""What people see of a run: a bar in a terminal, plain lines in a log file, and a table at its end.

Nothing here may stop a training run: output that cannot be written any more, because the terminal was closed
or the pipe's reader is gone, is dropped.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from wellposed.records import named_text, short
from wellposed.text import aligned
from wellposed.train.recipe import Recipe

REFRESH_SECONDS = 0.25
"""Of the bar."""

LINE_SECONDS = 15.0
"""A log file gets a line after so many seconds, or a tenth of the run."""


Status = Callable[[], Sequence[str]]
"""Gives the parts of a line of text, the most wanted first; called only when it is shown."""


class Bar:
    """A progress bar at the bottom of a terminal."""

    interval = REFRESH_SECONDS  # after which it is worth calling ``show`` again

    def __init__(self, console: Console, updates: int, start: int) -> None:
        self._console = console
        self._bar_width = max(6, min(30, console.width - 110))
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=self._bar_width),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=True)),
            console=console,
            # Without a thread of its own: it would take turns with the one that trains.
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=updates, completed=start, status="")
        self._progress.start()

    def show(self, update: int, title: str, status: Status) -> None:
        parts = status()
        # Too long a text would squeeze the bar away.
        room = self._console.width - self._bar_width - len(title) - len(" 100%") - 3
        while parts and len(", ".join(parts)) > room:
            parts = parts[:-1]
        self._progress.update(
            self._task, completed=update, description=title, status=", ".join(parts), refresh=True
        )

    def above(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class Lines:
    """A line of text now and then, without control characters."""

    interval = 0.1

    def __init__(
        self, console: Console, updates: int, start: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._updates, self._clock = console, updates, clock
        self._tenth, self._last = self._tenth_of(start), clock()

    def show(self, update: int, title: str, status: Status) -> None:
        tenth, now = self._tenth_of(update), self._clock()
        if tenth > self._tenth or now - self._last >= LINE_SECONDS:
            self._tenth, self._last = tenth, now
            share = 100 * update // max(self._updates, 1)
            self.above(f"{title}, {share}%: {', '.join(status())}")

    def above(self, text: str) -> None:
        # A line of a log is one line, however long.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        return

    def _tenth_of(self, update: int) -> int:
        return 10 * update // max(self._updates, 1)


Screen = Bar | Lines


def make_screen(console: Console | None, updates: int, start: int) -> Screen:
    """A bar for a terminal, lines for anything else. From here on the console survives losing its output."""
    if console is None:
        file = Unbreakable(sys.stderr)
        # Rich would take FORCE_COLOR for a terminal, and a log of CI would be full of control characters.
        console = Console(file=cast(IO[str], file), force_terminal=file.isatty())
    elif not isinstance(console.file, Unbreakable):
        console.file = cast(IO[str], Unbreakable(console.file))
    kind = Bar if console.is_interactive else Lines
    return kind(console, updates, start)


_GONE = (OSError, ValueError, AttributeError)
"""A stream whose terminal or reader is gone, that is closed, or that never was (None)."""


class Unbreakable:
    """A text stream whose writes never fail: what cannot be written is dropped."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except _GONE:
            return 0
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(*_GONE):
            self._stream.flush()

    def isatty(self) -> bool:
        with contextlib.suppress(*_GONE):
            return bool(self._stream.isatty())
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def status_parts(newest: Mapping[str, float], elapsed: float, left: float | None) -> list[str]:
    """The newest numbers of a run for a bar or a line of a log, the most wanted first.

    >>> newest = {"loss": 0.25, "accuracy": 0.9, "test accuracy": 0.875, "rate": 12345.6}
    >>> ", ".join(status_parts(newest, 62, 3725))
    'loss 0.25, test 87.5%, 1:02:05 left, 12,346 images/s, train 90.0%, 1:02 so far'
    """
    parts = []
    if "loss" in newest:
        parts.append(f"loss {short(newest['loss'])}")
    if "test accuracy" in newest:
        parts.append(f"test {percent(newest['test accuracy'], 1)}")
    elif "test loss" in newest:
        parts.append(f"test loss {short(newest['test loss'])}")
    if left is not None:
        parts.append(f"{duration(left)} left")
    if "rate" in newest:
        parts.append(f"{rate(newest['rate'])} images/s")
    if "accuracy" in newest:
        parts.append(f"train {percent(newest['accuracy'], 1)}")
    return [*parts, f"{duration(elapsed)} so far"]


def time_left(update: int, updates: int, start: int, elapsed: float) -> float | None:
    """Seconds to the last update, at the pace since ``start``.

    >>> time_left(update=150, updates=200, start=100, elapsed=10.0), time_left(100, 200, 100, 10.0)
    (10.0, None)
    """
    done = update - start
    return None if done < 1 else (updates - update) * elapsed / done


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(5), duration(62), duration(3725.4), duration(200_000)
    ('0:05', '1:02', '1:02:05', '2 d 7:33:20')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f"{minute}:{second:02}"
    return (f"{days} d " if days else "") + f"{hour}:{minute:02}:{second:02}"


def rate(value: float) -> str:
    """Images in a second.

    >>> rate(3.14159), rate(40_123.4)
    ('3.14', '40,123')
    """
    return f"{value:,.0f}" if value >= 100 else short(value)


def percent(share: float, digits: int = 2) -> str:
    """A share as a percentage.

    >>> percent(0.98765)
    '98.77%'
    """
    return f"{100 * share:.{digits}f}%"


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
    """All of a run on one screen: its summary, what only the trainer knows (``about``), and its files."""
    updates = f"{summary['updates']:,} updates"
    is_whole = summary["finished"] and not summary["collapsed"]
    rows = [
        ("model", recipe.model),
        ("data", recipe.data),
        *((name.replace("_", " "), _shown(value)) for name, value in about.items()),
        ("epochs", f"{recipe.epochs} ({updates})" if is_whole else f"of {recipe.epochs}: {updates}"),
    ]
    rows += _results(summary)
    if summary["images_per_second"] is not None:
        rows.append(("images/s", f"{rate(summary['images_per_second'])} (median)"))
    rows.append(("time", duration(summary["seconds"])))
    for position, values in summary["kappa"].items():
        first, last = (named_text(values, when) for when in ("first", "last"))
        rows.append((f"kappa {position}", f"{first} -> {last} (worst block)"))
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


def _results(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Tests and losses; a task without labels has no accuracy."""
    rows = []
    best, test, train = summary["best"], summary["test"], summary["train"]
    for name, line in (("best", best), ("last", test)):
        if line is None:
            continue
        shown = (
            ("accuracy", percent),
            ("ema_accuracy", lambda share: f"EMA {percent(share)}"),
            ("loss", lambda loss: f"loss {short(loss)}"),
        )
        numbers = [show(line[key]) for key, show in shown if line.get(key) is not None]
        rows.append((f"{name} test", f"{', '.join(numbers)} (epoch {line['epoch']})"))
    if train is not None and train.get("loss") is not None:
        rows.append(("last training loss", short(train["loss"])))
    return rows


def _shown(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else short(value)
