"""What was measured on a run's weights, as lines of JSON."""

from typing import Any

from wellposed.records import Record, to_dict
from wellposed.train.runs import Moment

_LEFT_OUT = ("module", "samples", "at_least", "curve")


def measured_row(record: Record, moment: Moment, **more: Any) -> dict[str, Any]:
    """A record as a line of JSON: without the values of single images, with whose weights these are."""
    row = {name: value for name, value in to_dict(record).items() if name not in _LEFT_OUT}
    if record.at_least:
        row["images_at_least"] = len(record.at_least)
    if record.verdicts:
        row["verdicts"] = list(record.verdicts)
    told = {"weights": moment.weights, "update": moment.update, "epoch": moment.epoch}
    return {name: _short(value) for name, value in {**told, **row, "log": record.log, **more}.items()}


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
