"""One at a time in a folder: two trainings, or two sweeps, would write into each other's files."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 15.0
"""Seconds. Processes that read images for a killed training take some to notice, and hold on so long."""


@contextmanager
def alone_in(folder: Path, patience: float = 0.0) -> Iterator[int]:
    """Hold a folder that exists, until the end of the block or of the process.

    The lock is on the folder itself and leaves no file. Where the file system has no locks, nothing is held.

    Args:
        folder: which.
        patience: seconds to wait for who holds it.

    Yields:
        The lock. Children that inherit it hold it too: when their parent is killed, until they have ended.

    Raises:
        BlockingIOError: another one holds it.
    """
    until = time.monotonic() + patience
    while True:
        lock = os.open(folder, os.O_RDONLY)
        try:
            _take(lock, folder, until)
            if not _is_still(lock, folder):
                continue  # who held it has replaced the folder: this is the lock of one that is gone
            yield lock
            return
        finally:
            os.close(lock)


def _is_still(lock: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), os.stat(folder))
    except FileNotFoundError:
        return False


def _take(lock: int, folder: Path, until: float) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > until:
                raise BlockingIOError(
                    f"another training or sweep, or a run that one has left behind, still works in {folder}; "
                    "wait for it, or choose another --out."
                ) from error
            time.sleep(0.2)
        except OSError:
            return
