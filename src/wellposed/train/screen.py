"""What people see while a run goes on: a bar in a terminal, plain lines in a log file.

Nothing here may stop a training run: output that cannot be written any more, because the terminal was closed
or the pipe's reader is gone, is dropped.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Column

REFRESH_SECONDS = 0.25
"""Of the bar."""

LINE_SECONDS = 15.0
"""A log file gets a line after so many seconds, or a tenth of the run."""


Status = Callable[[], Sequence[str]]
"""Gives the parts of a line of text, the most wanted first; called only when it is shown."""


class Screen(Protocol):
    """Where the state of a run is shown."""

    interval: float
    """Seconds after which it is worth calling ``show`` again."""

    def show(self, update: int, title: str, status: Status) -> None: ...

    def above(self, text: str) -> None:
        """A line that stays."""

    def close(self) -> None: ...


class Bar:
    """A progress bar at the bottom of a terminal."""

    interval = REFRESH_SECONDS

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
