"""Small sets of images for the tests of batches, and the recipe they are used with."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from wellposed.train.batches import EvalBatches, TrainBatches, make_batches
from wellposed.train.data.images import EncodedImages, ImageData, PixelImages, Split
from wellposed.train.recipe import Recipe

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
SIZE = 8
EVERYTHING: dict[str, Any] = {
    "flip": 0.5,
    "crop_padding": 2,
    "crop_scale": 0.4,
    "color_jitter": 0.4,
    "erase": 0.5,
    "smoothing": 0.1,
}
MIXES: dict[str, Any] = {"mixup": 0.8, "cutmix": 1.0}


class Files(EncodedImages):
    """PNG files of several sizes."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        return str(self.paths[index])

    def select(self, indices: Any) -> "Files":
        return Files([self.paths[index] for index in indices])

    def file(self, index: int) -> BytesIO:
        return BytesIO(self.content(index))

    def content(self, index: int) -> bytes:
        return self.paths[index].read_bytes()


def arrays(train: int = 37, test: int = 11, channels: int = 3, size: int = SIZE) -> ImageData:
    """Random pixels, of the size that the batches have."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (train + test, size, size, channels), dtype=np.uint8)
    both = Split(PixelImages(pixels, "image"), rng.integers(0, 5, train + test), channels)
    return _data(both, train, channels, size)


def files(folder: Path, train: int = 21, test: int = 7) -> ImageData:
    """Random pictures in files, none of them square."""
    rng = np.random.default_rng(1)
    paths = [folder / f"{number}.png" for number in range(train + test)]
    for number, path in enumerate(paths):
        pixels = rng.integers(0, 256, (10 + number % 4, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return _data(Split(Files(paths), rng.integers(0, 5, train + test), 3), train, 3, None)


def _data(both: Split, train: int, channels: int, size: int | None) -> ImageData:
    parts = both.subset(range(train)), both.subset(range(train, len(both)))
    return ImageData("small", tuple("abcde"), *parts, channels, size, True)


def batches(data: ImageData, **options: Any) -> tuple[TrainBatches, EvalBatches]:
    """Of a recipe with batches of 8; rank and world go past it."""
    beside = {name: options.pop(name) for name in ("rank", "world") if name in options}
    recipe = Recipe(**{"batch_size": 8, "seed": 3, "smoothing": 0.0, **options})
    mean, std = MEAN[: data.channels], STD[: data.channels]
    return make_batches(recipe, data, image_size=SIZE, mean=mean, std=std, device="cpu", **beside)


def values(passes: list[Any]) -> list[torch.Tensor]:
    """The tensors of an update, to compare."""
    return [tensor for batch in passes for tensor in (batch.images, batch.labels)]


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    """Bit for bit."""
    pairs = list(zip(values(ours), values(theirs), strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
