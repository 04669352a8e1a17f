"""The decoder of a masked autoencoder: from visible tokens to the pixels of every patch.

>>> decoder = Decoder(64, pixels=48, grid=(2, 3), width=32, depth=1, heads=2)
>>> visible, restore = torch.randn(1, 1 + 4, 64), torch.arange(6)[None]
>>> decoder(visible, restore, prefix=1).shape
torch.Size([1, 6, 48])
"""

import math

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from wellposed.train.mae_masks import take


class Decoder(nn.Module):
    """Linear embedding, a learned token for hidden patches, fixed positions, ViT blocks, linear to pixels.

    Args:
        encoder_width: of the tokens that come in.
        pixels: values of one patch, channels included.
        grid: (rows, columns) of patches.
        width: of the decoder, a multiple of 4.
        depth: number of blocks.
        heads: of each block.
        norm_input: standardise the tokens first, for an encoder that ends without a norm.
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
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.normal_(self.mask_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, restore: Tensor, prefix: int) -> Tensor:
        """Pixels (B, N, P) of all patches.

        Args:
            tokens: (B, prefix + K, D) of the encoder, class and register tokens first.
            restore: (B, N), see :class:`~wellposed.train.mae_masks.Mask`.
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
