"""What is done to each image of an update, as a table of numbers.

The table has one row for each image of the whole update, whoever processes it, and is drawn from (seed,
update) on the CPU: so each process can take its own rows, and a GPU gets a few kilobytes in one copy. Each
kind of augmentation has its own columns; switching one on changes nothing in the others.

>>> plan = draw(Augmentation(shift=4), seed=0, update=7, batch_size=64, size=32)
>>> plan.shape, float(plan[:, SHIFT].min()), float(plan[:, SHIFT].max())
((64, 17), -4.0, 4.0)
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wellposed.train.batches.draws import Purpose, generator
from wellposed.train.batches.trivial import OPERATIONS, STRENGTHS
from wellposed.train.recipe import TRIVIAL_POLICY, Recipe

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

    @property
    def is_nothing(self) -> bool:
        return self == Augmentation()


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
