"""Masked autoencoder (MAE, arXiv 2111.06377) around a ViT of timm.

Most patches are hidden; the encoder sees the others, and a small decoder predicts the pixels of the hidden
ones. The encoder is the user's own model, edits included: they run on what passes where they were put.

>>> import timm
>>> encoder = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1)
>>> mae = MaskedAutoencoder(encoder, mask_ratio=0.75)
>>> out = mae(torch.randn(2, 3, 32, 32), torch.rand(2, mae.tokens))
>>> out.prediction.shape, out.mask.sum(1).tolist()
(torch.Size([2, 16, 192]), [12, 12])

Shapes: B images, N patches, K visible ones, P pixel values of a patch, D channels of a token.
"""

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from timm.models import checkpoint_seq
from torch import Tensor, nn

from wellposed.train.mae_check import check_mae
from wellposed.train.mae_decoder import Decoder, decoder_size
from wellposed.train.mae_masks import Mask, mask_of, take, visible_count
from wellposed.train.mae_patches import standardise, to_patches

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
        encoder: see :func:`~wellposed.train.mae_check.check_mae`.
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
        width, heads = decoder_size(vit.embed_dim, _heads(vit), decoder_width)
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
        self._freeze_what_takes_no_part()

    def _freeze_what_takes_no_part(self) -> None:
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
        """Predict what is hidden.

        Args:
            images: (B, C, H, W) of the encoder's size.
            noise: (B, N) from :func:`~wellposed.train.mae_masks.mask_noise`; the patches of the smallest
                numbers stay visible.
        """
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
        return standardise(patches).patches if self.norm_pixels else patches

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


def _heads(vit: nn.Module) -> int:
    """Attention heads of the first block, whatever its class calls the attention."""
    return next(cast(int, module.num_heads) for module in vit.modules() if hasattr(module, "num_heads"))
