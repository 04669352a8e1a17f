"""The weights of a run as a model again, with its edits, and some of its own test images.

A run has several: those it started from, its checkpoints, the last ones and the best.
"""

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from wellposed.records import Record, to_dict
from wellposed.train.batches.augment import normalised
from wellposed.train.batches.preparation import scale
from wellposed.train.data import decode_readable, open_data
from wellposed.train.eps import EpsSchedule
from wellposed.train.model import build_model
from wellposed.train.recipe import Recipe
from wellposed.train.recipe_file import read_recipe
from wellposed.train.run_folder import RECIPE
from wellposed.train.start import start_from

Which = Literal["initial", "checkpoint", "last", "best"]

IMAGES = 32
"""Test images that are measured, unless a study says otherwise."""

_FILE = "model.safetensors"
_LEFT_OUT = ("module", "samples", "at_least", "curve")


@dataclass(frozen=True)
class Moment:
    """One set of weights of a run.

    Args:
        weights: which.
        update: how many updates they have seen.
        epoch: the same in passes over the training images; None where it is not known.
        file: where they are; None for those that the run started from, which are made again.
    """

    weights: Which
    update: int
    epoch: float | None
    file: Path | None


@dataclass(frozen=True)
class TrainedRun:
    """A finished run, opened.

    Args:
        folder: of the run.
        recipe: with nothing open.
        updates: that it made.
        images: some of its test images, as its model takes them, on the device.
        labels: of those.
    """

    folder: Path
    recipe: Recipe
    updates: int
    images: Tensor
    labels: Tensor
    classes: int
    channels: int

    def moment(self, weights: Literal["initial", "last", "best"]) -> Moment:
        """Those of one name."""
        if weights == "initial":
            return self._moment("initial", 0, None)
        file = self.folder / weights / _FILE
        if not file.is_file():
            raise FileNotFoundError(
                f"expected {weights}/{_FILE} in {self.folder}, there is none; a run writes it when it ends: "
                "run the study again, which goes on with runs that were interrupted."
            )
        return self._moment(weights, int(_config(file.parent)["wellposed"]["update"]), file)

    def through_training(self) -> list[Moment]:
        """The start, every checkpoint that was kept, and the end."""
        if self.recipe.task == "mae":
            raise ValueError(
                "expected a run that classifies, got task=mae; the checkpoints of a masked autoencoder "
                "hold its decoder too, measure its best or last weights."
            )
        start, last = self.moment("initial"), self.moment("last")
        kept = sorted((self.folder / "checkpoints").glob(f"update-*/{_FILE}"))
        between = [
            self._moment("checkpoint", update, file)
            for file in kept
            if (update := int(file.parent.name.removeprefix("update-"))) < last.update
        ]
        return [start, *between, last]

    def model(self, moment: Moment) -> nn.Module:
        """The model of these weights with the edits of the run, in evaluation mode, on the device."""
        recipe = self.recipe
        if moment.file is not None:
            # All weights come from the file, so what the run started from need not be there any more.
            recipe = dataclasses.replace(recipe, start_from=None, pretrained=False)
        model = build_model(recipe, self.classes, self.channels).model
        if moment.file is not None:
            start_from(model, moment.file)
        model.to(self.images.device)
        EpsSchedule([model], recipe, self.updates).set(max(moment.update - 1, 0))
        return model.eval()

    def _moment(self, weights: Which, update: int, file: Path | None) -> Moment:
        epoch = self.recipe.epochs * update / self.updates if self.updates else None
        return Moment(weights, update, epoch, file)


def open_run(folder: Path, images: int = IMAGES) -> TrainedRun:
    """A finished run with ``images`` of its test images, evenly over the whole test set.

    Sets that are folders of classes have the images of a class one after the other, so the first ones would
    show one class alone.
    """
    file = folder / RECIPE
    if not file.is_file():
        raise FileNotFoundError(f"expected the folder of a run, {folder} has no {RECIPE}.")
    recipe = Recipe.from_mapping(read_recipe(file))
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    pixels, labels, classes, channels = _test_pixels(
        recipe.data, recipe.holdout, recipe.seed, recipe.skip_unreadable, recipe.image_size or 0, images
    )
    expected = _config(folder)["pretrained_cfg"]
    device = _device(recipe)
    shown = normalised(pixels.to(device), scale(expected["mean"], device), scale(expected["std"], device))
    return TrainedRun(folder, recipe, int(result["updates"]), shown, labels, classes, channels)


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


def _config(weights: Path) -> dict[str, Any]:
    """What was written beside weights: of a run, beside its last or best."""
    for folder in (weights, weights / "last", weights / "best"):
        if (folder / "config.json").is_file():
            config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            return config
    raise FileNotFoundError(f"expected a config.json in last or best of {weights}, has the run ended?")


def _device(recipe: Recipe) -> torch.device:
    name = recipe.device or "cuda"
    return torch.device(name if name == "cpu" or torch.cuda.is_available() else "cpu")


@functools.lru_cache(maxsize=4)  # the runs of a study share their images
def _test_pixels(
    data: str, holdout: float, seed: int, skip_unreadable: bool, size: int, count: int
) -> tuple[Tensor, Tensor, int, int]:
    """(count, C, S, S) pixels and (count,) labels; how many classes and channels the set has."""
    opened = open_data(data, holdout=holdout, seed=seed, skip_unreadable=skip_unreadable)
    indices = np.linspace(0, len(opened.test) - 1, min(count, len(opened.test))).round().astype(np.int64)
    chosen = opened.test.subset(indices)
    pixels, read, _ = decode_readable(chosen, size, opened.channels, progress=False)
    labels = torch.tensor(chosen.labels[read])
    return torch.tensor(pixels), labels, len(opened.classes), opened.channels
