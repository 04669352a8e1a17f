"""Files from elsewhere, read within limits, and files of ours, which are whole or not there.

A file may be cut, made by hand, or made to do harm: nested a thousandfold, a pipe that never ends. What
cannot be read is a ``ValueError`` with the reason. A folder can be held, for one program at a time.

>>> parse_json("[" * 100_000)
Traceback (most recent call last):
ValueError: it is nested too deeply
"""

import contextlib
import csv
import fcntl
import json
import math
import os
import re
import stat
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

MOST_BYTES = 2**28
"""Of a text file."""
DEEPEST = 64
"""Lists and tables inside each other."""


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raise for a pipe, a device or a socket, which would keep its reader waiting or never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # of a folder the system says so itself
        raise ValueError("it is not a regular file")


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """The content of a regular file that is not larger than ``most`` bytes."""
    require_regular(path)
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than the {most:,} bytes that such a file may have")
    return content


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text."""
    return _shallow(lambda: json.loads(text))


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text."""
    return cast(dict[str, Any], _shallow(lambda: tomllib.loads(text)))


def read_json(path: str | os.PathLike[str]) -> Any:
    """The value of a JSON file; an error names the file."""
    try:
        return parse_json(read_bytes(path))
    except ValueError as error:
        raise ValueError(f"expected JSON in {path}, which cannot be read: {error}.") from error


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object of a JSON file; an error names the file."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object in {path}, got a {type(values).__name__}.")
    return values


def _shallow(parse: Callable[[], Any]) -> Any:
    """What the parser gives, of at most :data:`DEEPEST` levels, so that nothing later has to go deeper."""
    try:
        parsed = parse()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [parsed] if isinstance(parsed, (dict, list)) else []
    for _ in range(DEEPEST):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [child for children in inside for child in children if isinstance(child, (dict, list))]
        if not level:
            return parsed
    raise ValueError("it is nested too deeply")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, binary: bool = False) -> Iterator[IO[Any]]:
    """A file to write, which takes the place of ``path`` when the block ends without an error.

    A kill at any moment leaves the old file or the new one. What is no file, such as ``/dev/stdout``, is
    written directly.
    """
    path = Path(path)
    form: dict[str, Any] = {"mode": "wb"} if binary else {"mode": "w", "encoding": "utf-8", "newline": ""}
    if path.exists() and not path.is_file():
        with path.open(**form) as file:
            yield file
        return
    path = path.resolve()  # a link stays one
    staged = path.with_name(f".{path.name}.{os.getpid()}{STAGED}")
    try:
        with staged.open(**form) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


STAGED = ".tmp"
"""Ending of hidden files that a kill may leave."""


def clear_staged(*paths: Path) -> None:
    """Delete what killed writers of these files left; nobody may be writing them."""
    for path in paths:
        for left in path.parent.glob(f".{path.name}.*{STAGED}"):
            left.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole file, as :func:`replacing`."""
    with replacing(path) as file:
        file.write(text)


def write_json(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Write a JSON object, as :func:`replacing`."""
    write_text(path, json.dumps(plain(values), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def plain(value: Any) -> Any:
    """The value as strict JSON has it; numbers that are not finite become texts.

    >>> plain({"loss": float("nan"), "sizes": (1, 2)})
    {'loss': 'nan', 'sizes': [1, 2]}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    # Scalars of numpy and torch.
    return plain(value.item()) if hasattr(value, "item") else str(value)


def write_cells(
    path: str | os.PathLike[str], rows: Iterable[Iterable[Any]], lineterminator: str = "\r\n"
) -> None:
    """Write a whole CSV file; None is an empty cell, and no text is a formula to a spreadsheet."""
    with replacing(path) as file:
        csv.writer(file, lineterminator=lineterminator).writerows(map(_cell, row) for row in rows)


def _cell(value: Any) -> Any:
    """As the page's own CSV files have it.

    >>> _cell("=HYPERLINK(1)"), _cell("-1e-3"), _cell(-1.0), _cell(None)
    ("'=HYPERLINK(1)", '-1e-3', -1.0, '')
    """
    if not isinstance(value, str):
        return "" if value is None else value
    is_formula = value.startswith(("=", "+", "-", "@", "\t", "\r")) and not _NUMBER.fullmatch(value)
    return f"'{value}" if is_formula else value


_NUMBER = re.compile(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?")


PATIENCE = 15.0
"""Seconds. Processes that read images for a killed training take some to notice, and hold on so long."""


@contextlib.contextmanager
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
