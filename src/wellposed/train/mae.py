"""Masked autoencoder (MAE, arXiv 2111.06377) around a ViT of timm.

Most patches are hidden; the encoder sees the others, and a small decoder predicts the pixels of the hidden
ones. The encoder is the user's own model, edits included: they run on what passes where they were put. Which
patches are hidden is a pure function of (seed, update) and of the place in the batch.

Shapes: B images, C channels, N patches in raster order, K visible ones, D channels of a token, P = C * height
* width values of one patch, read as a patch convolution reads them: channel, row, column.

>>> images = torch.arange(32.0).reshape(1, 2, 4, 4)
>>> to_patches(images, (2, 4)).shape
torch.Size([1, 2, 16])
>>> torch.equal(to_images(to_patches(images, (2, 4)), 2, (2, 1), (2, 4)), images)
True
>>> noise = torch.tensor([[0.9, 0.1, 0.5, 0.3]])
>>> mask = mask_of(noise, visible=2)
>>> mask.hidden.tolist(), mask.visible.tolist(), mask.restore.tolist()
([[True, False, True, False]], [[1, 3]], [[2, 0, 3, 1]])

>>> import timm
>>> encoder = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1)
>>> mae = MaskedAutoencoder(encoder, mask_ratio=0.75)
>>> out = mae(torch.randn(2, 3, 32, 32), torch.rand(2, mae.tokens))
>>> out.prediction.shape, out.mask.sum(1).tolist()
(torch.Size([2, 16, 192]), [12, 12])
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models import checkpoint_seq
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from wellposed.anatomy.model import Embedding, refuse_wrapped
from wellposed.anatomy.table import embedding_row
from wellposed.train.edits import grayings
from wellposed.train.order import Purpose, generator
from wellposed.train.recipe import Recipe

_FLOOR = 1e-6
"""Added to the variance, as in MAE's own code: flat patches become zeros."""


def to_patches(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """(B, N, P) of images (B, C, H, W) whose sides are multiples of the patch's."""
    count, channels, image_height, image_width = images.shape
    height, width = patch_size
    pieces = images.reshape(count, channels, image_height // height, height, image_width // width, width)
    return pieces.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def to_images(patches: Tensor, channels: int, grid: tuple[int, int], patch_size: tuple[int, int]) -> Tensor:
    """Undo :func:`to_patches`; ``grid`` is (rows, columns) of patches."""
    pieces = patches.reshape(-1, *grid, channels, *patch_size).permute(0, 3, 1, 4, 2, 5)
    return pieces.flatten(4).flatten(2, 3)


def standardise(patches: Tensor) -> Tensor:
    """Each patch (B, N, P) minus its mean, by its standard deviation."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + _FLOOR).sqrt()


_TEST_BLOCK = 256
"""Test images whose masks are drawn together."""


class Mask(NamedTuple):
    """What is hidden in a batch of images.

    Attributes:
        hidden: (B, N) bool.
        visible: (B, K) indices of the visible patches, in raster order: an operation that depends on the
            order of the tokens, as DCT graying does, sees them in the order of a whole image.
        restore: (B, N) for each patch its place in the row [visible patches, hidden patches].
    """

    hidden: Tensor
    visible: Tensor
    restore: Tensor


def mask_noise(
    seed: int, update: int, batch_size: int, tokens: int, *, split: Literal["train", "test"] = "train"
) -> Tensor:
    """(batch_size, tokens) uniform numbers on the CPU, for the whole batch of an update.

    A process takes the rows of its own images; so the masks do not depend on the number of processes, nor on
    what was drawn before.

    >>> torch.equal(mask_noise(0, 5, 2, 9), mask_noise(0, 5, 4, 9)[:2])
    True
    """
    purpose = Purpose.MASK if split == "train" else Purpose.TEST_MASK
    return torch.from_numpy(generator(seed, purpose, update).random((batch_size, tokens), dtype=np.float32))


def fixed_mask_noise(seed: int, first: int, count: int, tokens: int) -> Tensor:
    """(count, tokens) for the test images from position ``first`` on, the same in any division into batches.

    >>> torch.equal(fixed_mask_noise(0, 250, 20, 9)[5:], fixed_mask_noise(0, 255, 15, 9))
    True
    """
    blocks = range(first // _TEST_BLOCK, (first + count - 1) // _TEST_BLOCK + 1)
    noise = torch.cat([mask_noise(seed, block, _TEST_BLOCK, tokens, split="test") for block in blocks])
    start = first - blocks.start * _TEST_BLOCK
    return noise[start : start + count]


def visible_count(tokens: int, mask_ratio: float) -> int:
    """How many of the patches stay visible, at least one and not all."""
    if not 0 < mask_ratio < 1:
        raise ValueError(f"mask_ratio must be in (0, 1), got {mask_ratio}; 0.75 is usual.")
    visible = tokens - round(tokens * mask_ratio)
    if not 0 < visible < tokens:
        raise ValueError(
            f"mask_ratio={mask_ratio} of {tokens} patches leaves {visible} visible, expected at least one "
            "visible and one hidden; take smaller patches or another ratio."
        )
    return visible


def mask_of(noise: Tensor, visible: int) -> Mask:
    """The ``visible`` patches of the smallest noise stay, of equal ones the first."""
    # Stable sorts: equal numbers must not be sorted differently on another device.
    ranks = noise.argsort(dim=1, stable=True).argsort(dim=1)
    hidden = ranks >= visible
    order = hidden.to(torch.uint8).argsort(dim=1, stable=True)
    return Mask(hidden, order[:, :visible], order.argsort(dim=1))


def take(tokens: Tensor, indices: Tensor) -> Tensor:
    """(B, K, D): of each image's tokens (B, N, D) those at its ``indices`` (B, K)."""
    return tokens.gather(1, indices.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


class Decoder(nn.Module):
    """Linear embedding, a learned token for hidden patches, fixed positions, ViT blocks, linear to pixels.

    >>> decoder = Decoder(64, pixels=48, grid=(2, 3), width=32, depth=1, heads=2)
    >>> visible, restore = torch.randn(1, 1 + 4, 64), torch.arange(6)[None]
    >>> decoder(visible, restore, prefix=1).shape
    torch.Size([1, 6, 48])

    ``norm_input`` standardises the tokens first, for an encoder that ends without a norm.
    """

    positions: Tensor

    def __init__(
        self,
        encoder_width: int,
        *,
        pixels: int,
        grid: tuple[int, int],
        width: int,
        depth: int,
        heads: int,
        norm_input: bool = False,
    ) -> None:
        super().__init__()
        self.norm_input = nn.LayerNorm(encoder_width) if norm_input else nn.Identity()
        self.embed = nn.Linear(encoder_width, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        positions = build_sincos2d_pos_embed(list(grid), dim=width).unsqueeze(0)
        # Computed, so that it needs no place in checkpoints.
        self.register_buffer("positions", positions, persistent=False)
        self.blocks = nn.Sequential(*(Block(width, heads, qkv_bias=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.to_pixels = nn.Linear(width, pixels)
        nn.init.normal_(self.mask_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, restore: Tensor, prefix: int) -> Tensor:
        """Pixels (B, N, P) of all patches.

        Args:
            tokens: (B, prefix + K, D) of the encoder, class and register tokens first.
            restore: (B, N), see :class:`~wellposed.train.mae.Mask`.
            prefix: how many tokens are no patches.
        """
        tokens = self.embed(self.norm_input(tokens))
        hidden = restore.shape[1] - (tokens.shape[1] - prefix)
        fill = self.mask_token.to(tokens.dtype).expand(len(tokens), hidden, -1)
        patches = take(torch.cat([tokens[:, prefix:], fill], dim=1), restore) + self.positions
        x = torch.cat([tokens[:, :prefix], patches], dim=1)
        x = self.norm(self.blocks(x))
        pixels: Tensor = self.to_pixels(x[:, prefix:])
        return pixels


def decoder_size(encoder_width: int, encoder_heads: int, width: int | None) -> tuple[int, int]:
    """Width and heads of the decoder; by default half of the encoder's width, in heads of the same size.

    >>> decoder_size(768, 12, None), decoder_size(192, 3, None), decoder_size(768, 12, 512)
    ((384, 6), (128, 2), (512, 8))
    """
    head = encoder_width // encoder_heads
    if width is None:
        step = math.lcm(head, 4)
        width = step * max(1, math.ceil(encoder_width / 2 / step))
    if width < 4 or width % 4:
        raise ValueError(
            f"decoder_width must be a multiple of 4, for sine and cosine of two coordinates, got {width}."
        )
    heads = next(count for count in range(max(1, width // head), 0, -1) if width % count == 0)
    return width, heads


_REASONS = {
    "SwinTransformer": "its windows need the whole grid of patches",
    "SwinTransformerV2": "its windows need the whole grid of patches",
    "PyramidVisionTransformerV2": "it shrinks the grid of patches from stage to stage",
    "ConvMixer": "its convolutions need the whole grid of patches",
    "Cait": "its class token enters after the blocks",
    "Xcit": "its blocks convolve the grid of patches",
    "Eva": "its attention gets each token's place apart from the tokens",
    "Beit": "its attention gets each token's place apart from the tokens",
    "VisionTransformerRelPos": "its attention gets each token's place apart from the tokens",
    "MlpMixer": "it mixes a fixed number of tokens",
}
_REMEDY = "use a ViT of timm, such as vit_tiny_patch16_224, deit3_small_patch16_224 or test_vit"


def check_mae(model: nn.Module, mask_ratio: float | None = None) -> VisionTransformer:
    """The model itself, if patches can be skipped between its embedding and its blocks; else a ValueError.

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
    mixing = [call.argument("where") for call in grayings(recipe) if call.argument("where") != "blocks"]
    if recipe.task != "mae" or not mixing:
        return []
    return [
        f"graying where={mixing[0]} mixes all patches before some are hidden: the visible tokens hold "
        "something of the hidden ones, and the task is easier than it should be. "
        "where=blocks blocks=0 grays the visible tokens only."
    ]


_ENCODER = "encoder."


class MaskedOutput(NamedTuple):
    """``loss`` over the hidden patches, ``prediction`` (B, N, P) of all, ``mask`` (B, N): True if hidden."""

    loss: Tensor
    prediction: Tensor
    mask: Tensor


class MaskedAutoencoder(nn.Module):
    """A ViT that learns to predict hidden patches.

    Edit the encoder first (``wp.gray_tokens(encoder, ...)``), then build this around it: an edit of the whole
    would find the decoder's blocks too. The decoder's weights are drawn from torch's global generator.

    The parts of the encoder that take no part here (head, pooling) are frozen, so that DDP does not wait for
    their gradients.

    Args:
        encoder: see :func:`~wellposed.train.mae.check_mae`.
        mask_ratio: share of the patches that are hidden.
        decoder_width: by default half of the encoder's, in whole heads.
        decoder_depth: blocks of the decoder.
        norm_pixels: predict each patch standardised.
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        mask_ratio: float,
        decoder_width: int | None = None,
        decoder_depth: int = 4,
        norm_pixels: bool = True,
    ) -> None:
        super().__init__()
        vit = check_mae(encoder, mask_ratio)
        embed = vit.patch_embed
        self.encoder = vit
        self.grid: tuple[int, int] = tuple(embed.grid_size)
        self.patch_size: tuple[int, int] = tuple(embed.patch_size)
        self.channels: int = embed.proj.in_channels
        self.tokens: int = embed.num_patches
        self.visible = visible_count(self.tokens, mask_ratio)
        self.prefix: int = vit.num_prefix_tokens
        self.norm_pixels = norm_pixels
        pixels = self.channels * self.patch_size[0] * self.patch_size[1]
        if norm_pixels and pixels == 1:
            raise ValueError(
                "a patch of one value cannot be standardised; use norm_pixels=False or larger patches."
            )
        # Of the first block, whatever its class calls the attention.
        attention: Any = next(module for module in vit.modules() if hasattr(module, "num_heads"))
        width, heads = decoder_size(vit.embed_dim, attention.num_heads, decoder_width)
        self.decoder = Decoder(
            vit.embed_dim,
            pixels=pixels,
            grid=self.grid,
            width=width,
            depth=decoder_depth,
            heads=heads,
            # Models that pool all tokens norm them afterwards, in fc_norm.
            norm_input=isinstance(vit.norm, nn.Identity),
        ).to(next(vit.parameters()))
        for name in ("fc_norm", "attn_pool", "head", "head_dist"):
            part = getattr(self.encoder, name, None)
            if isinstance(part, nn.Module):
                part.requires_grad_(False)

    def no_weight_decay(self) -> set[str]:
        """The names that timm's optimizers leave without weight decay."""
        return {_ENCODER + name for name in self.encoder.no_weight_decay()} | {"decoder.mask_token"}

    def encode(self, images: Tensor, mask: Mask) -> Tensor:
        """The encoder's tokens (B, prefix + K, D): class and register tokens, then the visible patches."""
        vit = self.encoder
        tokens = vit._pos_embed(vit.patch_embed(images))
        patches = take(tokens[:, self.prefix :], mask.visible)
        x = vit.norm_pre(torch.cat([tokens[:, : self.prefix], patches], dim=1))
        x = checkpoint_seq(vit.blocks, x) if vit.grad_checkpointing else vit.blocks(x)
        return cast(Tensor, vit.norm(x))

    def forward(self, images: Tensor, noise: Tensor) -> MaskedOutput:
        """Predict what is hidden in images (B, C, H, W); patches of the least noise (B, N) stay visible."""
        self._check(images, noise)
        mask = mask_of(noise, self.visible)
        prediction = self.decoder(self.encode(images, mask), mask.restore, self.prefix)
        # The loss is no place for the short numbers of autocast.
        prediction = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
        errors = (prediction - self.targets(images)).square().mean(dim=-1)
        hidden = len(images) * (self.tokens - self.visible)
        return MaskedOutput((errors * mask.hidden).sum() / hidden, prediction, mask.hidden)

    def targets(self, images: Tensor) -> Tensor:
        """What a perfect prediction would be, (B, N, P)."""
        patches = to_patches(images.to(torch.promote_types(images.dtype, torch.float32)), self.patch_size)
        return standardise(patches) if self.norm_pixels else patches

    def _check(self, images: Tensor, noise: Tensor) -> None:
        size = tuple(rows * side for rows, side in zip(self.grid, self.patch_size, strict=True))
        if images.ndim != 4 or tuple(images.shape[1:]) != (self.channels, *size):
            raise ValueError(
                f"images must be (B, {self.channels}, {size[0]}, {size[1]}), got {tuple(images.shape)}; "
                "build the encoder with the img_size of the images."
            )
        if tuple(noise.shape) != (len(images), self.tokens):
            raise ValueError(
                f"noise must be ({len(images)}, {self.tokens}), one number a patch, got {tuple(noise.shape)}."
            )


class FixedMask(nn.Module):
    """A masked autoencoder that takes images alone, for probes: each call hides the same patches.

    >>> import timm
    >>> from wellposed.probes import Monitor
    >>> mae = MaskedAutoencoder(timm.create_model("test_vit", img_size=32, patch_size=8), mask_ratio=0.5)
    >>> fixed = FixedMask(mae, torch.rand(4, 16))
    >>> monitor = Monitor(fixed, torch.randn(4, 3, 32, 32), blocks=slice(0, 6))  # of the encoder
    """

    def __init__(self, mae: nn.Module, noise: Tensor) -> None:
        super().__init__()
        self.mae = mae
        self.noise = noise

    def forward(self, images: Tensor) -> Tensor:
        out: MaskedOutput = self.mae(images, self.noise[: len(images)].to(images.device))
        return out.prediction


def encoder_state(mae: MaskedAutoencoder | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The encoder's weights under the names that they have in timm, on the CPU, ready for a file.

    ``mae`` is the model or, where that is sharded, its gathered state dict.
    """
    state = mae.state_dict() if isinstance(mae, nn.Module) else mae
    return {
        name.removeprefix(_ENCODER): value.detach().cpu().contiguous()
        for name, value in state.items()
        if name.startswith(_ENCODER)
    }
