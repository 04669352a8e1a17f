"""What several studies measure on the last weights of a run; its accuracy is of these weights too."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wellposed.probes import diagnose
from wellposed.records import Record
from wellposed.train import open_run


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
