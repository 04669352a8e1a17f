"""Images by index, wherever their bytes are.

They go to worker processes: all are picklable and none holds an open file.
"""

import errno
from abc import ABC, abstractmethod
from functools import cache
from io import BytesIO
from typing import IO, Self

import numpy as np
from PIL import Image

from wellposed.files import require_regular
from wellposed.probes.image_sources import decode, reason, require_picture
from wellposed.train.data.compact import Bytes, Indices, Slices


class UnreadableImageError(ValueError):
    """A file of the set that is no image, or a damaged one."""


class Images(ABC):
    """Images by index."""

    pixels: Bytes | None = None
    """(n, H, W, C) where all are held as one array."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """For messages."""

    @abstractmethod
    def select(self, indices: Indices) -> Self:
        """Those at the indices, in that order; they keep their names."""

    @abstractmethod
    def picture(self, index: int, mode: str) -> Image.Image:
        """Decoded, in mode ``"L"`` or ``"RGB"``."""


class PixelImages(Images):
    """Images that are one array of pixels, (n, H, W, C)."""

    pixels: Bytes

    def __init__(self, pixels: Bytes, what: str, numbers: Indices | None = None) -> None:
        self.pixels = pixels.view()
        self.pixels.flags.writeable = False
        self._what = what
        self._numbers = np.arange(len(pixels)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, index: int) -> str:
        return f"{self._what} {self._numbers[index]}"

    def select(self, indices: Indices) -> "PixelImages":
        return PixelImages(self.pixels[indices], self._what, self._numbers[indices])

    def picture(self, index: int, mode: str) -> Image.Image:
        pixels = self.pixels[index]
        picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[-1] == 1 else pixels)
        return picture if picture.mode == mode else picture.convert(mode)


class EncodedImages(Images):
    """Images that are files of JPEG, PNG or another format, on a disk or inside of another file."""

    is_in_memory = False
    """Reading one does not wait for a disk."""

    @abstractmethod
    def file(self, index: int) -> str | IO[bytes]:
        """What Pillow opens."""

    @abstractmethod
    def content(self, index: int) -> bytes:
        """The whole file."""

    def header(self, index: int) -> str | IO[bytes]:
        """What Pillow opens to see the header alone."""
        return self.file(index)

    def picture(self, index: int, mode: str) -> Image.Image:
        try:
            with opened(self.file(index)) as picture:
                return decode(picture, mode, any_depth=False)
        except Exception as error:  # Pillow's plugins raise nearly anything on a damaged file
            raise unreadable(self.name(index), error) from error


class NumberedImages(EncodedImages):
    """Encoded images one after the other in one array of bytes."""

    is_in_memory = True

    def __init__(self, slices: Slices, what: str, numbers: Indices | None = None) -> None:
        self._slices, self._what = slices, what
        self._numbers = np.arange(len(slices.starts)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def name(self, index: int) -> str:
        return f"{self._what} {self._numbers[index]}"

    def select(self, indices: Indices) -> "NumberedImages":
        return NumberedImages(self._slices.select(indices), self._what, self._numbers[indices])

    def file(self, index: int) -> IO[bytes]:
        return BytesIO(self.content(index))

    def content(self, index: int) -> bytes:
        return self._slices.content(index)


_FORMATS = ("JPEG", "PNG", "WEBP", "PPM", "BMP", "GIF", "TIFF", "JPEG2000", "AVIF")


@cache
def _formats() -> tuple[str, ...]:
    """Pillow's formats for images of a set, the most likely first: each is tried in turn.

    Left to itself Pillow loads the rarer ones when the first such file comes, and a second thread that comes
    by meanwhile is told that its file is no image.
    """
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def opened(file: str | IO[bytes]) -> Image.Image:
    """The picture, of which the header is read."""
    if isinstance(file, str):
        require_regular(file)
    picture = Image.open(file, formats=_formats())
    if picture.mode in ("I", "F"):
        picture.close()
        raise ValueError(
            f"the range of its values, of mode {picture.mode}, is not known; save it with 8 bits"
        )
    try:
        require_picture(picture)
    except ValueError:
        picture.close()
        raise
    return picture


_FAULTS_OF_THE_FILE = (
    None,
    errno.ENOENT,
    errno.ELOOP,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
)


def unreadable(name: str, error: Exception) -> UnreadableImageError:
    """The error that names the image.

    A fault of the machine (no memory, too many open files, a disk that answers with errors) is raised as it
    is: with ``skip_unreadable`` it would otherwise make the set smaller, unseen.
    """
    is_machine = isinstance(error, OSError) and error.errno not in _FAULTS_OF_THE_FILE
    if is_machine or isinstance(error, MemoryError):
        raise error
    return UnreadableImageError(f"{name} cannot be read: {reason(error)}.")
