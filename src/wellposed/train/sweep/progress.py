"""How far a run is, from the lines that its ``run.jsonl`` gets."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wellposed.files import parse_json, read_bytes


class Progress:
    """The newest numbers of a run; :meth:`refresh` reads what was added since the last time.

    Attributes:
        update: updates done.
        updates: updates in all, None until the run has said it.
        accuracy: of the last test.
        rate: images a second.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._position, self._rest = file, 0, b""
        self.update: int | None = None
        self.updates: int | None = None
        self.accuracy: float | None = None
        self.rate: float | None = None

    def refresh(self) -> None:
        """Read the new lines. One that is not whole yet waits for its end, one that is torn is left out."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._position)
                added = file.read()
        except OSError:
            # Not there yet, or not to be had just now: the next time will tell.
            return
        self._position += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        for line in lines:
            self._take(_values(line))

    def seconds_left(self, batch_size: int) -> float | None:
        """At the present rate."""
        if self.update is None or self.updates is None or not self.rate:
            return None
        return max(self.updates - self.update, 0) * batch_size / self.rate

    def _take(self, values: dict[str, Any]) -> None:
        event, update = values.get("event"), number(values.get("update"))
        if update is not None:
            self.update = int(update)
        updates = number(values.get("updates"))
        if updates is not None:
            self.updates = int(updates)
        if event == "train":
            self.rate = number(values.get("images_per_second")) or self.rate
        elif event == "test":
            self.accuracy = number(values.get("accuracy"))


def read_result(folder: Path) -> dict[str, Any]:
    """What the run's ``result.json`` says; empty if there is none that can be read."""
    try:
        return _values(read_bytes(folder / "result.json"))
    except OSError:
        return {}


def is_finished(result: Mapping[str, Any]) -> bool:
    """Whether a ``result.json`` is that of a run that came to its end."""
    return bool(result.get("status", "finished" if result.get("finished") else "") == "finished")


def _values(text: bytes) -> dict[str, Any]:
    try:
        values = parse_json(text)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def number(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None
