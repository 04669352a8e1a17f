"""The test images in order, shared by the processes.

Every process gets the same number of batches of the same size: with collective operations in the model none
may run short. The end is padded with the last image, of weight 0.

>>> indices, weights = shares(5, batch_size=2, rank=1, world=2)
>>> indices.tolist(), weights.tolist()
([[2, 3], [4, 4]], [[1.0, 1.0], [0.0, 0.0]])
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wellposed.train.batches.augment import normalised
from wellposed.train.batches.batch import EvalBatch
from wellposed.train.batches.items import Items, Key, refuse_missing
from wellposed.train.batches.loader import loader, read_by
from wellposed.train.batches.order import Indices
from wellposed.train.batches.preparation import scale
from wellposed.train.batches.streamed import collect_unreadable
from wellposed.train.batches.upload import Uploads, upload


def shares(images: int, batch_size: int, rank: int, world: int) -> tuple[Indices, NDArray[np.float32]]:
    """(batches, batch_size) indices of images and their weights."""
    batches = -(-images // (batch_size * world))
    all_of_them = np.arange(batches * world * batch_size).reshape(batches, world, batch_size)[:, rank]
    return np.minimum(all_of_them, images - 1), (all_of_them < images).astype(np.float32)


class ResidentEval:
    """Test images from pixels (n, C, S, S), uint8, and labels (n,), int64, on the device."""

    def __init__(
        self,
        pixels: Tensor,
        labels: Tensor,
        batch_size: int,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        rank: int,
        world: int,
        notes: list[str],
    ) -> None:
        self.pixels, self.labels, self.notes = pixels, labels, notes
        self.images, self.unreadable = len(pixels), list[str]()
        self.mean, self.std = scale(mean, pixels.device), scale(std, pixels.device)
        indices, weights = shares(self.images, batch_size, rank, world)
        self._indices, self._weights = upload(indices, pixels.device), upload(weights, pixels.device)

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[EvalBatch]:
        for indices, weights in zip(self._indices, self._weights, strict=True):
            images = normalised(self.pixels[indices], self.mean, self.std)
            yield EvalBatch(images, self.labels[indices], weights)


class StreamedEval:
    """Test images that workers read, which are started for each test and end with it.

    One that cannot be read, where such are replaced, has weight 0.
    """

    def __init__(
        self,
        items: Items,
        batch_size: int,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        workers: int,
        rank: int,
        world: int,
        notes: list[str],
    ) -> None:
        self.items, self.workers, self.notes, self.unreadable = items, workers, notes, list[str]()
        self.mean, self.std, self.device = scale(mean, device), scale(std, device), device
        self._indices, self._weights = shares(len(items.split), batch_size, rank, world)
        self._upload = Uploads(device)

    @property
    def images(self) -> int:
        return len(self.items.split) - len(self.unreadable)

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[EvalBatch]:
        keys = [[Key(0, image, image) for image in batch] for batch in self._indices.tolist()]
        batches = loader(self.items, keys, self.workers, self.device, persistent=False)
        for loaded, weights in zip(read_by(batches), self._weights, strict=True):
            refuse_missing(loaded, self.items)
            collect_unreadable(loaded, self.unreadable)
            was_read = np.array([not problem for problem in loaded.problems], np.float32)
            images, labels = self._upload([loaded.images, loaded.labels])
            images = normalised(images, self.mean, self.std)
            yield EvalBatch(images, labels, upload(weights * was_read, self.device))
