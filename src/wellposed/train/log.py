"""Writing of ``run.jsonl``, whose lines are appended and never rewritten, and of JSON files that are whole.

>>> import tempfile
>>> from wellposed.run_records import NAME, read_run
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wellposed.files import parse_json, read_bytes, write_text


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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an error names the file."""
    try:
        values = parse_json(read_bytes(path))
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(values, dict):
        raise _damaged(path, f"it holds a {type(values).__name__}")
    for name in ("test", "best", "about"):
        if not isinstance(values.get(name), (dict, type(None))):
            raise _damaged(path, f"its {name} is a {type(values[name]).__name__}")
    return values


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(
        f"expected a JSON object in {path}, which is damaged ({why}); delete that file, and the command that "
        "trained makes it again from the last checkpoint."
    )


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object; a kill leaves the old one whole."""
    write_text(path, json.dumps(plain(values), indent=1, allow_nan=False, ensure_ascii=False) + "\n")
