"""Small masked autoencoders around ViTs of every kind, with weights that hide no error, and their inputs."""

from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.train.mae import MaskedAutoencoder

TINY = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "class token": ("vit_tiny_patch16_224", {}),
    "dynamic size": ("test_vit", {"img_size": 16, "patch_size": 4, "depth": 2}),
    "oblong": ("vit_tiny_patch16_224", {"img_size": (8, 12), "patch_size": (4, 2), "in_chans": 1}),
    "registers": ("vit_tiny_patch16_224", {"reg_tokens": 2, "no_embed_class": True, "global_pool": "avg"}),
    "registers with positions": ("vit_tiny_patch16_224", {"reg_tokens": 2}),
    "dynamic, no class token": ("test_vit2", {"img_size": 16, "patch_size": 4, "depth": 2}),
    "attention pooling": ("test_vit3", {"img_size": 16, "patch_size": 8, "depth": 2}),
    "pre-norm": ("vit_tiny_patch16_224", {"pre_norm": True}),
    "no positions": ("vit_tiny_patch16_224", {"pos_embed": "none"}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
}


def encoder(family: str = "class token", **options: Any) -> nn.Module:
    name, own = FAMILIES[family]
    base = {"num_classes": 3} if name.startswith("test") else TINY
    torch.manual_seed(0)
    model = timm.create_model(name, **{**base, **own, **options})
    # timm's tokens and biases start near zero: an error there would not be seen.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def build(family: str = "class token", edit: Callable[[nn.Module], object] = id, **options: Any) -> Any:
    model = encoder(family)
    edit(model)
    torch.manual_seed(1)
    return MaskedAutoencoder(model, **{"mask_ratio": 0.6, "decoder_depth": 1, **options})


def inputs(
    mae: Any, count: int = 2, seed: int = 2, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = [rows * side for rows, side in zip(mae.grid, mae.patch_size, strict=True)]
    images = torch.randn(count, mae.channels, *size, generator=generator, dtype=torch.float64)
    return images.to(dtype), torch.rand(count, mae.tokens, generator=generator)


def grayed_embedding(model: nn.Module) -> object:
    return wp.gray_tokens(model, 0.7, "svd")


def all_edits(model: nn.Module) -> None:
    wp.gray_tokens(model, 0.7, "dct", where="blocks", blocks=0)  # depends on the order of the tokens
    wp.broadcast_context(model, scaled=True)
    wp.remove_skips(model, "attention", blocks=1)
