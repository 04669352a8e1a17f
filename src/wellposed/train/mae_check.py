"""Which models can be pre-trained as masked autoencoders, and which recipes do so in earnest."""

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from wellposed.anatomy.model import Embedding, refuse_wrapped
from wellposed.anatomy.table import embedding_row
from wellposed.train.mae_masks import visible_count
from wellposed.train.recipe import Recipe

_REASONS = {
    "SwinTransformer": "its windows need the whole grid of patches",
    "SwinTransformerV2": "its windows need the whole grid of patches",
    "PyramidVisionTransformerV2": "it shrinks the grid of patches from stage to stage",
    "ConvMixer": "its convolutions need the whole grid of patches",
    "Cait": "its class token enters after the blocks",
    "Xcit": "its blocks convolve the grid of patches",
    "Eva": "its attention is told each token's place apart from the tokens",
    "Beit": "its attention is told each token's place apart from the tokens",
    "VisionTransformerRelPos": "its attention is told each token's place apart from the tokens",
    "MlpMixer": "it mixes a fixed number of tokens",
}
_REMEDY = "use a ViT of timm, such as vit_tiny_patch16_224, deit3_small_patch16_224 or test_vit"


def check_mae(model: nn.Module, mask_ratio: float | None = None) -> VisionTransformer:
    """The model itself, if patches can be left out between its embedding and its blocks; else a ValueError.

    That is so for timm's VisionTransformer: every token carries its own position, and the blocks take any
    number of tokens. ``mask_ratio`` is checked too where it is given.
    """
    refuse_wrapped(model)
    name = type(model).__name__
    if not isinstance(model, VisionTransformer):
        reason = _REASONS.get(name, "it is not a VisionTransformer of timm")
        raise ValueError(f"a masked autoencoder needs a plain ViT, got {name}: {reason}; {_REMEDY}.")
    if type(model).forward_features is not VisionTransformer.forward_features:
        raise ValueError(
            f"a masked autoencoder runs the parts of a ViT in timm's order, but {name} has a "
            f"forward_features of its own; {_REMEDY}."
        )
    row = embedding_row(model.patch_embed)
    found = Embedding("patch_embed", model.patch_embed, row).patch_convolution() if row else ""
    if not isinstance(found, tuple):
        reason = found or f"{type(model.patch_embed).__name__} is not known to embed each patch alone"
        raise ValueError(
            f"a masked autoencoder needs patches embedded one by one, got {name}: {reason}; {_REMEDY}."
        )
    if not isinstance(model.patch_drop, nn.Identity):
        raise ValueError(
            "a masked autoencoder chooses the visible patches itself, but the model drops some of its own; "
            "leave patch_drop_rate out."
        )
    (height, width), patch = model.patch_embed.img_size, model.patch_embed.patch_size
    if height % patch[0] or width % patch[1]:
        raise ValueError(
            f"image size must be a multiple of the patch size {patch[0]} x {patch[1]}, "
            f"got {height} x {width}; choose another image_size or patch_size."
        )
    if mask_ratio is not None:
        visible_count(model.patch_embed.num_patches, mask_ratio)
    return model


def mae_warnings(recipe: Recipe) -> list[str]:
    """What makes a masked pre-training less than it seems, in sentences."""
    if recipe.task != "mae" or recipe.graying is None or recipe.gray_where == "blocks":
        return []
    return [
        f"gray_where={recipe.gray_where} mixes all patches before some are hidden: the visible tokens hold "
        "something of the hidden ones, and the task is easier than it should be. "
        "gray_where=blocks gray_blocks=0 grays the visible tokens only."
    ]
