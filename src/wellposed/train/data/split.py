"""A set of labelled images: two splits, the names of the classes, and what is known of the pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from wellposed.train.data.compact import Bytes, Indices
from wellposed.train.data.images import Images


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
