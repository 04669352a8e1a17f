"""What ``wellposed diagnose`` is given: a model by name with images, or the folder of a training run."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import timm
from torch import nn

from wellposed.environment import without_secrets
from wellposed.models import build, describe_weights, has_random_weights
from wellposed.probes.diagnosis import Diagnosis
from wellposed.probes.images import source_of
from wellposed.train.edits import apply_edits
from wellposed.train.export import RECIPE
from wellposed.train.recipe import Recipe
from wellposed.train.runs import IMAGES, open_run

OF_A_RUN = ("best", "last")
_LIBRARIES = ("hf", "tv", "hf-hub", "local-dir")


@dataclass(frozen=True)
class Target:
    """A model, what to show it, and what to say of both in the report."""

    model: nn.Module
    images: Any
    about: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def is_folder(name: str) -> bool:
    """Whether a name means a folder: a path, or a folder here that no model of timm has the name of.

    >>> is_folder("runs/first"), is_folder("vit_tiny_patch16_224"), is_folder("hf:models/mine")
    (True, False, False)
    """
    if name.partition(":")[0] in _LIBRARIES and ":" in name:
        return False
    if os.sep in name or "/" in name or name.startswith((".", "~")):
        return True
    return Path(name).is_dir() and not _is_of_timm(name)


def named_model(
    name: str,
    images: Path | None,
    *,
    weights: str | None,
    pretrained: bool,
    image_size: int | None,
    options: Mapping[str, Any],
    seed: int,
    device: str,
    edits: Mapping[str, Any] | None = None,
) -> Target:
    """A model by name, edited as a recipe with these fields says; it has no images of its own."""
    is_known = ":" in name or _is_of_timm(name)
    if images is None and is_known:
        raise ValueError(f"expected images to show {name}, got none; name a folder of them: --images DIR.")
    if weights in OF_A_RUN:
        raise ValueError(
            f"--weights {weights} is of a run, got the model {name}; name the run's folder in its place, or "
            "a file of weights as --weights."
        )
    options = dict(options)
    if image_size is not None:
        size = "image_size" if name.startswith(("hf:", "tv:")) else "img_size"
        if size in options:
            raise ValueError(f"expected --image-size or --model-option {size}=, got both; leave one out.")
        options[size] = image_size
    if images is not None and (pretrained or not images.exists()):
        source_of(images)  # that there are none is found before anything is downloaded
    try:
        model = build(name, weights=weights, pretrained=pretrained or None, seed=seed, **options)
    except ValueError as error:
        if is_known:
            raise
        raise ValueError(f"{error} Nor is there a folder {name} of a run.") from error
    except TypeError as error:
        if not options:
            raise
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise TypeError(f"{name} does not take the options {given}: {error}.") from error
    assert images is not None
    if edits:
        apply_edits(model, Recipe(**edits))
    about = {"model": name, "weights": describe_weights(model), "seed": seed, "data": _name(images)}
    about["random"] = has_random_weights(model)
    return Target(model.to(device), images, about)


def trained_model(
    folder: str, images: Path | None, *, weights: str | None, count: int | None, device: str
) -> Target:
    """The model of a run with its edits; its own test images unless others are given."""
    wanted = weights or OF_A_RUN[0]
    if wanted not in OF_A_RUN:
        raise ValueError(f"--weights of a run must be {' or '.join(OF_A_RUN)}, got {weights!r}.")
    if images is not None:
        source_of(images)
    run = open_run(folder, count or IMAGES, device=device)
    model = run.model(cast(Literal["best", "last"], wanted))
    about = {
        "model": run.recipe.model,
        "run": run.folder.resolve().name,
        "weights": describe_weights(model),
        "seed": run.recipe.seed,
    }
    if images is not None:
        return Target(model, images, about | {"data": _name(images)})
    data = without_secrets(run.recipe.data)
    try:
        own = run.images
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"cannot open the data of the run, {data}: {str(error).rstrip('.')}. Start where the run was "
            "started, or name other images: --images DIR."
        ) from error
    return Target(model, own, about | {"data": data}, run.image_notes)


def kept_diagnosis(name: str) -> Diagnosis | None:
    """What ``wellposed diagnose --out`` has written, a file or a folder; None for another name."""
    path = Path(name).expanduser()
    file = path / "diagnosis.json" if path.is_dir() and not (path / RECIPE).is_file() else path
    return Diagnosis.from_json(file) if file.is_file() and file.suffix == ".json" else None


def _is_of_timm(name: str) -> bool:
    return bool(timm.is_model(name.partition(".")[0]))


def _name(images: Path) -> str:
    return images.name or str(images)
