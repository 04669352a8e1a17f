"""Files that cannot be read: they are named, and what lies beside them is shown all the same."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from wellposed.files import parse_json, read_bytes


class Damage(NamedTuple):
    """A file, and what is wrong with it.

    >>> print(Damage("runs/a/run.jsonl", "line 3 is torn."))
    runs/a/run.jsonl: line 3 is torn.
    """

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


class DamagedError(ValueError):
    """Of a file without which there is nothing to show."""

    def __init__(self, path: Path, what: str) -> None:
        self.damage = Damage(str(path), what)
        super().__init__(str(self.damage))


def json_object(path: Path, found: list[Damage]) -> dict[str, Any]:
    """The object in a file beside a run's numbers; empty without the file, and where ``found`` tells why."""
    if not path.exists():
        return {}
    try:
        values = parse_json(read_bytes(path))
        why = "" if isinstance(values, dict) else f"got a {type(values).__name__}"
    except ValueError as error:
        values, why = {}, str(error)
    if why:
        found.append(Damage(str(path), f"expected a JSON object ({why}); the report does without this file."))
        return {}
    read: dict[str, Any] = values
    return read


def torn_lines(path: Path, numbers: Iterable[int]) -> list[Damage]:
    """The lines of a file that are no JSON objects, if there are any.

    >>> torn_lines(Path("run.jsonl"), [3, 8])
    [Damage(path='run.jsonl', what='lines 3, 8 are torn and left out.')]
    """
    told = list(map(str, numbers))
    if not told:
        return []
    lines = f"line {told[0]} is" if len(told) == 1 else f"lines {', '.join(told)} are"
    return [Damage(str(path), f"{lines} torn and left out.")]
