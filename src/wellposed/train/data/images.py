"""Labelled images by index, wherever their bytes are, and decoding many of them in threads.

Images go to worker processes: all classes here are picklable, hold no open file, and keep what they hold for
each image in arrays. A list of a million paths is a million Python objects; each process that looks at one
writes its reference count, and so copies the page that holds it.

>>> from wellposed.train.data import open_data
>>> decode_all(open_data("digits").test, 8, 1).shape
(400, 1, 8, 8)
"""

import contextlib
import errno
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image
from rich.console import Console
from rich.progress import track

from wellposed.environment import usable_cores
from wellposed.files import require_regular
from wellposed.image_files import decode, reason, require_picture

Indices = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Texts = npt.NDArray[np.bytes_]
Result = TypeVar("Result")


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
        return Image.fromarray(pixels[:, :, 0] if pixels.shape[-1] == 1 else pixels).convert(mode)


class EncodedImages(Images):
    """Images that are files of JPEG, PNG or another format, on a disk or inside of another file."""

    @abstractmethod
    def file(self, index: int) -> str | IO[bytes]:
        """What Pillow opens."""

    def header(self, index: int) -> Image.Image:
        """The picture, of which the header is read."""
        return opened(self.file(index))

    def content(self, index: int) -> bytes:
        """The whole file."""
        file = self.file(index)
        return Path(file).read_bytes() if isinstance(file, str) else file.read()

    def picture(self, index: int, mode: str) -> Image.Image:
        try:
            with opened(self.file(index)) as picture:
                return decode(picture, mode, any_depth=False)
        except Exception as error:  # Pillow's plugins raise nearly anything on a damaged file
            raise unreadable(self.name(index), error) from error


class FileImages(EncodedImages):
    """Files below a folder, by their paths from there."""

    def __init__(self, root: str | Path, paths: Sequence[str] | Texts) -> None:
        self._root, self._paths = os.fspath(root), as_array(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def name(self, index: int) -> str:
        return os.path.join(self._root, os.fsdecode(self._paths[index]))

    def select(self, indices: Indices) -> "FileImages":
        return FileImages(self._root, self._paths[indices])

    def file(self, index: int) -> str:
        return self.name(index)


class Fingerprint(NamedTuple):
    """Shows whether a file is still the one that was looked at."""

    size: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> "Fingerprint":
        status = os.fstat(descriptor)
        return cls(status.st_size, status.st_mtime_ns)


class Archive(NamedTuple):
    """A file that holds many images."""

    path: str
    seen: Fingerprint


class ArchivedImages(EncodedImages):
    """Ranges of bytes in other files.

    Args:
        archives: the files; or one array of bytes in memory, in place of one.
        names: of the images, after the path of the archive.
        places: (n, 3): number of the archive, first byte, number of bytes.
    """

    def __init__(self, archives: Sequence[Archive | Bytes], what: str, names: Texts, places: Indices) -> None:
        self._archives, self._what, self._names, self._places = archives, what, names, places

    def __len__(self) -> int:
        return len(self._places)

    def name(self, index: int) -> str:
        archive = self._archives[self._places[index, 0]]
        path = archive.path if isinstance(archive, Archive) else self._what
        return path + os.fsdecode(self._names[index])

    def select(self, indices: Indices) -> "ArchivedImages":
        return ArchivedImages(self._archives, self._what, self._names[indices], self._places[indices])

    def file(self, index: int) -> IO[bytes]:
        return BytesIO(self.content(index))

    def header(self, index: int) -> Image.Image:
        try:
            return opened(BytesIO(self.content(index, HEADER_BYTES)))
        except Exception:  # a longer header, or a damaged one
            return super().header(index)

    def content(self, index: int, most: int | None = None) -> bytes:
        number, start, size = self._places[index].tolist()
        size, archive = min(size, most or size), self._archives[number]
        if isinstance(archive, Archive):
            return os.pread(_opened(archive).descriptor, size, start)
        return bytes(archive[start : start + size])


HEADER_BYTES = 4096
"""Enough for nearly every image; with large profiles in it the whole is read."""


class _Opened:
    """An open file, closed when nobody reads from it any more.

    Read at given positions only: it then may be used by threads, and by processes forked from this one.
    """

    def __init__(self, archive: Archive) -> None:
        self.descriptor = os.open(archive.path, os.O_RDONLY)
        if Fingerprint.of(self.descriptor) != archive.seen:
            message = "the file was changed while it was in use; start again"
            raise OSError(errno.ESTALE, message, archive.path)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


_opened = lru_cache(64)(_Opened)


def as_array(texts: Iterable[str] | Texts) -> Texts:
    """File names as one array of bytes."""
    if isinstance(texts, np.ndarray):
        return texts
    return np.array([os.fsencode(text) for text in texts] or [], np.bytes_)


_FORMATS = ("JPEG", "PNG", "WEBP", "PPM", "BMP", "GIF", "TIFF", "JPEG2000", "AVIF")


@cache
def _formats() -> tuple[str, ...]:
    """Pillow's formats for images of a set, the most likely first: each is tried in turn.

    Left to itself Pillow loads the rarer ones when the first such file comes; to a second thread that comes
    by meanwhile its file is no image.
    """
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def opened(file: str | IO[bytes]) -> Image.Image:
    """The picture, of which the header is read."""
    if isinstance(file, str):
        require_regular(file)
    picture = Image.open(file, formats=_formats())
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
    is: ``pack`` with ``skip_unreadable`` would otherwise make the set smaller, unseen.
    """
    is_machine = isinstance(error, OSError) and error.errno not in _FAULTS_OF_THE_FILE
    if is_machine or isinstance(error, MemoryError):
        raise error
    return UnreadableImageError(f"{name} cannot be read: {reason(error)}.")


class Part(NamedTuple):
    """Images and labels as a source has them, not checked yet."""

    images: Images
    labels: npt.NDArray[Any]


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
        self.images, self.channels = images, channels
        self.labels = np.array(labels, dtype=np.int64)
        self.labels.flags.writeable = False
        self._mode = "L" if channels == 1 else "RGB"

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Split({len(self)} images, {self._mode})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Split, (self.images, self.labels, self.channels)

    @property
    def pixels(self) -> Bytes | None:
        """(n, H, W, C) where the source holds arrays of one size, else None; read-only."""
        return self.images.pixels

    def picture(self, index: int) -> Image.Image:
        """Decoded, of mode RGB, or L in a set of one channel; if that fails the error names the image."""
        return self.images.picture(index, self._mode)

    def name(self, index: int) -> str:
        """For messages: the path, or the number in its file."""
        return self.images.name(index)

    def subset(self, indices: Sequence[int] | npt.NDArray[Any]) -> "Split":
        """The images at the indices (or where a boolean mask is true), in that order."""
        chosen = np.asarray(indices)
        chosen = np.flatnonzero(chosen) if chosen.dtype == bool else chosen.astype(np.int64)
        return Split(self.images.select(chosen), self.labels[chosen], self.channels)


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


BAR_FROM = 50
"""Fewer pieces of work are done before a progress bar could be read."""


def in_threads(
    work: Callable[[range], Result],
    count: int,
    what: str,
    *,
    chunk: int = 64,
    threads: int | None = None,
    progress: bool = True,
) -> list[Result]:
    """``work`` on pieces of ``range(count)``, its results in order. Pillow and the disk free Python's lock.

    The first process of a machine shows a bar on a terminal. There are as many threads as cores, unless the
    work waits for a disk.
    """
    pieces = [range(start, min(start + chunk, count)) for start in range(0, count, chunk)]
    console = Console(stderr=True)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    shown = progress and is_first and console.is_terminal and len(pieces) >= BAR_FROM
    with ThreadPoolExecutor(threads or usable_cores()) as pool:
        # After an error, or an interrupt, map() cancels what has not begun.
        results = pool.map(work, pieces)
        bar = track(results, what, len(pieces), console=console, transient=True, disable=not shown)
        return list(bar)


class Look(NamedTuple):
    """What the headers of images show: why some cannot be read, by index; width and height of the others."""

    unreadable: dict[int, str]
    sizes: set[tuple[int, int]]
    is_grey: bool


_GREY = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L")


def look(images: Images, what: str) -> Look:
    """Open all images, which reads their headers; the pixels are not decoded."""
    if images.pixels is not None:
        _, height, width, channels = images.pixels.shape
        return Look({}, {(width, height)}, channels == 1)
    assert isinstance(images, EncodedImages)
    encoded = images

    def look_at(piece: range) -> Look:
        failed, sizes, is_grey = {}, set(), True
        for index in piece:
            try:
                with encoded.header(index) as picture:
                    sizes.add(picture.size)
                    is_grey = is_grey and picture.mode in _GREY
            except Exception as error:
                failed[index] = str(unreadable(encoded.name(index), error))
        return Look(failed, sizes, is_grey)

    # More threads than cores: they wait for a disk.
    looks = in_threads(look_at, len(images), f"looking at {what}", chunk=256, threads=16)
    failed = {index: message for each in looks for index, message in each.unreadable.items()}
    return Look(failed, set().union(*(each.sizes for each in looks)), all(each.is_grey for each in looks))


NAMED = 5
"""How many of the unreadable images a message names."""


def counted(what: str, messages: Sequence[str], total: int) -> str:
    """How many cannot be read, the first of them, and why.

    >>> counted("pets", ["cat/1.jpg cannot be read: cannot identify image file."], 20)
    '1 of 20 images of pets cannot be read: cat/1.jpg: cannot identify image file.'
    """
    named = [message.replace(" cannot be read: ", ": ", 1).removesuffix(".") for message in messages[:NAMED]]
    more = f"; and {len(messages) - NAMED} more" if len(messages) > NAMED else ""
    return f"{len(messages)} of {total} images of {what} cannot be read: {'; '.join(named)}{more}."


def refusal(what: str, messages: Sequence[str], total: int) -> UnreadableImageError:
    """One error for all images that cannot be read."""
    return UnreadableImageError(
        f"{counted(what, messages, total)} Repair or remove them, or pack the set without them: "
        "wellposed pack DATA -o FILE.npz --skip-unreadable."
    )


class Readable(NamedTuple):
    """What could be decoded of a split, (m, C, S, S); which of its images those are; why others are not."""

    pixels: Bytes
    indices: Indices
    unreadable: tuple[str, ...]


def decode_all(split: Split, size: int, channels: int, *, progress: bool = True) -> Bytes:
    """All images of the split as one array (n, C, S, S).

    Pictures of another size are fitted, see :func:`fitted`. Images that cannot be read raise one error that
    counts and names them; :func:`decode_readable` skips them.
    """
    pixels, _, failed = decode_readable(split, size, channels, progress=progress)
    if failed:
        raise refusal("the split", failed, len(split))
    return pixels


def decode_readable(split: Split, size: int, channels: int, *, progress: bool = True) -> Readable:
    """The images of the split that can be read, as one array, and which they are."""
    everything = np.arange(len(split))
    if split.pixels is not None and split.pixels.shape[1:] == (size, size, channels):
        return Readable(np.ascontiguousarray(split.pixels.transpose(0, 3, 1, 2)), everything, ())
    pixels = np.empty((len(split), channels, size, size), np.uint8)
    mode = "L" if channels == 1 else "RGB"

    def decode_piece(piece: range) -> dict[int, str]:
        failed = {}
        for index in piece:
            try:
                picture = split.images.picture(index, mode)
            except UnreadableImageError as error:
                failed[index] = str(error)
            else:
                array = np.asarray(fitted(picture, size))
                pixels[index] = array if channels == 1 else array.transpose(2, 0, 1)
        return failed

    # One for small pictures, whose decoding is mostly Python's part of the work; None for all cores.
    threads = None
    with contextlib.suppress(UnreadableImageError, IndexError):
        threads = 1 if math.prod(split.picture(0).size) <= 64 * 64 else None
    pieces = in_threads(decode_piece, len(split), "decoding images", threads=threads, progress=progress)
    failed = {index: message for piece in pieces for index, message in piece.items()}
    indices = np.setdiff1d(everything, list(failed))
    return Readable(pixels[indices] if failed else pixels, indices, tuple(failed.values()))


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
