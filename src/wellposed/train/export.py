"""Trained weights as a folder that plain timm loads, with a model card and the recipe."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from torch import Tensor

from wellposed.models import timm_architecture
from wellposed.surgery.record import Edit
from wellposed.train.checkpoint import durable
from wellposed.train.checkpoint.manifest import file_hash
from wellposed.train.environment import without_secrets
from wellposed.train.folder_swap import replaced
from wellposed.train.model_card import Exported, model_card
from wellposed.train.recipe import Recipe
from wellposed.train.recipe_file import recipe_text
from wellposed.train.report.run_log import plain

WEIGHTS = "model.safetensors"


def export_weights(
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    recipe: Recipe,
    architecture: str | None = None,
    model_kwargs: Mapping[str, Any],
    classes: Sequence[str],
    mean: Sequence[float],
    std: Sequence[float],
    image_size: int,
    accuracy: float | None,
    update: int,
    edits: Sequence[Edit],
    environment: Mapping[str, Any],
    train_images: int | None = None,
    test_images: int | None = None,
    note: str = "",
) -> None:
    """Write the folder; one that is there already stays whole until the new one takes its place.

    Args:
        folder: of these weights alone.
        state: the model's state dict, with the names it has when it is not compiled or wrapped.
        recipe: with all fields filled in.
        architecture: timm's name of it; None is that of ``recipe.model``.
        model_kwargs: with which ``timm.create_model(architecture, ...)`` makes the model, edits aside.
        classes: names in the order of the labels; none for an encoder without a head.
        mean, std: of the channels, for pixels from 0 to 1.
        image_size: side in pixels.
        accuracy: on the test images, None if it was not tested.
        update: how many updates the weights have seen.
        edits: of the model, as :func:`wellposed.edits` gives them.
        environment: of :func:`wellposed.train.environment.environment`.
        train_images, test_images: how many there were, for the card.
        note: a sentence for the card, such as that the weights are an average.
    """
    recipe = dataclasses.replace(recipe, data=without_secrets(recipe.data))
    exported = Exported(
        recipe=recipe,
        architecture=timm_architecture(recipe.model)[0] if architecture is None else architecture,
        model_kwargs=dict(model_kwargs),
        classes=tuple(classes),
        mean=tuple(mean),
        std=tuple(std),
        image_size=image_size,
        accuracy=accuracy,
        update=update,
        edits=tuple(edits),
        environment=environment,
        train_images=train_images,
        test_images=test_images,
        note=note,
    )
    with replaced(folder) as staged:
        durable.write_tensors(staged / WEIGHTS, state)
        texts = {
            "config.json": _config_text(exported, file_hash(staged / WEIGHTS)),
            "README.md": model_card(exported),
            "recipe.toml": recipe_text(recipe),
        }
        for name, text in texts.items():
            durable.write_bytes(staged / name, text.encode())


def timm_config(exported: Exported) -> dict[str, Any]:
    """What timm reads of a folder or of the hub: how to build the model, and how its images are prepared."""
    registered = timm.get_pretrained_cfg(exported.architecture)
    known = registered.to_dict() if registered is not None else {}
    return {
        "architecture": exported.architecture,
        "num_classes": exported.num_classes,
        "label_names": list(exported.classes) or None,
        "model_args": exported.model_kwargs,
        "pretrained_cfg": {
            # Whether the size is an argument of the model; the layer that another number of classes replaces.
            **{name: known[name] for name in ("fixed_input_size", "classifier") if name in known},
            # timm would adapt a first layer of other than three channels, that is already as it should be.
            "first_conv": None,
            "input_size": [len(exported.mean), exported.image_size, exported.image_size],
            "mean": list(exported.mean),
            "std": list(exported.std),
            "num_classes": exported.num_classes,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "center",
        },
    }


def _config_text(exported: Exported, sha256: str) -> str:
    config = timm_config(exported)
    config["wellposed"] = {
        "accuracy": plain(exported.accuracy),
        "update": exported.update,
        "sha256": sha256,
        "edits": [dataclasses.asdict(edit) for edit in exported.edits],
        "environment": plain(exported.environment),
    }
    try:
        return json.dumps(config, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(
            "expected options for timm that JSON can hold (numbers, texts, lists, true and false), got "
            f"{exported.model_kwargs}: {error}; leave the option out of model_options."
        ) from error
