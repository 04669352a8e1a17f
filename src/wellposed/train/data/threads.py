"""Work on many images in threads: Pillow and the disk leave Python's lock free."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

Result = TypeVar("Result")

BAR_FROM = 5_000
"""Fewer images are done before a bar could be read."""


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(
    work: Callable[[range], Result],
    count: int,
    what: str,
    *,
    chunk: int = 64,
    threads: int | None = None,
    progress: bool = True,
    bar_from: int = BAR_FROM,
) -> list[Result]:
    """``work`` on pieces of ``range(count)``, its results in order.

    Args:
        work: takes a piece of the range.
        what: words beside the progress bar, which is shown for ``bar_from`` items or more, on a terminal,
            by the first process of a machine.
        chunk: size of a piece.
        threads: as many as there are cores unless the work waits for a disk.
    """
    pieces = [range(start, min(start + chunk, count)) for start in range(0, count, chunk)]
    console = Console(stderr=True)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    is_silent = not (progress and is_first and console.is_terminal and count >= bar_from)
    results = []
    with (
        Progress(console=console, transient=True, disable=is_silent) as bar,
        ThreadPoolExecutor(threads or cores()) as pool,
    ):
        task = bar.add_task(what, total=count)
        try:
            for piece, result in zip(pieces, pool.map(work, pieces), strict=True):
                results.append(result)
                bar.advance(task, len(piece))
        except BaseException:  # an interrupt too should not wait for what has not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results
