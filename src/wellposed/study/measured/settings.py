"""The runs that are measured: one plain ViT, of a size that fits the data."""

from typing import Any

from wellposed.study.plan import Scale
from wellposed.train.recipe import Recipe

_DIGITS: dict[str, Any] = {"model": "test_vit", "epochs": 60, "batch_size": 128, "trackers": ()}
_SMALL: dict[str, Any] = {
    "model": "vit_tiny_patch16_224",
    "epochs": 100,
    "batch_size": 256,
    "lr": 1e-3,
    "warmup_epochs": 5,
    "erase": 0.25,
    "precision": "bf16",
    "trackers": (),
}
_PAPER: dict[str, Any] = {
    "model": "vit_base_patch16_224",
    "image_size": 224,
    "epochs": 300,
    "batch_size": 1024,
    "lr": 1e-3,
    "warmup_epochs": 5,
    "drop_path": 0.1,
    "auto_augment": "rand-m9-mstd0.5",
    "erase": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "precision": "bf16",
    "trackers": (),
}
_CHECKPOINTS = {"digits": 60, "small": 2000, "paper": 30000}
"""Updates between two, for about ten of them: of 600 with the digits, 20,000 with CIFAR, 375,000."""


def plain_vit(scale: Scale, data: str) -> Recipe:
    """The embedded digits have a ViT of their own, which a laptop trains in a minute, at either scale."""
    fields = _DIGITS if data == "digits" else _SMALL if scale == "small" else _PAPER
    return Recipe(data=data, **fields)


def plain_vit_with_checkpoints(scale: Scale, data: str) -> Recipe:
    """The same with its checkpoints kept, to look back at training."""
    every = _CHECKPOINTS["digits" if data == "digits" else scale]
    return Recipe(**plain_vit(scale, data).to_mapping() | {"checkpoint_every": every, "keep": 100})
