"""What several studies measure on the weights of a run; its accuracy is of the last ones too."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wellposed.probes import diagnose
from wellposed.records import Record, to_dict
from wellposed.study_records import rounded
from wellposed.train import open_run
from wellposed.train.runs import Moment


def conditioning_and_density(folder: Path) -> list[dict[str, Any]]:
    """Kappa at each position of each block, and the entropy of each head, for ``Study.after``."""
    run = open_run(folder)
    model = run.model(run.moment("last"))
    found = diagnose(model, run.images, attention_images=len(run.images), progress=False)
    return [_row(record) for record in found.records if record.measure in ("kappa", "entropy")]


def _row(record: Record) -> dict[str, Any]:
    """No more than the tables need: a study keeps thousands of them."""
    where: Mapping[str, Any] = {"block": record.block, "position": record.position, "head": record.head}
    return {
        "measure": record.measure,
        "value": record.value,
        **{name: value for name, value in where.items() if value not in (None, "")},
        **({} if record.status == "ok" else {"status": record.status}),
    }


_OMITTED = ("module", "samples", "at_least", "curve")


def measured_row(record: Record, moment: Moment, **more: Any) -> dict[str, Any]:
    """A record with whose weights these are, without the values of single images."""
    row = {name: value for name, value in to_dict(record).items() if name not in _OMITTED}
    if record.at_least:
        row["images_at_least"] = len(record.at_least)
    if record.verdicts:
        row["verdicts"] = list(record.verdicts)
    return rounded({**moment_row(moment), **row, "log": record.log, **more}, 6)


def moment_row(moment: Moment) -> dict[str, Any]:
    """Which weights of a run were measured."""
    return {"weights": moment.weights, "update": moment.update, "epoch": moment.epoch}
