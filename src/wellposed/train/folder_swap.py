"""A folder that is replaced as a whole: whoever looks sees the old one or the new one, never half of one."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wellposed.train.checkpoint import durable

_AT_CWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A new, empty folder to fill, which takes the place of ``folder`` when the block ends without an error.

    >>> import tempfile
    >>> best = Path(tempfile.mkdtemp()) / "best"
    >>> with replaced(best) as new:
    ...     _ = (new / "a.txt").write_text("1")
    >>> with replaced(best) as new:
    ...     _ = (new / "b.txt").write_text("2")
    >>> [path.name for path in best.iterdir()], [path.name for path in best.parent.iterdir()]
    (['b.txt'], ['best'])
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    recover(folder)
    staged = _beside(folder, "staged")
    staged.mkdir()
    try:
        yield staged
        durable.sync_folder(staged)
        _publish(staged, folder)
    except Exception:
        durable.discard(staged)
        raise


def recover(folder: Path) -> None:
    """Clear up what a killed process left beside ``folder``; the only copy gets its name back."""
    aside = _beside(folder, "replaced")
    if aside.exists() and not folder.exists():
        durable.rename(aside, folder)
    for left in (aside, _beside(folder, "staged")):
        if left.exists():
            durable.discard(left)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


def _publish(staged: Path, folder: Path) -> None:
    if not folder.exists():
        durable.rename(staged, folder)
    elif _exchange(staged, folder):
        durable.sync_folder(folder.parent)
        durable.discard(staged)
    else:
        aside = _beside(folder, "replaced")
        durable.rename(folder, aside)
        durable.rename(staged, folder)
        durable.discard(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders swap their names at once, where system and file system can (Linux)."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, TypeError, AttributeError):
        return False
    names = (os.fsencode(path.absolute()) for path in (one, other))
    return bool(renameat2(_AT_CWD, next(names), _AT_CWD, next(names), _RENAME_EXCHANGE) == 0)
