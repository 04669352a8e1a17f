"""Augmentation of a whole batch at once, on the device: what is drawn for it, and what is done with it.

What is drawn is a table, the plan. It has one row for each image of the whole update, whoever processes it,
and is drawn from (seed, update) on the CPU: so each process can take its own rows, and a GPU gets a few
kilobytes in one copy. Each kind of augmentation has its own columns; switching one on changes nothing in the
others.

>>> plan = draw(Augmentation(shift=4), seed=0, update=7, batch_size=64, size=32)
>>> plan.shape, float(plan[:, SHIFT].min()), float(plan[:, SHIFT].max())
((64, 17), -4.0, 4.0)

What is done are pure functions of pixels and a plan, without a branch on data or a loop over images: a GPU
gets a few kernels a batch, nothing waits for it, and ``torch.compile`` takes the whole.

TrivialAugment (Mueller and Hutter, 2021) is one operation an image, in the wide space of the paper: 14
operations and 31 strengths, drawn equally often. torchvision has it for one image, or with one draw for a
whole batch. Here each image has its own draw, and all operations are computed for all of them, which is cheap
for small images. What the edges leave free has the mean colour. Shifts are of the side at most, where the
paper has 32 pixels.

Mixup, CutMix and label smoothing are timm's, with draws that depend on (seed, update) alone. timm draws one
mixing weight (and one rectangle) for the batch it is given. Here every pass of an update, on every process,
draws the same, and the passes hold mirrored positions (see ``order.py``): together they are what timm makes
of the whole batch.

Axes: n stored images, b of the batch, C channels, S pixels. In changes of colour values are float from 0 to
255 and amounts (b, 1, 1, 1).
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from timm.data.mixup import Mixup, one_hot
from torch import Tensor
from torch.nn.functional import avg_pool2d, grid_sample

from wellposed.train.order import Purpose, generator, numpy_seeded
from wellposed.train.recipe import TRIVIAL_POLICY, Recipe

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


FLIP = 0
"""1 to mirror, else 0."""
SHIFT = slice(1, 3)
"""Pixels down and to the right that the window over the image moves."""
CROP = slice(3, 7)
"""Top, left, height, width, as shares of the side."""
JITTER = slice(7, 10)
"""Factors of brightness, contrast and saturation."""
ERASE = slice(10, 14)
"""Top, left, bottom, right in pixels, the last two excluded; nothing is erased where they are equal."""
NOISE = 14
"""Where in the bank of noise the filling starts."""
TRIVIAL = slice(15, 17)
"""Index of the operation of TrivialAugment, and its strength from -1 to 1."""

NOISE_STARTS = 2**16
_WIDTH = 17
_UNIFORMS = 19
_CROP_RATIO = 4 / 3
"""Of width to height and the other way round, at most; as in torchvision's RandomResizedCrop."""
_ERASE_AREA, _ERASE_RATIO = (0.02, 1 / 3), 1 / 0.3
"""As in timm's RandomErasing."""

Table = NDArray[np.float32]
_Uniforms = NDArray[np.float64]


@dataclass(frozen=True)
class Augmentation:
    """Strengths of what is done on the device; the defaults do nothing."""

    flip: float = 0.0
    shift: int = 0
    crop_scale: float | None = None
    jitter: float = 0.0
    erase: float = 0.0
    trivial: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> "Augmentation":
        """All that a resolved recipe asks for; None there means off."""
        return cls(
            flip=recipe.flip or 0.0,
            shift=recipe.crop_padding or 0,
            crop_scale=recipe.crop_scale,
            jitter=recipe.color_jitter,
            erase=recipe.erase,
            trivial=recipe.auto_augment == TRIVIAL_POLICY,
        )

    def after_workers(self) -> "Augmentation":
        """What remains when workers have cropped, mirrored and jittered the pictures."""
        return dataclasses.replace(self, flip=0.0, crop_scale=None, jitter=0.0)


def draw(augmentation: Augmentation, seed: int, update: int, batch_size: int, size: int) -> Table:
    """The plan of an update's images, of ``size`` pixels a side."""
    uniforms = generator(seed, Purpose.AUGMENT, update).random((_UNIFORMS, batch_size))
    plan = np.zeros((batch_size, _WIDTH), np.float32)
    if augmentation.flip:
        plan[:, FLIP] = uniforms[0] < augmentation.flip
    if augmentation.shift:
        plan[:, SHIFT] = np.floor(uniforms[1:3] * (2 * augmentation.shift + 1)).T - augmentation.shift
    if augmentation.crop_scale is not None:
        plan[:, CROP] = windows(uniforms[3:7], (augmentation.crop_scale, 1.0), _CROP_RATIO).T
    if augmentation.jitter:
        plan[:, JITTER] = 1 + augmentation.jitter * (2 * uniforms[7:10].T - 1)
    if augmentation.erase:
        rectangles = _rectangles(uniforms[10:14], size)
        plan[:, ERASE] = np.where(uniforms[14] < augmentation.erase, rectangles, 0).T
        plan[:, NOISE] = np.floor(uniforms[15] * NOISE_STARTS)
    if augmentation.trivial:
        strengths = np.floor(uniforms[17] * STRENGTHS) / (STRENGTHS - 1)
        signed = np.where(uniforms[18] < 0.5, -strengths, strengths)
        plan[:, TRIVIAL] = np.stack([np.floor(uniforms[16] * len(OPERATIONS)), signed]).T
    return plan


def windows(uniforms: _Uniforms, areas: tuple[float, float], ratio: float) -> _Uniforms:
    """Windows in the unit square from four uniform numbers each: (top, left, height, width).

    The area is uniform, the logarithm of the aspect ratio too, in so far as the window fits: the ratio
    is limited, instead of drawing again, so an area of 1 is the whole square.
    """
    low, high = areas
    log_area = np.log(low + (high - low) * uniforms[0])
    log_ratio = (2 * uniforms[1] - 1) * np.minimum(math.log(ratio), -log_area)
    height, width = np.exp((log_area - log_ratio) / 2), np.exp((log_area + log_ratio) / 2)
    return np.stack([uniforms[2] * (1 - height), uniforms[3] * (1 - width), height, width])


def _rectangles(uniforms: _Uniforms, size: int) -> _Uniforms:
    """Windows of whole pixels: (top, left, bottom, right)."""
    _, _, height, width = windows(uniforms, _ERASE_AREA, _ERASE_RATIO)
    height, width = (np.maximum(np.rint(size * side), 1) for side in (height, width))
    top, left = (
        np.floor(u * (size - side + 1)) for u, side in zip(uniforms[2:], (height, width), strict=True)
    )
    return np.stack([top, left, top + height, left + width])


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
        plan: (b, columns), see :mod:`wellposed.train.augment`; None to augment nothing.
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


class Mixing:
    """Makes the labels of a pass, and with mixup or CutMix mixes its images.

    ``mixup`` and ``cutmix`` are the alpha of each, 0 for none; an update is mixed with ``probability``.
    """

    def __init__(
        self,
        mixup: float,
        cutmix: float,
        smoothing: float,
        classes: int,
        seed: int,
        probability: float = 1.0,
    ) -> None:
        self.smoothing, self.classes, self.seed = smoothing, classes, seed
        self.mixes = mixup > 0 or cutmix > 0
        self._mixup = Mixup(
            mixup_alpha=mixup,
            cutmix_alpha=cutmix,
            prob=probability,
            label_smoothing=smoothing,
            num_classes=classes,
        )

    def __call__(self, update: int, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of one pass; the images are mixed in place."""
        if self.mixes:
            with numpy_seeded(self.seed, Purpose.MIX, update):
                images, labels = self._mixup(images, labels)
        elif self.smoothing > 0:
            off = self.smoothing / self.classes
            labels = one_hot(labels, self.classes, on_value=1.0 - self.smoothing + off, off_value=off)
        return images, labels
