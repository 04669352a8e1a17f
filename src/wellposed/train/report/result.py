"""JSON files that are whole or not there."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wellposed.files import parse_json, read_bytes, write_text
from wellposed.train.report.run_log import plain


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
