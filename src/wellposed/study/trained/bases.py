"""Recipes that studies share, by scale and data.

Small: ViT-Tiny with patches of 4 pixels for CIFAR, and for the embedded digits a still smaller one that a
laptop trains in half a minute. Paper: 300 epochs on ImageNet-1k at 224 pixels, with DeiT's augmentation.
"""

from typing import Any

from wellposed.study.plan import Scale, data_name
from wellposed.train.recipe import Recipe

TINY = "vit_tiny_patch16_224"
DIGITS_MODEL = {"embed_dim": 48, "depth": 6, "num_heads": 3}
"""The digits have 16 patches; a wide model has nothing to learn from them."""

COMMON: dict[str, Any] = {"trackers": (), "keep": 1}
# The monitor compiles away nothing and costs 1%; a study measures on the trained weights instead.
UNWATCHED = {"monitor_every": 0}

DEIT: dict[str, Any] = {
    "image_size": 224,
    "epochs": 300,
    "batch_size": 1024,
    "lr": 1e-3,
    "warmup_epochs": 5,
    "weight_decay": 0.05,
    "drop_path": 0.1,
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "mixup": 0.8,
    "cutmix": 1.0,
    "erase": 0.25,
    "precision": "bf16",
    "placement": "stream",
    "workers": 10,
}
"""What both papers train ImageNet models with; ``torchrun`` spreads the batch over GPUs."""

SMALL_IMAGES: dict[str, Any] = {
    "epochs": 100,
    "batch_size": 512,
    "lr": 1e-3,
    "warmup_epochs": 5,
    "weight_decay": 0.05,
    "mixup": 0.2,
    "cutmix": 1.0,
    "erase": 0.25,
    "precision": "bf16",
    "eval_every": 2,
}


def vit(scale: Scale, data: str, **fields: Any) -> Recipe:
    """A ViT for the data: as the papers have it, or one that is small for a GPU or for a laptop.

    >>> vit("small", "digits").epochs < vit("small", "cifar10:DIR").epochs < vit("paper", "DIR").epochs
    True
    """
    if scale == "paper":
        return Recipe(**COMMON | UNWATCHED | DEIT | {"data": data, "model": "vit_base_patch16_224"} | fields)
    if data_name(data) == "digits":
        return Recipe(**COMMON | UNWATCHED | digits_fields() | {"data": data} | fields)
    return Recipe(**COMMON | UNWATCHED | SMALL_IMAGES | {"data": data, "model": TINY} | fields)


def digits_fields() -> dict[str, Any]:
    return {
        "model": TINY,
        "model_options": DIGITS_MODEL,
        "epochs": 30,
        "batch_size": 64,
        "lr": 1e-3,
        "mixup": 0.0,
        "eval_every": 2,
    }
