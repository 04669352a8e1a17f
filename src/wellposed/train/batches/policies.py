"""timm's auto-augmentation policies, with pictures left in them by every Pillow.

At high magnitudes some policies posterize to 0 bits, a black picture in older releases of Pillow and an error
since its release 13, after a few hundred images. Here at least 1 bit stays.
"""

from collections.abc import Callable, Iterator
from typing import Any

from PIL import Image
from timm.data.auto_augment import posterize


def keep_a_bit(transform: Any) -> None:
    """Change the operations of a composed transform that posterize, in place."""
    for operation in _operations(getattr(transform, "transforms", [])):
        if operation.aug_fn is posterize:
            operation.aug_fn = _posterized


def _operations(steps: list[Callable[[Any], Any]]) -> Iterator[Any]:
    for step in steps:
        yield from getattr(step, "ops", ())
        for alternative in getattr(step, "policy", ()):
            yield from alternative


def _posterized(picture: Image.Image, bits: int, **rest: Any) -> Image.Image:
    posterized: Image.Image = posterize(picture, max(bits, 1), **rest)
    return posterized
