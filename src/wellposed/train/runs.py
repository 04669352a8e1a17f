"""A run, opened again: its weights as a model, and some of its test images.

A run has several weights: those it started from, its checkpoints, the last ones and the best. ::

    run = open_run("runs/first")
    diagnosis = wellposed.diagnose(run.model("best"), run.images)
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from wellposed.environment import without_secrets
from wellposed.files import read_object
from wellposed.models import load_weights, say_weights
from wellposed.run_records import NAME as LOG
from wellposed.run_records import RESULT, read_result, read_run
from wellposed.train.augment import normalised
from wellposed.train.batches import scale
from wellposed.train.checkpoint import file_hash
from wellposed.train.data import decode_readable, open_data
from wellposed.train.export import RECIPE, WEIGHTS
from wellposed.train.model import build_model, start_from
from wellposed.train.optimizer import EpsSchedule
from wellposed.train.recipe import Recipe, read_recipe

Named = Literal["initial", "last", "best"]

IMAGES = 32
"""Test images that are measured, unless the caller says otherwise."""

_WRITTEN = ("best", "last")
_CONFIG = "config.json"
_WHEN = (
    "A run writes its best weights with its checkpoints and its last ones when it ends; the same command "
    "resumes it."
)


@dataclass(frozen=True)
class Moment:
    """One set of weights of a run.

    Args:
        weights: which.
        update: how many updates they have seen.
        epoch: the same in passes over the training images; None where it is not known.
        file: where they are; None for those that the run started from, which are made again.
    """

    weights: Named | Literal["checkpoint"]
    update: int
    epoch: float | None
    file: Path | None


@dataclass(frozen=True)
class TrainedRun:
    """A run, opened by :func:`open_run`. Its data is opened when its images are first asked for.

    Args:
        folder: of the run.
        recipe: with nothing open.
        updates: of the whole run.
        classes, channels: of its model.
        expects: how its model's images are prepared, as timm's configurations say it.
        device: where its models and images are put.
        count: how many test images are taken.
    """

    folder: Path
    recipe: Recipe
    updates: int
    classes: int
    channels: int
    expects: dict[str, Any]
    device: torch.device
    count: int

    @functools.cached_property
    def images(self) -> Tensor:
        """Some of its test images, as its model takes them, on the device.

        They are spread evenly over the test set: sets that are folders of classes have the images of a class
        one after the other, so the first ones would show one class alone.
        """
        mean, std = (scale(self.expects[name], self.device) for name in ("mean", "std"))
        return normalised(self._chosen.pixels.to(self.device), mean, std)

    @property
    def labels(self) -> Tensor:
        """Of these images."""
        return self._chosen.labels

    @property
    def image_notes(self) -> list[str]:
        """Sentences for a report on these images."""
        chosen, data = self._chosen, without_secrets(self.recipe.data)
        notes = [
            f"{len(chosen.labels)} of the {chosen.total} test images of the run's own data ({data}), evenly."
        ]
        if chosen.unreadable:
            notes.append(f"{len(chosen.unreadable)} could not be read: {'; '.join(chosen.unreadable[:5])}.")
        return notes

    def moment(self, weights: Named) -> Moment:
        """Those of one name."""
        if weights == "initial":
            return self._moment("initial", 0, None)
        file = self.folder / weights / WEIGHTS
        if not file.is_file():
            there = [name for name in _WRITTEN if (self.folder / name / WEIGHTS).is_file()]
            instead = f"; there are {there[0]} ones" if there else ""
            raise FileNotFoundError(
                f"expected {weights}/{WEIGHTS} in {self.folder}, there is none{instead}. {_WHEN}"
            )
        with _fields_of(file.parent):
            update = int(_config(file.parent)["wellposed"]["update"])
        return self._moment(weights, update, file)

    def through_training(self) -> list[Moment]:
        """The start, every checkpoint that was kept, and the end."""
        if self.recipe.task == "mae":
            raise ValueError(
                "expected a run that classifies, got task=mae; the checkpoints of a masked autoencoder "
                "hold its decoder too, measure its best or last weights."
            )
        start, last = self.moment("initial"), self.moment("last")
        kept = sorted((self.folder / "checkpoints").glob(f"update-*/{WEIGHTS}"))
        between = [
            self._moment("checkpoint", update, file)
            for file in kept
            if (update := int(file.parent.name.removeprefix("update-"))) < last.update
        ]
        return [start, *between, last]

    def model(self, weights: Moment | Named) -> nn.Module:
        """The model of these weights with the edits of the run, in evaluation mode, on the device."""
        moment = weights if isinstance(weights, Moment) else self.moment(weights)
        recipe = self.recipe
        if moment.file is not None:
            # All weights come from the file, so what the run started from need not be there any more.
            recipe = dataclasses.replace(recipe, start_from=None, pretrained=False)
        model = build_model(recipe, self.classes, self.channels).model
        if moment.file is not None:
            _require_own(moment.file)
            # Of a masked autoencoder the encoder is kept, without the head that timm gives it.
            load = start_from if recipe.task == "mae" else load_weights
            load(model, moment.file)
            say_weights(model, f"weights from {moment.file}, after update {moment.update}")
        known: Any = getattr(model, "pretrained_cfg", None) or {}
        model.pretrained_cfg = {**known, **self.expects}  # type: ignore[assignment]
        model.to(self.device)
        EpsSchedule([model], self.updates).set(max(moment.update - 1, 0))
        return model.eval()

    @property
    def _chosen(self) -> "_TestImages":
        recipe = self.recipe
        opening = (recipe.data, recipe.holdout, recipe.seed)
        return _test_images(*opening, recipe.image_size or 0, self.channels, self.count)

    def _moment(self, weights: Named | Literal["checkpoint"], update: int, file: Path | None) -> Moment:
        epoch = self.recipe.epochs * update / self.updates if self.updates else None
        return Moment(weights, update, epoch, file)


def open_run(
    folder: str | Path, images: int = IMAGES, *, device: str | torch.device | None = None
) -> TrainedRun:
    """The run in a folder: its models, and some of its test images.

    Args:
        folder: what ``wellposed train --out`` or :func:`wellposed.train.fit` wrote. A run that has not ended
            has its best weights from its first checkpoint on.
        images: how many test images, spread evenly over the test set.
        device: for models and images; None is the one of the recipe, a GPU where there is one.

    Returns:
        The run; its models are built and its images decoded when they are asked for.

    Example:
        ``run = open_run("runs/first"); wellposed.diagnose(run.model("best"), run.images)``
    """
    folder = Path(folder).expanduser()
    _require_run(folder)
    recipe = Recipe.from_mapping(read_recipe(folder / RECIPE))
    if device is None:
        device = "cuda" if recipe.device != "cpu" and torch.cuda.is_available() else "cpu"
    config = _config(folder)
    with _fields_of(folder):
        expects = dict(config["pretrained_cfg"])
        classes, channels = int(expects["num_classes"]), int(expects["input_size"][0])
        updates = _planned_updates(folder)
    return TrainedRun(
        folder=folder,
        recipe=recipe,
        updates=updates,
        classes=classes,
        channels=channels,
        expects=expects,
        device=torch.device(device),
        count=images,
    )


def _require_run(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"expected the folder of a run, there is no folder {folder}.")
    if not (folder / RECIPE).is_file():
        inside = sorted(child.name for child in folder.iterdir() if (child / RECIPE).is_file())
        remedy = f"those in it are {', '.join(inside[:5])}" if inside else "wellposed train --out makes one"
        raise FileNotFoundError(f"expected the folder of a run, {folder} has no {RECIPE}; {remedy}.")
    if (folder / WEIGHTS).is_file():
        raise ValueError(
            f"expected the folder of a run, {folder} holds weights alone; name the folder that it lies in."
        )


@contextlib.contextmanager
def _fields_of(folder: Path) -> Iterator[None]:
    """Files of other values than a run writes are one sentence."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"expected what a run writes in {_CONFIG} and result.json of {folder}, got other fields "
            f"({type(error).__name__}: {error}); train again, or copy the folder again."
        ) from error


def _require_own(file: Path) -> None:
    """Refuse weights that are not those that the run wrote, where it says which they are."""
    if not (file.parent / _CONFIG).is_file():
        return
    with _fields_of(file.parent):
        said = _config(file.parent)["wellposed"].get("sha256")
    if said is not None and said != file_hash(file):
        raise ValueError(
            f"expected the weights that the run wrote, {file} holds others (its SHA-256 is not that in "
            f"{_CONFIG}); copy the folder again, or name the file as weights= of a model."
        )


def _planned_updates(folder: Path) -> int:
    """Of the whole run, also where it has not come to its end: the schedule of eps depends on it."""
    if (folder / RESULT).is_file() and (result := read_result(folder))["finished"]:
        return int(result["updates"])
    planned = [int(line["updates"]) for line in read_run(folder) if line.get("updates")]
    if not planned:
        raise ValueError(f"expected the number of updates in {folder / LOG}, which does not have it.")
    return planned[-1]


def _config(weights: Path) -> dict[str, Any]:
    """What was written with weights: of a run, with its last or best."""
    for folder in (weights, weights / "last", weights / "best"):
        if (folder / _CONFIG).is_file():
            return read_object(folder / _CONFIG)
    raise FileNotFoundError(
        f"expected weights with a {_CONFIG} in last or best of {weights}, there are none. {_WHEN}"
    )


class _TestImages(NamedTuple):
    """Pixels (B, C, S, S), labels (B,), how many the set has, and why some could not be read."""

    pixels: Tensor
    labels: Tensor
    total: int
    unreadable: tuple[str, ...]


@functools.lru_cache(maxsize=4)  # the runs of a study share their images
def _test_images(data: str, holdout: float, seed: int, size: int, channels: int, count: int) -> _TestImages:
    opened = open_data(data, holdout=holdout, seed=seed)
    total = len(opened.test)
    chosen = opened.test.subset(np.linspace(0, total - 1, min(count, total)).round().astype(np.int64))
    pixels, read, unreadable = decode_readable(chosen, size, channels, progress=False)
    return _TestImages(torch.tensor(pixels), torch.tensor(chosen.labels[read]), total, unreadable)
