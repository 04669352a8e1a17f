"""A finished run as a model again, with test images to measure it on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.models import load_weights
from wellposed.probes import diagnose
from wellposed.records import Record
from wellposed.train.data import open_data
from wellposed.train.data.decoding import decode_all
from wellposed.train.model import build_model
from wellposed.train.recipe import Recipe
from wellposed.train.recipe_file import combine, read_recipe


@dataclass(frozen=True)
class Trained:
    """A model with its edits and weights, in evaluation mode, and images (B, C, H, W) as it takes them."""

    model: nn.Module
    images: Tensor
    recipe: Recipe


def trained(folder: Path, images: int = 32, weights: str = "last") -> Trained:
    """The model of a run's folder, on a GPU if there is one, and the first so many of a shuffled test set.

    The order is the same for every run with the same test images, so that variants see the same ones.
    """
    recipe = combine(read_recipe(folder / "recipe.toml"), {"start_from": None, "pretrained": False})
    data = open_data(
        recipe.data, holdout=recipe.holdout, seed=recipe.seed, skip_unreadable=recipe.skip_unreadable
    )
    built = build_model(recipe, len(data.classes), data.channels)
    load_weights(built.model, folder / weights / "model.safetensors")
    device = "cuda" if torch.cuda.is_available() and recipe.device != "cpu" else "cpu"
    # Sets are often sorted by class; the first of a shuffled order are of many.
    order = torch.randperm(len(data.test), generator=torch.Generator().manual_seed(0))[:images].numpy()
    assert recipe.image_size is not None
    picked = decode_all(data.test.subset(order), recipe.image_size, data.channels, progress=False)
    pixels = torch.tensor(picked)  # a copy: the array may be read-only
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (built.mean, built.std))
    batch = (pixels.float() / 255 - mean) / std
    return Trained(built.model.eval().to(device), batch.to(device), recipe)


def conditioning_and_density(folder: Path, study: Path) -> list[dict[str, Any]]:
    """Kappa at each position of each block, and the entropy of each head, for ``Study.after``."""
    run = trained(folder)
    found = diagnose(run.model, run.images, attention_images=len(run.images), progress=False)
    return [_row(record) for record in found.records if record.measure in ("kappa", "entropy")]


def _row(record: Record) -> dict[str, Any]:
    where = {"block": record.block, "position": record.position, "head": record.head}
    return {
        "measure": record.measure,
        "value": record.value,
        **{name: value for name, value in where.items() if value not in (None, "")},
        **({} if record.status == "ok" else {"status": record.status}),
    }
