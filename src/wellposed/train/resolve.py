"""Filling in what a recipe leaves open, from the data and the model.

The rules are few and what they chose is written into the run's recipe, so that running that file again does
the same whatever the rules become.
"""

from dataclasses import replace
from typing import Any

import timm
import torch
from torch import nn

from wellposed.linalg import spectral_plan
from wellposed.models import timm_architecture
from wellposed.nn.graying import DEFAULT_EPS
from wellposed.train.data import ImageData
from wellposed.train.recipe import Recipe

TINY, SMALL = 16, 64
"""Images of this side and between are shifted, larger ones get random resized crops. Of still smaller ones a
pixel is too much."""


def resolve(recipe: Recipe, data: ImageData) -> Recipe:
    """The recipe with image and patch size, eps and augmentation filled in."""
    size = recipe.image_size or data.size or _input_side(recipe.model)
    chosen: dict[str, Any] = {"image_size": size}
    if recipe.patch_size is None and "patch_size" not in recipe.model_options:
        chosen["patch_size"] = _patch_for(recipe, size)
    if recipe.graying in DEFAULT_EPS and all(
        value is None for value in (recipe.eps, recipe.eps_per_block, recipe.target_kappa)
    ):
        chosen["eps"] = DEFAULT_EPS[recipe.graying]
    if recipe.flip is None:
        chosen["flip"] = 0.5 if data.photographs else 0.0
    if recipe.crop_scale is None and size > SMALL and data.photographs:
        chosen["crop_scale"] = 0.08
    if recipe.crop_padding is None:
        is_cropped = recipe.crop_scale is not None or "crop_scale" in chosen
        chosen["crop_padding"] = size // 8 if TINY <= size <= SMALL and not is_cropped else 0
    if recipe.mixup is None:
        # A linear probe has few weights; mixed images would only slow it.
        chosen["mixup"] = 0.2 if recipe.task == "classify" else 0.0
    if recipe.warmup_epochs is None:
        chosen["warmup_epochs"] = min(recipe.epochs / 10, 5.0)
    return replace(recipe, **chosen)


def resolve_for(recipe: Recipe, model: nn.Module) -> Recipe:
    """The recipe with what hangs on the model as it was built: wider ones learn with smaller steps."""
    if recipe.lr is not None:
        return recipe
    width: Any = getattr(model, "num_features", None)
    if not isinstance(width, int):
        raise ValueError(f"the width of {recipe.model} is not known, which tells the learning rate; set lr.")
    return replace(recipe, lr=min(0.2 / width, 3e-3))


def resolve_floor(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe with the floor that its graying has on a device, so that it has the same on others."""
    if not recipe.has_device_floor:
        return recipe
    # A target for kappa needs more digits than float32 has; see wellposed.nn.functional.gray.
    is_wide = recipe.target_kappa is not None and device.type != "mps"
    tokens = torch.empty(0, dtype=torch.float32, device=device)
    plan = spectral_plan(tokens, floor=recipe.gray_floor, precision="float64" if is_wide else "auto")
    return replace(recipe, gray_floor=plan.floor)


_PLACES = ("hf-hub:", "local-dir:")
"""Names of timm whose configuration says how the model is made."""


def _input_side(name: str) -> int:
    if name.startswith(_PLACES):
        architecture, arguments = timm_architecture(name)
        side = arguments.get("img_size")
        if side is not None:
            return int(side[-1] if isinstance(side, (list, tuple)) else side)
        name = architecture
    config: Any = timm.get_pretrained_cfg(name, allow_unregistered=False)
    if config is None:
        return 224
    return int(config.input_size[-1])


def _patch_for(recipe: Recipe, size: int) -> int | None:
    """The model's own patch if it cuts the image into enough pieces, else the largest one that does.

    None where the model has no patch size, or is taken as it is.
    """
    own = own_patch(recipe.model)
    if own is None:
        return None
    least = 4 if size <= 16 else 7
    if size % own == 0 and size // own >= least:
        return None
    if size < least:
        raise ValueError(
            f"image_size must be at least {least}, so that there are {least} x {least} patches, got {size}; "
            "raise it, or set patch_size."
        )
    return next(patch for patch in range(size // least, 0, -1) if size % patch == 0)


def own_patch(name: str) -> int | None:
    """The side of the patches of a timm model as it comes, if it has an option for them."""
    arguments: dict[str, Any] = {}
    if name.startswith(_PLACES):
        name, arguments = timm_architecture(name)
    if not timm.is_model(name.partition(".")[0]):
        return None  # building it tells what is wrong with the name
    try:
        model: Any = _as_it_comes(name, **arguments)
        patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
        side = int(patch[0]) if isinstance(patch, (tuple, list)) else patch
        if side is not None:
            _as_it_comes(name, **{**arguments, "patch_size": side})
    except TypeError:  # no option of that name
        return None
    return side


def _as_it_comes(name: str, **options: Any) -> nn.Module:
    """The model without memory for its weights; older releases of timm need it for some models."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return timm.create_model(name, **options)  # type: ignore[no-any-return]
        except (RuntimeError, ValueError):
            return timm.create_model(name, **options)  # type: ignore[no-any-return]
