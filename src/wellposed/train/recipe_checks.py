"""What a recipe's values must keep to: each field's range, and fields that need or exclude one another."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wellposed.text import indices

if TYPE_CHECKING:
    from wellposed.train.recipe import Recipe

# fmt: off
_RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    ("at least 1", lambda value: value >= 1, (
        "epochs", "batch_size", "accumulate", "eval_every", "log_every", "checkpoint_every", "keep",
        "limit", "image_size", "patch_size", "decoder_depth", "decoder_width", "target_kappa")),
    ("at least 0", lambda value: value >= 0, (
        "workers", "monitor_every", "collapse_patience", "warmup_epochs", "min_lr", "weight_decay",
        "crop_padding", "mixup", "cutmix", "uniform_heads")),
    ("at least 0 and below 2**63", lambda value: 0 <= value < 2**63, ("seed",)),
    ("in [0, 1]", lambda value: 0 <= value <= 1, (
        "flip", "erase", "smoothing", "drop_path", "color_jitter", "ema", "mix_probability")),
    ("in (0, 1]", lambda value: 0 < value <= 1, (
        "eps", "eps_end", "eps_per_block", "gray_floor", "crop_scale", "layer_decay")),
    ("in (0, 1)", lambda value: 0 < value < 1, ("holdout", "mask_ratio")),
    ("positive", lambda value: value > 0, ("lr", "clip_grad")),
)
# fmt: on
RANGES = {name: (words, holds) for words, holds, names in _RANGES for name in names}
_BLOCKS = ("gray_blocks", "broadcast_blocks", "skip_blocks", "uniform_blocks")
_POWERS = ("eps", "eps_end", "eps_per_block")


def check_value(name: str, value: Any) -> None:
    """Raise if a field's value, of the right type, is not one that it can have."""
    if value is None:
        return
    if name in RANGES:
        words, holds = RANGES[name]
        for number in value if isinstance(value, tuple) else (value,):
            if not (math.isfinite(number) and holds(number)):
                each = "hold values" if isinstance(value, tuple) else "be"
                raise ValueError(f"{name} must {each} {words}, got {number}.")
    if name in _BLOCKS:
        indices(value, name)


def check_together(recipe: "Recipe") -> None:
    """Raise if fields do not go together."""
    _check_needs(recipe)
    _check_powers(recipe)
    _check_eps_per_block(recipe)
    trained = [name for name in ("pretrained", "start_from") if getattr(recipe, name)]
    if len(trained) == 2:
        raise ValueError("expected pretrained or start_from, got both; leave one of them out.")
    if trained and recipe.init != "timm":
        raise ValueError(
            f"init={recipe.init} would draw anew what {trained[0]} loads; leave one of them out."
        )
    if recipe.task == "probe" and not trained:
        raise ValueError(
            "task=probe trains a head on trained weights; add start_from=RUN_OR_FILE or pretrained."
        )
    if recipe.task == "mae" and (recipe.mixup or recipe.cutmix):
        raise ValueError("task=mae has no labels to mix; leave mixup and cutmix out.")
    if recipe.task == "mae" and recipe.collapse_patience:
        raise ValueError("task=mae has no accuracy that could collapse; leave collapse_patience out.")
    if recipe.mix_probability != 1 and recipe.mixup == 0 and recipe.cutmix == 0:
        raise ValueError("mix_probability does nothing alone; add mixup or cutmix, or leave it out.")
    if recipe.remove_skips is not None and recipe.drop_path:
        raise ValueError(
            "drop_path drops branches, and where remove_skips has left no skip beside them nothing of an "
            "image would be left; leave one of them out."
        )
    if recipe.warmup_epochs is not None and recipe.warmup_epochs >= recipe.epochs:
        raise ValueError(
            f"warmup_epochs must be less than epochs, got {recipe.warmup_epochs:g} and {recipe.epochs}; "
            "lower it, or leave it out."
        )
    if recipe.batch_size % recipe.accumulate:
        raise ValueError(
            f"batch_size must be a multiple of accumulate, got {recipe.batch_size} and {recipe.accumulate}."
        )


def _check_needs(recipe: "Recipe") -> None:
    """Fields that only mean something beside others."""
    grays = recipe.graying is not None
    grays_blocks = grays and recipe.gray_where == "blocks"
    needs = {
        "eps": (grays, "graying=svd, dct or spectral"),
        "eps_end": (grays, "graying=svd, dct or spectral"),
        "eps_per_block": (grays_blocks, "graying=... and gray_where=blocks"),
        "target_kappa": (recipe.graying == "spectral", "graying=spectral"),
        "gray_floor": (grays, "graying=svd, dct, spectral or condition"),
        "gray_blocks": (grays_blocks, "graying=... and gray_where=blocks"),
        "broadcast_blocks": (recipe.broadcast is not None, "broadcast=cb or cb_s"),
        "skip_blocks": (recipe.remove_skips is not None, "remove_skips=..."),
        "uniform_blocks": (recipe.uniform_heads > 0, "uniform_heads=1 or more"),
    }
    for name, (holds, remedy) in needs.items():
        if getattr(recipe, name) is not None and not holds:
            raise ValueError(f"{name} does nothing alone; add {remedy}, or leave it out.")


def _check_powers(recipe: "Recipe") -> None:
    """Grayings without a power, and those that find it themselves."""
    given = [name for name in _POWERS if getattr(recipe, name) is not None]
    if given and recipe.graying == "condition":
        raise ValueError(f"{given[0]} is of a power, which graying=condition has not; leave it out.")
    if given and recipe.target_kappa is not None:
        raise ValueError(
            f"target_kappa stands instead of a power, got {given[0]} too; leave one of them out."
        )


def _check_eps_per_block(recipe: "Recipe") -> None:
    if recipe.eps_per_block is None:
        return
    if recipe.eps is not None or recipe.eps_end is not None:
        raise ValueError("expected eps_per_block or eps and eps_end, got both; leave one of them out.")
    blocks = None if recipe.gray_blocks is None else indices(recipe.gray_blocks, "gray_blocks")
    if blocks is not None and len(blocks) != len(recipe.eps_per_block):
        raise ValueError(
            f"eps_per_block must have one power for each of gray_blocks, got {len(recipe.eps_per_block)} "
            f"powers for {len(blocks)} blocks."
        )
