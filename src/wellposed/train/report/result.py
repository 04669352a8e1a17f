"""JSON files that are whole or not there."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wellposed.train.report.run_log import plain


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object, beside the file first and then in its place: a kill leaves the old one whole."""
    text = json.dumps(plain(values), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    staged = path.with_name(f".{path.name}.staged")
    with staged.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, path)
