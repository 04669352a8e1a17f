"""Augmentation of a whole batch at once, on the device: pure functions of pixels and a plan.

There is no branch on data and no loop over images, so that a GPU gets a few kernels a batch, nothing waits
for it, and ``torch.compile`` takes the whole. Axes: n stored images, b of the batch, C channels, S pixels.
"""

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from wellposed.train.batches.colours import jittered
from wellposed.train.batches.plan import CROP, ERASE, FLIP, JITTER, NOISE, SHIFT, TRIVIAL, Augmentation
from wellposed.train.batches.trivial import trivially_augmented


def augmented(
    pixels: Tensor,
    indices: Tensor | None,
    plan: Tensor | None,
    mean: Tensor,
    std: Tensor,
    noise: Tensor | None,
    augmentation: Augmentation,
) -> Tensor:
    """Normalised images (b, C, S, S), float32.

    Args:
        pixels: (n, C, S, S), uint8.
        indices: (b,) of the images to take, or None for all, in order.
        plan: (b, columns), see :mod:`wellposed.train.batches.plan`; None to augment nothing.
        mean, std: (C, 1, 1), of pixels from 0 to 255.
        noise: a bank for erased rectangles, longer than an image.
        augmentation: which parts of the plan are used.
    """
    images = pixels if indices is None else pixels[indices]
    if plan is None:
        return normalised(images, mean, std)
    if augmentation.trivial:
        images = trivially_augmented(images, plan[:, TRIVIAL], mean)
    if augmentation.flip or augmentation.shift:
        x = moved(images, plan[:, SHIFT], plan[:, FLIP], mean, std)
    else:
        x = normalised(images, mean, std)
    if augmentation.crop_scale is not None:
        x = resized_crop(x, plan[:, CROP])
    if augmentation.jitter:
        x = jittered(x * std + mean, plan[:, JITTER]).sub_(mean).div_(std)
    if augmentation.erase:
        assert noise is not None
        x = erased(x, plan[:, ERASE], noise, plan[:, NOISE])
    return x


def normalised(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return images.float().sub_(mean).div_(std)


def moved(images: Tensor, shift: Tensor, flip: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalised images, mirrored where ``flip`` is 1, seen through a window moved by ``shift``.

    Outside of the image there is the mean colour: 0 once normalised.
    """
    b, channels, size, _ = images.shape
    range_ = torch.arange(size, device=images.device)
    down, right = shift.long().unbind(1)
    columns = torch.where(flip[:, None] > 0, size - 1 - range_, range_)
    ys, xs = range_ + down[:, None], columns + right[:, None]
    rows_outside, columns_outside = (ys < 0) | (ys >= size), (xs < 0) | (xs >= size)
    ys, xs = ys.clamp(0, size - 1), xs.clamp(0, size - 1)
    pixel = (ys[:, :, None] * size + xs[:, None, :]).view(b, 1, size * size)
    taken = images.flatten(2).gather(2, pixel.expand(-1, channels, -1)).view_as(images)
    outside = rows_outside[:, :, None] | columns_outside[:, None, :]
    return normalised(taken, mean, std).masked_fill_(outside[:, None], 0.0)


def resized_crop(x: Tensor, windows: Tensor) -> Tensor:
    """Windows (top, left, height, width), in shares of the side, enlarged to the whole size."""
    size = x.shape[-1]
    # grid_sample's coordinates: -1 and 1 are the outer edges. affine_grid would multiply matrices, at
    # whatever precision those have.
    centres = (torch.arange(size, device=x.device) * 2 + 1) / size - 1
    top, left, height, width = windows.unsqueeze(2).unbind(1)
    ys, xs = height * centres + (2 * top + height - 1), width * centres + (2 * left + width - 1)
    shape = (len(x), size, size)
    grid = torch.stack([xs[:, None, :].expand(shape), ys[:, :, None].expand(shape)], dim=-1)
    return grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def erased(x: Tensor, rectangles: Tensor, noise: Tensor, starts: Tensor) -> Tensor:
    """Rectangles (top, left, bottom, right) filled with stretches of the noise."""
    range_ = torch.arange(x.shape[-1], device=x.device)
    top, left, bottom, right = rectangles.unsqueeze(2).unbind(1)
    rows, columns = (range_ >= top) & (range_ < bottom), (range_ >= left) & (range_ < right)
    inside = rows[:, :, None] & columns[:, None, :]
    stretches = noise.unfold(0, x[0].numel(), 1)  # a view: row i starts at i
    return torch.where(inside[:, None], stretches[starts.long()].view_as(x), x)
