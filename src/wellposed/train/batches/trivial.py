"""TrivialAugment (Mueller and Hutter, 2021) of a whole batch on the device: one operation an image.

The wide space of the paper: 14 operations and 31 strengths, drawn alike often. torchvision has it for
one image, or with one draw for a whole batch. Here each image has its own draw, and all operations are
computed for all of them: that is cheap for small images, and there is no branch on data.

What the edges leave free has the mean colour. Shifts are of the side at most, where the paper has 32 pixels.
"""

import math

import torch
from torch import Tensor

from wellposed.train.batches.colours import (
    blurred,
    equalized,
    gray,
    mean_gray,
    posterized,
    solarized,
    stretched,
)

OPERATIONS = (
    "identity",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "brightness",
    "saturation",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "stretch",
    "equalize",
)
STRENGTHS = 31
"""Evenly from 0 to 1, each with a random sign."""

_SHEAR, _PIXELS, _DEGREES, _BLEND, _BITS = 0.99, 32, 135, 0.99, 6


def trivially_augmented(images: Tensor, plan: Tensor, fill: Tensor) -> Tensor:
    """Images (b, C, S, S), uint8, after one operation each.

    Args:
        images: (b, C, S, S), uint8.
        plan: (b, 2): the index in :data:`OPERATIONS`, and the strength from -1 to 1. Operations without a
            direction use its size.
        fill: (C, 1, 1), the colour around the image, from 0 to 255.
    """
    operation, strength = (column[:, None, None, None] for column in plan.unbind(1))

    def is_(name: str) -> Tensor:
        return operation == OPERATIONS.index(name)

    x = warped(images, plan[:, 0], plan[:, 1], fill).float()
    base = torch.where(is_("brightness"), torch.zeros_like(x), x)
    base = torch.where(is_("saturation"), gray(x), base)
    base = torch.where(is_("contrast"), mean_gray(x), base)
    base = torch.where(is_("sharpness"), blurred(x), base)
    # Where none of these is meant the base is the image, and stays.
    blended = torch.lerp(base, x, 1 + _BLEND * strength).clamp(0, 255)
    size = strength.abs()
    out = torch.where(is_("posterize"), posterized(x, 8 - (_BITS * size).round()), blended)
    out = torch.where(is_("solarize"), solarized(x, 255 * (1 - size)), out)
    out = torch.where(is_("stretch"), stretched(x), out)
    out = torch.where(is_("equalize"), equalized(x), out)
    return out.round().to(torch.uint8)


def warped(images: Tensor, operation: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """Sheared about the upper left corner, shifted or rotated about the centre, each to the nearest pixel."""
    b, channels, side, _ = images.shape

    def amount(name: str, most: float) -> Tensor:
        return (most * strength * (operation == OPERATIONS.index(name)))[:, None, None]

    steps = torch.arange(side, device=images.device, dtype=torch.float32)
    ys, xs = steps[:, None] - (side - 1) / 2, steps - (side - 1) / 2
    angle = amount("rotate", math.radians(_DEGREES))
    cosine, sine = angle.cos(), angle.sin()
    # Where a pixel of the result comes from, from the centre: the inverse of what is done to the image. A
    # shear about the corner is one about the centre and a shift. Of its three parts at most one is not zero.
    shear_x, shear_y = amount("shear_x", _SHEAR), amount("shear_y", _SHEAR)
    most = min(_PIXELS, side)
    from_x = cosine * xs - sine * ys + shear_x * (ys + side / 2) - amount("translate_x", most).trunc()
    from_y = cosine * ys + sine * xs + shear_y * (xs + side / 2) - amount("translate_y", most).trunc()
    columns, rows = ((where + (side - 1) / 2).round().long() for where in (from_x, from_y))
    outside = (columns < 0) | (columns >= side) | (rows < 0) | (rows >= side)
    pixel = rows.clamp(0, side - 1) * side + columns.clamp(0, side - 1)
    flat = pixel.view(b, 1, side * side).expand(-1, channels, -1)
    taken = images.flatten(2).gather(2, flat).view_as(images)
    return torch.where(outside[:, None], fill.round().to(images.dtype), taken)
