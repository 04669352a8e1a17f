"""What people see while a sweep goes on: a table in a terminal, a line for each change in a log file."""

import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from wellposed.train.report.status import duration, percent, rate
from wellposed.train.sweep.children import Child

REFRESH_SECONDS = 0.5
_STYLES = {
    "running": "cyan",
    "finished": "green",
    "interrupted": "yellow",
    "nonfinite": "red",
    "failed": "red",
}
_RIGHT = ("update", "accuracy", "images/s", "time left")


class Screen:
    """Shows the runs whenever :meth:`show` is called, also those that were added meanwhile.

    The table not more often than the eye needs.
    """

    def __init__(self, console: Console, children: Sequence[Child]) -> None:
        self._console, self._children = console, children
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_interactive else None
        )
        self._drawn = 0.0
        self._told = {child.run.name: child.state for child in children}

    def __enter__(self) -> "Screen":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self) -> None:
        if self._live is None:
            self._tell_changes()
        elif time.monotonic() - self._drawn >= REFRESH_SECONDS:
            self._live.update(as_table(self._children, rows=self._console.height - 6), refresh=True)
            self._drawn = time.monotonic()

    def _tell_changes(self) -> None:
        for child in self._children:
            # Runs that waited for others are new here.
            if child.state != self._told.get(child.run.name, "waiting"):
                self._told[child.run.name] = child.state
                parts = [f"{child.run.title}: {child.state}", *([child.reason] if child.reason else [])]
                if child.progress.accuracy is not None:
                    parts.append(f"accuracy {percent(child.progress.accuracy)}")
                self._console.print(", ".join(parts), markup=False, highlight=False, soft_wrap=True)


def as_table(children: Sequence[Child], rows: int) -> Table:
    """One line a run; where they do not fit, those that run or went wrong."""
    counts = Counter(child.state for child in children)
    table = Table(caption=", ".join(f"{count} {state}" for state, count in counts.items()))
    for title in ("run", "state", *_RIGHT):
        table.add_column(title, justify="right" if title in _RIGHT else "left", no_wrap=True)
    if len(children) > rows:
        children = [child for child in children if child.state not in ("waiting", "finished")][: max(rows, 1)]
    for child in children:
        table.add_row(Text(child.run.title), Text(child.state, _STYLES.get(child.state, "")), *_cells(child))
    return table


def _cells(child: Child) -> tuple[str, str, str, str]:
    progress = child.progress
    done = "" if progress.update is None else f"{progress.update:,}"
    if done and progress.updates is not None:
        done = f"{done}/{progress.updates:,}"
    left = progress.seconds_left(child.run.recipe.batch_size) if child.state == "running" else None
    return (
        done,
        "" if progress.accuracy is None else percent(progress.accuracy),
        "" if progress.rate is None else rate(progress.rate),
        "" if left is None else duration(left),
    )
