"""The model of a recipe: built by timm, initialised, loaded, edited."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from timm.layers import PatchEmbed
from torch import nn

import wellposed.surgery as surgery
from wellposed import anatomy
from wellposed.models import build, describe_weights, timm_architecture
from wellposed.nn import TokenGraying
from wellposed.surgery import Edits
from wellposed.text import indices
from wellposed.train.recipe import Recipe
from wellposed.train.start import start_from


@dataclass(frozen=True)
class Built:
    """A model with what plain timm needs to build it again: the architecture and its options."""

    model: nn.Module
    architecture: str
    options: dict[str, Any]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    edits: Edits
    notes: list[str] = field(default_factory=list)


def build_model(recipe: Recipe, classes: int, channels: int) -> Built:
    """The model of a resolved recipe, on the CPU; equal recipes give equal weights."""
    if recipe.model.startswith(("hf:", "tv:")):
        raise ValueError(
            f"expected a model of timm to train, got {recipe.model}; timm.list_models() lists all. In a loop "
            "of your own any model can be edited: wellposed.gray_tokens(model)."
        )
    options: dict[str, Any] = {"num_classes": classes, "in_chans": channels}
    if recipe.drop_path:
        options["drop_path_rate"] = recipe.drop_path
    _check_options(recipe, options)
    options |= recipe.model_options
    model, options = _build(recipe, options)
    _check_patches(model, recipe)
    if recipe.init == "xavier":
        _xavier(model, recipe.seed)
    edits = apply_edits(model, recipe)
    if recipe.start_from is not None:
        notes = start_from(model, recipe.start_from)
    else:
        notes = [f"Starts from {describe_weights(model)}."] if recipe.pretrained else []
    mean, std = _statistics(model, channels)
    architecture, own = timm_architecture(recipe.model)
    return Built(model, architecture, own | options, mean, std, edits, notes)


def _build(recipe: Recipe, options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The model as timm makes it; one that takes images of any size has no option for it."""
    wanted: dict[str, Any] = {} if recipe.patch_size is None else {"patch_size": recipe.patch_size}
    sized = wanted | {"img_size": recipe.image_size}
    start: dict[str, Any] = {"seed": recipe.seed, "pretrained": recipe.pretrained}
    try:
        return build(recipe.model, **start, **sized, **options), sized | options
    except TypeError as error:
        if "img_size" not in str(error):
            raise _refused(recipe, error) from error
    try:
        return build(recipe.model, **start, **wanted, **options), wanted | options
    except TypeError as error:
        raise _refused(recipe, error) from error


def _check_options(recipe: Recipe, of_the_data: dict[str, Any]) -> None:
    """A model of another number of classes or channels would fail in the first update."""
    for name in ("num_classes", "in_chans"):
        is_headless = recipe.task == "mae" and name == "num_classes"
        given = recipe.model_options.get(name, of_the_data[name])
        if given != of_the_data[name] and not is_headless:
            raise ValueError(
                f"{name} must be {of_the_data[name]}, as {recipe.data} has it, got {given!r} in "
                "model_options; leave it out."
            )


def _check_patches(model: nn.Module, recipe: Recipe) -> None:
    """What timm's patch embedding would refuse in its first forward pass."""
    embed, size = getattr(model, "patch_embed", None), recipe.image_size
    if not isinstance(embed, PatchEmbed) or size is None or embed.dynamic_img_pad:
        return
    patch = embed.patch_size[0]
    if patch > size or (size % patch and not embed.strict_img_size):
        fits = ", ".join(str(side) for side in range(1, size + 1) if size % side == 0)
        raise ValueError(
            f"patch_size must divide the side of the images, {size} pixels, got {patch}; take one of {fits}, "
            "or another image_size."
        )


def _refused(recipe: Recipe, error: TypeError) -> TypeError:
    return TypeError(
        f"timm's {recipe.model} does not take the options of the recipe: {error}. Leave it out of "
        "patch_size, drop_path or model_options."
    )


def _xavier(model: nn.Module, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)


def apply_edits(model: nn.Module, recipe: Recipe) -> Edits:
    """Put the recipe's edits into the model."""
    if recipe.graying is not None:
        for eps, blocks in _gray_plan(model, recipe):
            surgery.gray_tokens(
                model,
                eps,
                recipe.graying,
                recipe.gray_where,
                blocks=blocks,
                target_kappa=recipe.target_kappa,
                floor=recipe.gray_floor,
            )
    if recipe.broadcast is not None:
        surgery.broadcast_context(
            model,
            recipe.broadcast_where,
            scaled=recipe.broadcast == "cb_s",
            init=_scale_init(recipe),
            blocks=_chosen(recipe.broadcast_blocks),
        )
    if recipe.remove_skips is not None:
        surgery.remove_skips(model, recipe.remove_skips, blocks=_chosen(recipe.skip_blocks))
    if recipe.uniform_heads:
        surgery.uniform_heads(model, recipe.uniform_heads, blocks=_chosen(recipe.uniform_blocks))
    return surgery.edits(model)


def with_gray_floor(built: Built, floor: float | None) -> Built:
    """A model whose grayings have the floor; it is known only when the folder of the run is."""
    if floor is None:
        return built
    for module in built.model.modules():
        if isinstance(module, TokenGraying):
            module.floor = floor
    return replace(built, edits=surgery.edits(built.model))


def _chosen(text: str | None) -> list[int] | None:
    """Block indices; None, as in the edits, is every block that can take the edit."""
    return None if text is None else indices(text)


def _scale_init(recipe: Recipe) -> Literal["cb", "identity"]:
    """Scales that go into a trained model start as if they were not there."""
    is_trained = recipe.pretrained or recipe.start_from is not None
    return "identity" if is_trained and recipe.broadcast == "cb_s" else "cb"


def _gray_plan(model: nn.Module, recipe: Recipe) -> list[tuple[float | None, Any]]:
    if recipe.eps_per_block is None:
        return [(recipe.eps, _chosen(recipe.gray_blocks))]
    blocks = _chosen(recipe.gray_blocks)
    if blocks is None:
        blocks = list(range(len(anatomy.blocks(model))))
    if len(blocks) != len(recipe.eps_per_block):
        raise ValueError(
            f"eps_per_block must have one value for each of the {len(blocks)} blocks that are grayed, "
            f"got {len(recipe.eps_per_block)}; gray_blocks= names fewer blocks."
        )
    return list(zip(recipe.eps_per_block, blocks, strict=True))


def _statistics(model: nn.Module, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the pixels that the model's library expects."""
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    mean = tuple(config.get("mean", (0.5, 0.5, 0.5)))
    std = tuple(config.get("std", (0.5, 0.5, 0.5)))
    if len(mean) != channels:
        mean = (sum(mean) / len(mean),) * channels
        std = (sum(std) / len(std),) * channels
    return mean, std
