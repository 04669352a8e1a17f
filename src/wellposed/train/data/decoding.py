"""Work on many images in threads: Pillow and the disk leave Python's lock free.

What the headers of all images say, before any time is spent on training.

Decode a whole split at once, for sets that fit in memory.

>>> from wellposed.train.data import open_data
>>> decode_all(open_data("digits").test, 8, 1).shape
(400, 1, 8, 8)
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import Progress

from wellposed.train.data.images import (
    Bytes,
    EncodedImages,
    Images,
    Indices,
    Split,
    UnreadableImageError,
    opened,
    unreadable,
)

Result = TypeVar("Result")

BAR_FROM = 5_000
"""Fewer images are done before a bar could be read."""


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(
    work: Callable[[range], Result],
    count: int,
    what: str,
    *,
    chunk: int = 64,
    threads: int | None = None,
    progress: bool = True,
    bar_from: int = BAR_FROM,
) -> list[Result]:
    """``work`` on pieces of ``range(count)``, its results in order.

    Args:
        work: takes a piece of the range.
        what: words beside the progress bar, which is shown for ``bar_from`` items or more, on a terminal,
            by the first process of a machine.
        chunk: size of a piece.
        threads: as many as there are cores unless the work waits for a disk.
    """
    pieces = [range(start, min(start + chunk, count)) for start in range(0, count, chunk)]
    console = Console(stderr=True)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    is_silent = not (progress and is_first and console.is_terminal and count >= bar_from)
    results = []
    with (
        Progress(console=console, transient=True, disable=is_silent) as bar,
        ThreadPoolExecutor(threads or cores()) as pool,
    ):
        task = bar.add_task(what, total=count)
        try:
            for piece, result in zip(pieces, pool.map(work, pieces), strict=True):
                results.append(result)
                bar.advance(task, len(piece))
        except BaseException:  # an interrupt too should not wait for what has not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


NAMED = 5
"""How many of the unreadable images a message names."""

_GREY = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L")


class Look(NamedTuple):
    """What was seen.

    Args:
        unreadable: index and message of each image that has no readable header.
        size: side in pixels if all are squares of one size.
        is_grey: all are.
    """

    unreadable: list[tuple[int, str]]
    size: int | None
    is_grey: bool


def look(images: Images, what: str) -> Look:
    """Open all images, which reads their headers; the pixels are not decoded."""
    if images.pixels is not None:
        _, height, width, channels = images.pixels.shape
        return Look([], height if height == width else None, channels == 1)
    assert isinstance(images, EncodedImages)
    encoded = images

    def look_at(piece: range) -> tuple[list[tuple[int, str]], set[tuple[int, int]], bool]:
        failed, sizes, is_grey = [], set(), True
        for index in piece:
            try:
                with opened(encoded.header(index)) as picture:
                    sizes.add(picture.size)
                    is_grey = is_grey and picture.mode in _GREY
            except Exception as error:
                failed.append((index, str(unreadable(encoded.name(index), error))))
        return failed, sizes, is_grey

    # Reading a header is work for Python alone; threads only help where they wait for a disk.
    threads = 1 if encoded.is_in_memory else 16
    pieces = in_threads(look_at, len(images), f"looking at {what}", chunk=256, threads=threads)
    failed = [entry for failures, _, _ in pieces for entry in failures]
    sizes = set().union(*(seen for _, seen, _ in pieces))
    return Look(failed, _side(sizes), all(is_grey for _, _, is_grey in pieces))


def _side(sizes: Iterable[tuple[int, int]]) -> int | None:
    """The side, if all are squares of one.

    >>> _side({(32, 32)}), _side({(32, 32), (64, 64)}), _side({(32, 24)})
    (32, None, None)
    """
    first, *others = sizes or [(0, 1)]
    return first[0] if not others and first[0] == first[1] else None


def refusal(what: str, messages: list[str], total: int) -> UnreadableImageError:
    """One error for all images that cannot be read."""
    return UnreadableImageError(
        f"{counted(what, messages, total)} Repair or remove them, or leave them out with skip_unreadable."
    )


def nothing_left(total: int, first: str) -> UnreadableImageError:
    """Where those that cannot be read are left out, and none of a split can be."""
    return UnreadableImageError(
        f"expected at least one image that can be read, got none among the {total} of a split; the first: "
        f"{first} Repair them, or take other data."
    )


def counted(what: str, messages: list[str], total: int) -> str:
    """How many cannot be read, the first of them, and why.

    >>> counted("pets", ["cat/1.jpg cannot be read: cannot identify image file."], 20)
    '1 of 20 images of pets cannot be read: cat/1.jpg: cannot identify image file.'
    """
    named = [message.replace(" cannot be read: ", ": ", 1).removesuffix(".") for message in messages[:NAMED]]
    more = f"; and {len(messages) - NAMED} more" if len(messages) > NAMED else ""
    return f"{len(messages)} of {total} images of {what} cannot be read: {'; '.join(named)}{more}."


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
