"""Images as rows of patch pixels, and back.

Shapes: B images, C channels, N patches in raster order, P = C * height * width values of one patch, read as a
patch convolution reads them: channel, row, column.

>>> images = torch.arange(32.0).reshape(1, 2, 4, 4)
>>> to_patches(images, (2, 4)).shape
torch.Size([1, 2, 16])
>>> torch.equal(to_images(to_patches(images, (2, 4)), 2, (2, 1), (2, 4)), images)
True
"""

from typing import NamedTuple

import torch
from torch import Tensor

_FLOOR = 1e-6
"""Added to the variance, as in MAE's own code: flat patches become zeros."""


class Standardised(NamedTuple):
    """``patches`` (B, N, P) of mean 0 and deviation 1 each; ``mean`` and ``deviation`` (B, N, 1) undo it."""

    patches: Tensor
    mean: Tensor
    deviation: Tensor


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


def standardise(patches: Tensor) -> Standardised:
    """Each patch minus its mean, by its standard deviation."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    deviation = (variance + _FLOOR).sqrt()
    return Standardised((patches - mean) / deviation, mean, deviation)
