"""Many byte strings as two arrays, so that forked worker processes share them.

A list of a million paths is a million Python objects. Each process that only looks at one writes its
reference count, and so copies the page that holds it: the memory of every worker grows over an epoch. Arrays
have no such counts.

>>> paths = Slices.of_texts(["cat/1.jpg", "dog/2.jpg", "dog/3.jpg"])
>>> paths.select(np.array([2, 0])).text(0)
'dog/3.jpg'

Images by index, wherever their bytes are.

They go to worker processes: all are picklable and none holds an open file.

A set of labelled images: two splits, the names of the classes, and what is known of the pictures.
"""

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
from PIL import Image

from wellposed.files import require_regular
from wellposed.image_files import decode, reason, require_picture

Indices = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class ByteSource(Protocol):
    def __getitem__(self, where: slice) -> Bytes: ...


class Slices(NamedTuple):
    """Byte string i is ``data[starts[i]:stops[i]]``."""

    data: ByteSource
    starts: Indices
    stops: Indices

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> "Slices":
        parts = [os.fsencode(text) for text in texts]
        ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(parts), np.uint8), ends[:-1], ends[1:])

    def content(self, index: int) -> bytes:
        return self.data[int(self.starts[index]) : int(self.stops[index])].tobytes()

    def text(self, index: int) -> str:
        return os.fsdecode(self.content(index))

    def select(self, indices: Indices) -> "Slices":
        """Those at the indices; the bytes themselves are not copied."""
        return Slices(self.data, self.starts[indices], self.stops[indices])


class Fingerprint(NamedTuple):
    """Tells whether a file is still the one that was looked at."""

    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Fingerprint":
        return cls(status.st_size, status.st_mtime_ns)

    def check(self, descriptor: int, path: Path | str) -> None:
        """Refuse an open file that is another one by now."""
        if Fingerprint.of(os.fstat(descriptor)) != self:
            raise OSError(errno.ESTALE, "the file was changed while it was in use; start again", str(path))


class MappedBytes:
    """A range of bytes in a file, mapped into memory: processes share it, however they were started.

    What is pickled is the place, not the bytes.
    """

    def __init__(self, path: Path, offset: int, size: int, fingerprint: Fingerprint) -> None:
        self._place = (path.absolute(), offset, size, fingerprint)
        with path.open("rb") as file:
            fingerprint.check(file.fileno(), path)
            # As a plain array, of which a slice is quicker made than of a memmap.
            self._bytes: Bytes = np.asarray(
                np.memmap(file, np.uint8, "r", offset, (size,)) if size else np.empty(0, np.uint8)
            )

    def __getitem__(self, where: slice) -> Bytes:
        return self._bytes[where]

    def __len__(self) -> int:
        return len(self._bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedBytes, self._place


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


class Split:
    """Images by index, and their labels. Picklable, for worker processes.

    Args:
        images: where the images are.
        labels: one for each of them.
        channels: 1 for pictures of mode L, 3 for RGB.
    """

    labels: Indices
    """(n,), read-only."""

    def __init__(self, images: Images, labels: npt.NDArray[Any], channels: int) -> None:
        self._images = images
        self.labels = np.array(labels, dtype=np.int64)
        self.labels.flags.writeable = False
        self.channels = channels
        self._mode = "L" if channels == 1 else "RGB"

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Split({len(self)} images, {self._mode})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Split, (self._images, self.labels, self.channels)

    @property
    def images(self) -> Images:
        """Where they are, without the labels."""
        return self._images

    @property
    def pixels(self) -> Bytes | None:
        """(n, H, W, C) where the source holds arrays of one size, else None; read-only."""
        return self._images.pixels

    def picture(self, index: int) -> Image.Image:
        """Decoded, of mode RGB, or L in a set of one channel; if that fails the error names the image."""
        return self._images.picture(index, self._mode)

    def name(self, index: int) -> str:
        """For messages: the path, or the number in its file."""
        return self._images.name(index)

    def subset(self, indices: Sequence[int] | npt.NDArray[Any]) -> "Split":
        """The images at the indices (or where a boolean mask is true), in that order."""
        chosen = np.asarray(indices)
        chosen = np.flatnonzero(chosen) if chosen.dtype == bool else chosen.astype(np.int64)
        return Split(self._images.select(chosen), self.labels[chosen], self.channels)


@dataclass(frozen=True)
class ImageData:
    """A set to train on.

    Args:
        name: the spec as it was given.
        classes: names, by label.
        train, test: the images.
        channels: 1 or 3.
        size: side in pixels if all images are squares of one known size, else None.
        photographs: mirroring leaves the class as it is.
        notes: sentences for a report.
        is_test_drawn: the seed chose the test images; the set has no test split of its own.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    channels: int
    size: int | None
    photographs: bool
    notes: tuple[str, ...] = ()
    is_test_drawn: bool = False


@dataclass(frozen=True)
class Part:
    """Images and labels as a source has them, not checked yet."""

    images: Images
    labels: npt.NDArray[Any]

    def select(self, indices: Indices) -> "Part":
        return Part(self.images.select(indices), self.labels[indices])


@dataclass(frozen=True)
class Contents:
    """What a source holds; without ``test`` a share of ``train`` is held out.

    ``is_test_drawn``: the source itself has drawn ``test`` by the seed.
    """

    classes: tuple[str, ...]
    train: Part
    test: Part | None
    photographs: bool = True
    notes: tuple[str, ...] = ()
    is_test_drawn: bool = False
