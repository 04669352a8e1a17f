"""One training in a folder at a time: two would write into each other's files."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 15.0
"""Seconds. Processes that read images for a killed training take some to notice, and hold on so long."""


@contextmanager
def only_training_in(folder: Path) -> Iterator[None]:
    """Hold a folder that exists, until the end of the block or of the process.

    The lock is on the folder itself and leaves no file. A file system without locks is trusted.

    Raises:
        BlockingIOError: another training holds it.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        _lock(held, folder)
        yield
    finally:
        os.close(held)


def _lock(held: int, folder: Path) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > until:
                raise BlockingIOError(
                    f"expected a folder that no other training uses, one is at work in {folder}; "
                    "wait for it, or take another --out."
                ) from error
            time.sleep(0.2)
        except OSError:
            return
        else:
            return
