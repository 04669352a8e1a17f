"""Which images the report grays: of a folder, of the run's own data, or the embedded digits."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from wellposed.image_files import SUFFIXES, decode
from wellposed.report.charts import distinct
from wellposed.report.subjects import Material

COUNT = 3
SIDE = 96
"""Of an image from a folder, in pixels: enough to see, and small in the page."""
_QUICK = ("cifar10", "cifar100", "fashion-mnist", "packed")
"""Sets of one or a few files, which open in a second or two."""


@dataclass(frozen=True)
class Gallery:
    """Images (B, C, H, W) from 0 to 1, their names, the side of a patch, and where they come from."""

    images: Tensor
    names: tuple[str, ...]
    patch: int
    source: str


def gallery(material: Material, folder: Path | None) -> Gallery:
    """The images to show; a run's own if its data lies where the recipe says."""
    if folder is not None:
        return from_folder(folder)
    recipes = [subject.recipe for subject in material.subjects if subject.recipe.get("data")]
    sides = [recipe["patch_size"] for recipe in recipes if recipe.get("patch_size")]
    patch = int(sides[0]) if sides else 2
    away = ""
    for data in distinct(str(recipe["data"]) for recipe in recipes):
        kind, colon, rest = data.partition(":")
        if data == "digits":
            return digits(patch)
        if not colon and Path(data).is_dir():
            return from_folder(Path(data))
        if rest and kind in _QUICK and Path(rest).exists():
            return _of_set(data, kind, patch)
        away = f", because the images of {kind} are not at hand"
    return digits(patch, away)


def digits(patch: int, why: str = "") -> Gallery:
    """Three of the embedded digits."""
    from wellposed.train.data.sets import all_digits

    pixels, labels = all_digits()
    chosen = [int((labels == digit).nonzero()[0][0]) for digit in (3, 8, 0)]
    images = torch.tensor(pixels[chosen])[:, None].double() / 255
    names = tuple(f"digit {labels[i]}" for i in chosen)
    source = f"handwritten digits that come with the package{why}"
    return Gallery(images, names, patch if 8 % patch == 0 else 2, source)


def from_folder(folder: Path) -> Gallery:
    """The first images that can be read, in colour."""
    found: list[Image.Image] = []
    names: list[str] = []
    for path in _files(folder):
        try:
            found.append(decode(path, "RGB", any_depth=False))
        except (OSError, ValueError, Image.DecompressionBombError):
            continue
        names.append(path.name)
        if len(found) == COUNT:
            break
    if not found:
        raise ValueError(f"expected images ({', '.join(SUFFIXES)}) in {folder} or its folders, found none.")
    return Gallery(_squares(found, SIDE), tuple(names), 8, f"images of {folder.name}")


def _squares(pictures: Sequence[Image.Image], side: int) -> Tensor:
    """The middle of each picture, (B, C, side, side) from 0 to 1."""
    made = []
    for picture in pictures:
        square = min(picture.size)
        left, top = (picture.width - square) // 2, (picture.height - square) // 2
        cut = picture.crop((left, top, left + square, top + square))
        pixels = np.asarray(cut if square == side else cut.resize((side, side)), np.float64) / 255
        made.append(torch.from_numpy(pixels.reshape(side, side, -1)).movedim(-1, 0))
    return torch.stack(made)


def _files(folder: Path) -> Iterator[Path]:
    """One of each folder, so that they are not all of one class; no further than need be."""
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder of images, {folder} is none.")
    for place, folders, names in os.walk(folder):
        folders.sort()
        images = [name for name in sorted(names) if Path(name).suffix.lower() in SUFFIXES]
        for name in images if Path(place) == folder else images[:1]:
            yield Path(place) / name


def _of_set(data: str, kind: str, patch: int) -> Gallery:
    from wellposed.train.data.sets import contents_of

    contents = contents_of(data, 0)
    part = contents.test or contents.train
    pictures = [part.images.picture(i, "RGB") for i in range(min(COUNT, len(part.images)))]
    side = min(SIDE, *(min(picture.size) for picture in pictures))
    side -= side % patch
    names = tuple(
        f"{part.images.name(i)}: {contents.classes[int(part.labels[i])]}" for i in range(len(pictures))
    )
    return Gallery(_squares(pictures, side), names, patch, f"test images of {kind}")
