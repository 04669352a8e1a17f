"""JSON files that are whole or not there."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wellposed.train.report.run_log import plain


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an error names the file."""
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(values, dict):
        raise _damaged(path, f"it holds a {type(values).__name__}")
    return values


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(
        f"expected a JSON object in {path}, which is damaged ({why}); delete that file, and the command that "
        "trained makes it again from the last checkpoint."
    )


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object, beside the file first and then in its place: a kill leaves the old one whole."""
    text = json.dumps(plain(values), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    staged = path.with_name(f".{path.name}.staged")
    with staged.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, path)
