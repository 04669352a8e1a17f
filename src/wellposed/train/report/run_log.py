"""``run.jsonl``: what happened in a run, one JSON object a line, appended and never rewritten.

Each line has ``event``, ``update``, ``time`` (UTC) and ``seconds`` (of training so far), then its numbers.
JSON has no NaN and no infinity; they are written as the texts "nan", "inf" and "-inf", and :func:`read_run`
gives numbers back.

A run that was killed goes on from its newest checkpoint, a few updates before its last line. The lines in
between stay in the file. The next one, ``{"event": "resume", "update": n}``, says that they no longer count.

>>> import tempfile
>>> folder = Path(tempfile.mkdtemp())
>>> log = RunLog(folder / NAME)
>>> for event, update in [("train", 50), ("train", 100), ("resume", 60), ("train", 80)]:
...     log.write({"event": event, "update": update})
>>> [(line["event"], line["update"]) for line in read_run(folder)]
[('train', 50), ('resume', 60), ('train', 80)]
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from wellposed.files import parse_json, read_bytes

NAME = "run.jsonl"
MOST_BYTES = 2**32
NUMBERS = ("train", "monitor", "test")
"""Events of which the newest of an update counts."""

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class RunLog:
    """Appends lines. One that a kill has torn is left alone, the next starts on a line of its own."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line; after it returns, a kill of the process cannot lose the line."""
        text = json.dumps(plain(line), allow_nan=False, ensure_ascii=False)
        left = (("\n" if self._torn else "") + text + "\n").encode()
        # A full disk may take half of it.
        self._torn = True
        while left:
            left = left[os.write(self._file, left) :]
        self._torn = False

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_run(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run that count, in order.

    Lines that a resume or a rollback has superseded are left out. A line that was cut off by a kill appears
    as ``{"event": "torn", "line": its number}``.
    """
    path = Path(folder) / NAME
    if not path.is_file():
        raise FileNotFoundError(f"expected a {NAME} in {folder}, there is none; is it the folder of a run?")
    lines = read_bytes(path, MOST_BYTES).split(b"\n")
    return current(_parse(number, line) for number, line in enumerate(lines, 1) if line)


def current(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that still count after the resumes and rollbacks among them."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        event, update = line["event"], line.get("update", 0)
        if event == "resume":
            kept = [other for other in kept if other.get("update", 0) <= update]
        elif event == "rollback":
            # What led to it, a non-finite loss, stays; the numbers on the way there go.
            passed = (*NUMBERS, "checkpoint")
            kept = [
                other for other in kept if other["event"] not in passed or other.get("update", 0) <= update
            ]
        kept.append(line)
    newest = {_place(line): line for line in kept if line["event"] in NUMBERS}
    return [line for line in kept if newest.get(_place(line), line) is line]


def plain(value: Any) -> Any:
    """The value as strict JSON has it."""
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


def _place(line: Mapping[str, Any]) -> tuple[Any, Any]:
    return line["event"], line.get("update")


def _parse(number: int, line: bytes) -> dict[str, Any]:
    try:
        values = parse_json(line.decode())
    except ValueError:
        values = None
    if not isinstance(values, dict) or "event" not in values:
        return {"event": "torn", "line": number}
    return {
        name: _NOT_FINITE.get(value, value) if isinstance(value, str) else value
        for name, value in values.items()
    }
