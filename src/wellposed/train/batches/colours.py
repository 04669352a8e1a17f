"""Changes of colour, each image of a batch by its own amount.

Values are float and from 0 to 255; axes: b images, C channels, S pixels. Amounts are (b, 1, 1, 1).
"""

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

_GRAY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in brightness, as in Pillow."""


def jittered(x: Tensor, factors: Tensor) -> Tensor:
    """Brightness, contrast and saturation scaled by factors (b, 3), in this order."""
    brightness, contrast, saturation = factors[:, :, None, None, None].unbind(1)
    x = (x * brightness).clamp_(0, 255)
    x = torch.lerp(mean_gray(x), x, contrast).clamp_(0, 255)
    return torch.lerp(gray(x), x, saturation).clamp_(0, 255)


def gray(x: Tensor) -> Tensor:
    """Without colour, (b, 1, S, S)."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    return (_GRAY[0] * red + _GRAY[1] * green + _GRAY[2] * blue)[:, None]


def mean_gray(x: Tensor) -> Tensor:
    """The mean brightness of each image, (b, 1, 1, 1)."""
    return gray(x).mean((1, 2, 3), keepdim=True)


def blurred(x: Tensor) -> Tensor:
    """Smoothed by Pillow's filter for sharpness, 5 amid ones; the outermost pixels stay."""
    inner = (9 * avg_pool2d(x, 3, stride=1) + 4 * x[..., 1:-1, 1:-1]) / 13
    out = x.clone()
    out[..., 1:-1, 1:-1] = inner
    return out


def posterized(x: Tensor, bits: Tensor) -> Tensor:
    """The upper ``bits`` of whole numbers."""
    step = torch.exp2(8 - bits)
    return (x / step).floor() * step


def solarized(x: Tensor, threshold: Tensor) -> Tensor:
    """Inverted from the threshold on."""
    return torch.where(x >= threshold, 255 - x, x)


def stretched(x: Tensor) -> Tensor:
    """Each channel over all of 0 to 255; a channel of one colour stays."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) * (255 / (high - low).clamp(min=1)), x)


def equalized(x: Tensor) -> Tensor:
    """Whole numbers in each channel made as frequent as each other, as Pillow does it.

    Pillow's table needs, for a value, the number of pixels below it. That is its place among the sorted
    pixels, so there is no histogram, whose sums a GPU would collect by atomics.
    """
    flat = x.flatten(2)
    ordered = flat.sort(dim=2).values
    below = torch.searchsorted(ordered, flat.contiguous())
    step = below.amax(2, keepdim=True) // 255
    levels = (below + step // 2) // step.clamp(min=1)
    return torch.where(step > 0, levels.clamp(max=255).to(x.dtype), flat).view_as(x)
