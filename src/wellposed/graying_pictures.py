"""What graying does to a few images, as a record: pictures before, after and of the difference.

A run writes it next to its numbers when it has ended; a report draws it without the images.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from wellposed.files import read_object, write_text
from wellposed.image_files import PNG
from wellposed.records import Status

NAME = "graying.json"
MOST_EPS = 5

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class Grayed:
    """An image after graying.

    Args:
        eps: the power.
        picture, difference: PNG files as data URIs; in a difference grey is no change.
        kappa, status: of the matrix of patches.
        change: the largest of a pixel, which is black or white in the difference.
    """

    eps: float
    picture: str
    difference: str
    kappa: float
    status: Status
    change: float


@dataclass(frozen=True, kw_only=True)
class GrayedImage:
    """An image as it is, and grayed by several powers."""

    name: str
    picture: str
    kappa: float
    status: Status
    grayed: tuple[Grayed, ...]


@dataclass(frozen=True, kw_only=True)
class GrayingPictures:
    """Images under one method.

    Args:
        method: of graying.
        patch: side of the patches, whose matrix is grayed, in pixels.
        source: where the images come from, in words.
    """

    method: str
    patch: int
    source: str
    images: tuple[GrayedImage, ...]


def together(every: Sequence[GrayingPictures]) -> GrayingPictures | None:
    """The first with the powers of those that are alike in all else; at most five; None of none."""
    if not every:
        return None

    def key(of: GrayingPictures) -> Any:
        return of.method, of.patch, [(image.name, image.picture) for image in of.images]

    first = every[0]
    alike = [each for each in every if key(each) == key(first)]
    images = []
    for place, image in enumerate(first.images):
        by_eps = {step.eps: step for each in alike for step in each.images[place].grayed}
        kept = sorted(by_eps.values(), key=lambda step: -step.eps)[:MOST_EPS]
        images.append(dataclasses.replace(image, grayed=tuple(kept)))
    return dataclasses.replace(first, images=tuple(images))


def write(pictures: GrayingPictures, folder: Path) -> None:
    write_text(folder / NAME, json.dumps(dataclasses.asdict(pictures), indent=1, allow_nan=False) + "\n")


def read(folder: Path) -> GrayingPictures | None:
    """Of a run's folder; None where there is no such file. A file of another form is a ``ValueError``."""
    path = folder / NAME
    if not path.exists():
        return None
    values = read_object(path)
    try:
        images = tuple(
            _checked(
                GrayedImage(**{**image, "grayed": tuple(_checked(Grayed(**s)) for s in image["grayed"])})
            )
            for image in values["images"]
        )
        return _checked(GrayingPictures(**{**values, "images": images}))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"expected pictures of graying ({error})") from error


def _checked(made: Made) -> Made:
    """A file may be made by hand: a page gets numbers, texts and PNG files alone."""
    for name, value in vars(made).items():
        if name in ("picture", "difference"):
            fits = isinstance(value, str) and value.startswith(PNG)
        elif name in ("eps", "kappa", "change", "patch"):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            fits = is_number and math.isfinite(value)
        elif name == "status":
            fits = value in get_args(Status)
        else:
            fits = isinstance(value, tuple if name in ("images", "grayed") else str)
        if not fits:
            raise TypeError(f"another value as its {name}: {str(value)[:40]!r}")
    return made
