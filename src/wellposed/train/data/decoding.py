"""Decode a whole split at once, for sets that fit in memory.

>>> from wellposed.train.data import open_data
>>> decode_all(open_data("digits").test, 8, 1).shape
(400, 1, 8, 8)
"""

from typing import NamedTuple

import numpy as np
from PIL import Image

from wellposed.train.data.compact import Bytes, Indices
from wellposed.train.data.headers import refusal
from wellposed.train.data.images import UnreadableImageError
from wellposed.train.data.split import Split
from wellposed.train.data.threads import in_threads


class Readable(NamedTuple):
    """What could be decoded of a split.

    Args:
        pixels: (m, C, S, S), of the readable images.
        indices: (m,), which images of the split those are; ``split.subset(indices)`` has their labels.
        unreadable: a message for each of the others, which names it and says why.
    """

    pixels: Bytes
    indices: Indices
    unreadable: tuple[str, ...]


def decode_all(split: Split, size: int, channels: int, *, progress: bool = True) -> Bytes:
    """All images of the split as one array (n, C, S, S).

    Pictures of another size are fitted, see :func:`fitted`. Images that cannot be read raise one error that
    counts and names them; :func:`decode_readable` leaves them out.
    """
    pixels, _, failed = decode_readable(split, size, channels, progress=progress)
    if failed:
        raise refusal("the split", list(failed), len(split))
    return pixels


def decode_readable(split: Split, size: int, channels: int, *, progress: bool = True) -> Readable:
    """The images of the split that can be read, as one array, and which they are."""
    if split.pixels is not None and split.pixels.shape[1:3] == (size, size):
        pixels = np.ascontiguousarray(_in_channels(split.pixels, channels).transpose(0, 3, 1, 2))
        return Readable(pixels, np.arange(len(split)), ())
    pixels = np.empty((len(split), channels, size, size), np.uint8)
    mode = "L" if channels == 1 else "RGB"

    def decode(piece: range) -> list[tuple[int, str]]:
        failed = []
        for index in piece:
            try:
                picture = split.images.picture(index, mode)
            except UnreadableImageError as error:
                failed.append((index, str(error)))
            else:
                array = np.asarray(fitted(picture, size))
                pixels[index] = array if channels == 1 else array.transpose(2, 0, 1)
        return failed

    threads = _useful_threads(split)
    pieces = in_threads(decode, len(split), "decoding images", threads=threads, progress=progress)
    failed = dict(entry for piece in pieces for entry in piece)
    indices = np.setdiff1d(np.arange(len(split)), list(failed))
    return Readable(pixels[indices] if failed else pixels, indices, tuple(failed.values()))


def _useful_threads(split: Split) -> int | None:
    """One for small pictures, whose decoding is mostly Python's part of the work; None for all cores."""
    try:
        width, height = split.picture(0).size
    except (UnreadableImageError, IndexError):
        return None
    return 1 if width * height <= 64 * 64 else None


def fitted(picture: Image.Image, size: int) -> Image.Image:
    """A square of ``size`` pixels: the shorter side is resized to it (bicubic), then the centre is cut out.

    >>> fitted(Image.new("RGB", (64, 48)), 32).size
    (32, 32)
    """
    if picture.size == (size, size):
        return picture
    shorter = min(picture.size)
    # Rounded as torchvision does it, so that images streamed through its Resize and CenterCrop are equal.
    width, height = (int(size * side / shorter) for side in picture.size)
    resized = picture.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return resized.crop((left, top, left + size, top + size))


def _in_channels(pixels: Bytes, channels: int) -> Bytes:
    """(n, H, W, C) with 1 or 3 channels, by the formula of Pillow's convert("L")."""
    if pixels.shape[-1] == channels:
        return pixels
    if channels == 3:
        return np.broadcast_to(pixels, (*pixels.shape[:-1], 3))
    grey = np.empty((*pixels.shape[:-1], 1), np.uint8)
    weights = np.array([19595, 38470, 7471], np.uint32)
    for start in range(0, len(pixels), 1024):  # in parts: the sums take four times the memory
        grey[start : start + 1024, ..., 0] = (pixels[start : start + 1024] @ weights + 0x8000) >> 16
    return grey
