"""What the headers of all images say, before any time is spent on training."""

from collections.abc import Iterable
from typing import NamedTuple

from wellposed.train.data.images import (
    EncodedImages,
    Images,
    UnreadableImageError,
    opened,
    unreadable,
)
from wellposed.train.data.threads import in_threads

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
