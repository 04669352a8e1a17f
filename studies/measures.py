"""What several studies measure on the weights of a run; its accuracy is of the last ones too."""

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from studies.robustness import accuracy, robustness
from studies.subset import validation_split
from wellposed.probes import diagnose
from wellposed.records import Record, to_dict
from wellposed.study_records import rounded
from wellposed.train import open_run
from wellposed.train.data.images import fitted
from wellposed.train.runs import Moment


def conditioning_and_density(
    folder: Path, measures: Collection[str] = ("kappa", "entropy")
) -> list[dict[str, Any]]:
    """Kappa at each position of each block, and the entropy of each head, for ``Study.after``."""
    run = open_run(folder)
    model = run.model(run.moment("last"))
    found = diagnose(model, run.images, attention_images=len(run.images), progress=False)
    return [_row(record) for record in found.records if record.measure in measures]


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


def validation_accuracy(folder: Path) -> list[dict[str, Any]]:
    """Of the last weights, on images that are neither trained nor tested on; settings are chosen by it.

    Nothing for data without them: :mod:`studies.subset` makes a set that has some.
    """
    run = open_run(folder)
    kind, _, path = run.recipe.data.partition(":")
    if kind != "packed":
        return []
    assert run.recipe.image_size is not None
    found = _validation_images(Path(path), run.recipe.image_size)
    if found is None:
        return []
    mean, std = (torch.tensor(run.expects[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
    images = ((found[0] / 255 - mean) / std).to(run.device)
    value = accuracy(run.model(run.moment("last")), images, found[1].to(run.device))
    return [{"measure": "validation accuracy", "value": value}]


@functools.lru_cache(maxsize=4)
def _validation_images(path: Path, size: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Pixels (n, 3, S, S) from 0 to 255, and labels."""
    found = validation_split(path)
    if found is None:
        return None
    pixels = [np.asarray(fitted(Image.fromarray(each), size)) for each in found[0]]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float(), torch.from_numpy(found[1])


def conditioning_and_validation(folder: Path) -> list[dict[str, Any]]:
    """Kappa, entropy and validation accuracy."""
    return [*conditioning_and_density(folder), *validation_accuracy(folder)]


def everything(folder: Path) -> list[dict[str, Any]]:
    """Kappa, rank, entropy, validation accuracy and robustness."""
    measures = ("kappa", "effective rank", "entropy")
    return [
        *conditioning_and_density(folder, measures),
        *validation_accuracy(folder),
        *robustness(folder),
    ]
