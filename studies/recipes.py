"""Recipes that studies share, by scale and data; equal recipes are one run for all of them.

Small: ViT-Tiny with 8 x 8 patches, so briefly that a study ends on one GPU in minutes; and for the embedded
digits a still smaller one that a laptop trains in half a minute. Paper: 300 epochs on ImageNet-1k at 224
pixels, with DeiT's augmentation.
"""

from typing import Any

from studies.study import Scale, data_name
from wellposed.demo import DIGITS
from wellposed.train import Recipe

TINY = "vit_tiny_patch16_224"
# Without skips a gradient may overflow now and then; such an update is skipped, and the record counts it.
COMMON: dict[str, Any] = {"trackers": (), "keep": 1, "on_nonfinite": "skip"}
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
    "epochs": 15,
    "batch_size": 256,
    "lr": 1e-3,
    "weight_decay": 0.05,
    "mixup": 0.2,
    "cutmix": 1.0,
    "precision": "bf16",
    "eval_every": 5,
    # A grid of short runs is bound by how long they take to start, and their blocks are mostly the same.
    "compile_blocks": True,
}

FEWER = {"cifar10": 20_000, "cifar100": 20_000}
"""Images to train with, of the set's 50,000: a grid of runs with three seeds then takes minutes."""

POOLED: dict[str, Any] = {"class_token": False, "global_pool": "avg"}
"""Without a class token a small ViT learns faster, and 64 tokens fill a GPU's tiles where 65 do not."""


def vit(scale: Scale, data: str, **fields: Any) -> Recipe:
    """A ViT for the data: as the papers have it, or one that is small for a GPU or for a laptop.

    >>> [vit("small", data).batch_size for data in ("digits", "cifar10:DIR")]
    [64, 256]
    >>> [vit("small", data).limit for data in ("cifar10:DIR", "packed:birds.npz")]
    [20000, None]
    """
    if scale == "paper":
        return Recipe.from_mapping(
            COMMON | UNWATCHED | DEIT | {"data": data, "model": "vit_base_patch16_224"} | fields
        )
    if data_name(data) == "digits":
        return Recipe.from_mapping(COMMON | UNWATCHED | dict(DIGITS) | {"data": data} | fields)
    model = {"data": data, "model": TINY, "model_options": POOLED}
    return Recipe.from_mapping(COMMON | UNWATCHED | small_images(data) | model | fields)


def small_images(data: str) -> dict[str, Any]:
    """Of the small scale, for sets of images."""
    return SMALL_IMAGES | {"limit": FEWER.get(data_name(data))}


MEASURED_DIGITS: dict[str, Any] = {"model": "test_vit", "epochs": 60, "batch_size": 128, "trackers": ()}
"""A model that a laptop trains in a minute, for studies that measure more than they train."""


def measured_vit(scale: Scale, data: str, **fields: Any) -> Recipe:
    """The plain ViT of the other studies, for what is measured on weights; the digits have a smaller one."""
    if data_name(data) == "digits":
        return Recipe.from_mapping(MEASURED_DIGITS | {"data": data} | fields)
    return vit(scale, data, **fields)


BRIEF: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 64,
    "lr": 2e-3,
    "weight_decay": 0.05,
    "mixup": 0.0,
    "eval_every": 3,
}
"""About 940 updates of 20,000 images: a minute on one core, so that eight seeds are cheap."""
BRIEF_MODEL: dict[str, Any] = {"embed_dim": 64, "depth": 6, "num_heads": 4}
HEADS: dict[str, dict[str, Any]] = {"class token": {}, "mean pool": POOLED}
PATCHES: dict[str, Any] = {"image_size": 32, "patch_size": 8}
"""16 patches of 8 x 8 x 3 pixels: only where a patch has far more pixels than there are tokens can graying
move kappa of the first block, whose tokens have the position embedding too."""


def brief_vit(scale: Scale, data: str, head: str = "class token", **fields: Any) -> Recipe:
    """A ViT 64 wide with 6 blocks, for questions that take many seeds; the digits have their own.

    >>> brief_vit("small", "packed:cifar10-20k.npz", head="mean pool").model_options["global_pool"]
    'avg'
    """
    options = HEADS[head] | fields.pop("model_options", {})
    if scale == "paper":
        return vit(scale, data, model_options=options, **fields)
    if data_name(data) == "digits":
        return vit(scale, data, model_options=dict(DIGITS["model_options"]) | options, **fields)
    made = {"data": data, "model": TINY, "model_options": BRIEF_MODEL | options, **PATCHES}
    return Recipe.from_mapping(COMMON | UNWATCHED | BRIEF | made | fields)
