"""The folder of a run: its name, whether what is in it can be resumed, and its weights as a model again.

A run has several weights: those it started from, its checkpoints, the last ones and the best. ::

    run = open_run("runs/first")
    diagnosis = wellposed.diagnose(run.model("best"), run.images)
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from wellposed.environment import without_secrets
from wellposed.files import clear_staged, read_object
from wellposed.models import load_weights, say_weights
from wellposed.run_records import NAME as LOG
from wellposed.run_records import read_run
from wellposed.train.augment import normalised
from wellposed.train.batches import scale
from wellposed.train.checkpoint import file_hash
from wellposed.train.data import decode_readable, open_data
from wellposed.train.edits import whole
from wellposed.train.export import ENVIRONMENT, RECIPE, RESULT, WEIGHTS
from wellposed.train.model import build_model, start_from
from wellposed.train.optimizer import EpsSchedule
from wellposed.train.recipe import REMOVED, Recipe, changes_of, decisive, read_recipe, write_recipe


def default_folder(recipe: Recipe) -> Path:
    """The same for equal recipes, so that the same call resumes.

    >>> default_folder(Recipe()) == default_folder(Recipe(workers=0))
    True
    """
    removed = {name: default for name, (default, _) in REMOVED.items()}  # runs keep their names
    text = json.dumps(removed | decisive(recipe), sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    kind, colon, rest = recipe.data.removeprefix("torchvision:").partition(":")
    data = kind if colon and kind not in ("packed", "hf", "wds", "folder") else Path(rest or kind).stem
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{data}-{recipe.model}").strip("-.")
    return Path("runs") / f"{name}-{digest}"


def open_folder(folder: Path, recipe: Recipe, overwrite: bool) -> dict[str, Any] | None:
    """Make a folder that is there ready for a run; returns the result of one that is finished already.

    Raises:
        ValueError: the folder holds a run of another recipe, or something that is no run.
    """
    file = folder / RECIPE
    clear_staged(file, folder / ENVIRONMENT, folder / RESULT)
    if overwrite and file.is_file():
        _empty(folder)
    if file.is_file():
        before, now = decisive(Recipe.from_mapping(read_recipe(file))), decisive(recipe)
        earlier = before.get("edits", [])
        if earlier and len(earlier) == len(recipe.edits):
            # Older versions wrote them in another form, and no floors.
            before["edits"] = [
                {name: new[name] for name in ("floor",) if name in new} | whole(old)
                for old, new in zip(earlier, recipe.edits, strict=True)
            ]
        if changed := changes_of(before, now):
            listed = ", ".join(f"{name} {there!r} there, {here!r} now" for name, there, here in changed)
            raise ValueError(
                f"{folder} holds a run of another recipe ({listed}); take another --out, or --overwrite."
            )
        if (folder / RESULT).is_file() and (done := read_result(folder)).get("finished"):
            return done
    elif folder.is_dir() and any(folder.iterdir()):
        # A log may be there already, written by what started the run.
        strangers = [path.name for path in folder.iterdir() if path.suffix not in (".txt", ".log")]
        if strangers:
            raise ValueError(
                f"expected a new folder or that of a run, {folder} holds {strangers[0]!r} and no {RECIPE}; "
                "take another --out."
            )
    write_recipe(recipe, file)
    return None


def read_result(folder: Path) -> dict[str, Any]:
    """What is in ``result.json``; an error names the file."""
    path = folder / RESULT

    def damaged(why: object) -> ValueError:
        return ValueError(
            f"expected a JSON object in {path}, which is damaged ({why}); delete that file, and the command "
            "that trained makes it again from the last checkpoint."
        )

    try:
        values = read_object(path)
    except ValueError as error:
        raise damaged(error) from error
    for name in ("test", "best", "about"):
        if not isinstance(values.get(name), (dict, type(None))):
            raise damaged(f"its {name} is a {type(values[name]).__name__}")
    return values


def _empty(folder: Path) -> None:
    """Delete what is in the folder, which stays, with the lock on it.

    A kill leaves a run that was interrupted: its result goes first, and the recipe that makes it a run last.
    """
    first, last = folder / RESULT, folder / RECIPE
    inside = [path for path in folder.iterdir() if path not in (first, last)]
    for path in (first, *inside, last):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


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
        device=_device(recipe) if device is None else torch.device(device),
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
    file = folder / "result.json"
    if file.is_file():
        result = read_result(folder)
        if result["finished"]:
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


def _device(recipe: Recipe) -> torch.device:
    name = recipe.device or "cuda"
    return torch.device(name if name == "cpu" or torch.cuda.is_available() else "cpu")


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
