"""The tables as CSV files with their environment beside them, and back."""

import csv
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from wellposed.bench.growth import GrowthRow
from wellposed.bench.steps import StepRow
from wellposed.environment import environment
from wellposed.files import read_object, write_cells, write_text

STEPS, GROWTH, PICTURE = "graying-steps", "graying-growth", "graying-growth.png"


def write_rows(rows: Sequence[StepRow] | Sequence[GrowthRow], folder: Path, name: str) -> Path:
    """Write ``name``.csv, one line a row; the file is replaced whole, so that it can always be read."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    kind = GrowthRow if name == GROWTH else StepRow
    columns = [field.name for field in dataclasses.fields(kind)]
    cells = ([_text(getattr(row, column)) for column in columns] for row in rows)
    write_cells(path, [columns, *cells], lineterminator="\n")
    return path


def write_environment(folder: Path, name: str, about: dict[str, Any]) -> None:
    """Write ``name``.json: versions, device, command, and what was measured how."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {**environment(), "about": about}
    write_text(folder / f"{name}.json", json.dumps(content, indent=1) + "\n")


def read_steps(folder: Path) -> list[StepRow]:
    return [StepRow(**values) for values in _read(folder / f"{STEPS}.csv", StepRow)]


def read_growth(folder: Path) -> list[GrowthRow]:
    return [GrowthRow(**values) for values in _read(folder / f"{GROWTH}.csv", GrowthRow)]


def read_about(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    about = read_object(path).get("about", {}) if path.is_file() else {}
    return dict(about)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _read(path: Path, kind: type) -> list[dict[str, Any]]:
    """The rows of a file; none where there is no file."""
    if not path.is_file():
        return []
    types = {name: _type(hint) for name, hint in get_type_hints(kind).items()}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        unknown = sorted(set(reader.fieldnames or ()) - types.keys())
        if unknown:
            raise ValueError(
                f"{path} has the unknown columns {', '.join(unknown)}; another release wrote it."
            )
        return [
            {name: types[name](text) if text or types[name] is str else None for name, text in row.items()}
            for row in reader
        ]


def _type(hint: Any) -> type:
    """The type of a column: of ``float | None`` it is float."""
    return next((kind for kind in get_args(hint) if kind is not type(None)), hint)  # type: ignore[no-any-return]
