"""What graying does to images: a few of them before, after and the difference, for several powers.

The patches of an image are the rows of a matrix; graying lifts its small singular values. No model is run.

>>> images = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
>>> made = gray_images(images, ["noise"], patch=2, source="noise", eps=(0.5,))
>>> made.images[0].kappa > made.images[0].grayed[0].kappa
True
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from wellposed.calls import GRAY, plain_calls
from wellposed.graying_pictures import MOST_EPS, Grayed, GrayedImage, GrayingPictures
from wellposed.image_files import SUFFIXES, data_uri, decode
from wellposed.linalg import condition_number
from wellposed.nn import PixelGraying
from wellposed.records import Status

EPS = (0.9, 0.7, 0.5)
METHODS = ("spectral", "svd", "dct")
COUNT = 3
SIDE = 96
"""In pixels, of an image that is cut for the pictures: enough to see, and small in a page."""


def settings_of(recipes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The method and the powers that show what these recipes gray with.

    >>> settings_of([{}, {"edits": [{"edit": "gray_tokens", "method": "dct", "eps": 0.95}]}])
    {'method': 'dct', 'eps': [0.95, 0.9, 0.7, 0.5]}
    """
    calls = [call for recipe in recipes for call in plain_calls(recipe) if call["edit"] == GRAY]
    method = next((call["method"] for call in calls if call.get("method") in METHODS), METHODS[0])
    own = {call.get("eps") for call in calls}
    powers = {eps for eps in own if isinstance(eps, float) and 0 < eps < 1}
    return {"method": method, "eps": sorted({*EPS, *powers}, reverse=True)[:MOST_EPS]}


def gray_images(
    images: Tensor,
    names: Sequence[str],
    *,
    patch: int,
    source: str,
    method: str = "spectral",
    eps: Sequence[float] = EPS,
) -> GrayingPictures:
    """Pictures and numbers of images (B, C, H, W) from 0 to 1.

    Args:
        images: float, whose sides are multiples of ``patch``.
        names: of the images.
        patch: side of a patch.
        source: where the images come from, in words.
        method: ``"spectral"``, ``"svd"`` or ``"dct"``.
        eps: the powers.
    """
    # On small matrices the SVD gives the spectral method's result at once.
    exact: Literal["svd", "dct"] = "dct" if method == "dct" else "svd"
    before = _kappas(images, patch)
    grayed: list[list[Grayed]] = [[] for _ in names]
    for power in eps:
        after = PixelGraying(patch, power, exact)(images.double())
        change = after - images
        largest = change.abs().amax((-3, -2, -1))
        for i, (kappa, status) in enumerate(_kappas(after, patch)):
            difference = 0.5 + change[i] / (2 * largest[i]).clamp(min=1e-9)
            step = Grayed(
                eps=float(power),
                picture=png(after[i]),
                difference=png(difference),
                kappa=kappa,
                status=status,
                change=largest[i].item(),
            )
            grayed[i].append(step)
    made = (
        GrayedImage(name=name, picture=png(image), kappa=kappa, status=status, grayed=tuple(steps))
        for name, image, (kappa, status), steps in zip(names, images, before, grayed, strict=True)
    )
    return GrayingPictures(method=method, patch=patch, source=source, images=tuple(made))


def gray_folder(folder: Path, **settings: Any) -> GrayingPictures:
    """The first images of a folder that can be read, in colour; ``settings`` are method and eps."""
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
    source = f"images of {folder.name}"
    return gray_images(squares(found, SIDE), names, patch=8, source=source, **settings)


def squares(pictures: Sequence[Image.Image], side: int) -> Tensor:
    """The middle of each picture, (B, C, side, side) from 0 to 1."""
    made = []
    for picture in pictures:
        square = min(picture.size)
        left, top = (picture.width - square) // 2, (picture.height - square) // 2
        cut = picture.crop((left, top, left + square, top + square))
        pixels = np.asarray(cut if square == side else cut.resize((side, side)), np.float64) / 255
        made.append(torch.from_numpy(pixels.reshape(side, side, -1)).movedim(-1, 0))
    return torch.stack(made)


def png(image: Tensor) -> str:
    """An image (C, H, W) from 0 to 1 as a data URI."""
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8)
    return data_uri(Image.fromarray((pixels[0] if len(pixels) == 1 else pixels.movedim(0, -1)).numpy()))


def _kappas(images: Tensor, patch: int) -> list[tuple[float, Status]]:
    patches = torch.nn.functional.unfold(images.double(), patch, stride=patch).mT
    kappa, at_least = condition_number(patches)
    flags = at_least.tolist()
    return [(value, "at least" if flag else "ok") for value, flag in zip(kappa.tolist(), flags, strict=True)]


def _files(folder: Path) -> Iterator[Path]:
    """One of each folder, so that they are not all of one class; no further than needed."""
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder of images, {folder} is none.")
    for place, folders, names in os.walk(folder):
        folders.sort()
        images = [name for name in sorted(names) if Path(name).suffix.lower() in SUFFIXES]
        for name in images if Path(place) == folder else images[:1]:
            yield Path(place) / name
