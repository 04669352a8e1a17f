"""Where images come from: finding the files, telling images from labels."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from wellposed.image_files import SUFFIXES

KEYS = ("pixel_values", "image", "images", "img", "x")
"""Where the images are in a batch that is a dict; the first that it has."""


class Source(NamedTuple):
    """What can be iterated over, in words too.

    ``is_chosen``: the caller picked these images, all of them are meant.
    """

    items: Iterable[Any]
    what: str
    is_chosen: bool
    folder: Path | None = None
    shuffles: bool = False


def source_of(images: Any) -> Source:
    """Whatever a user passes as images."""
    if isinstance(images, Source):
        return images
    if isinstance(images, Tensor):
        return Source([images], "the tensor", True)
    if isinstance(images, (str, os.PathLike)):
        return _path_source(Path(images).expanduser())
    if isinstance(images, (Image.Image, Mapping)):
        return Source([images], f"the {type(images).__name__}", True)
    if isinstance(images, (list, tuple)):
        # What a DataLoader yields, images and labels, is one batch; two tensors of images are two.
        first, second = (*images, None, None)[:2]
        is_pair = isinstance(first, Tensor) and first.ndim == 4 and getattr(second, "ndim", 0) != 4
        return Source([images] if is_pair else images, f"the {type(images).__name__}", True)
    if isinstance(images, DataLoader):
        return Source(images, "the DataLoader", False, shuffles=isinstance(images.sampler, RandomSampler))
    if not isinstance(images, np.ndarray):
        what = f"the {type(images).__name__}"
        if isinstance(images, Iterator):
            return Source(_Replayed(images), what, False)
        if isinstance(images, Iterable):
            return Source(images, what, False)
        if hasattr(images, "__getitem__") and hasattr(images, "__len__"):
            return Source(_MapStyle(images), what, False)
    raise TypeError(
        "images must be a float tensor (B, C, H, W), a path, a list of paths, PIL images or tensors, a "
        f"DataLoader or a Dataset, got {_kind(images)}."
    )


def _path_source(path: Path) -> Source:
    if not path.exists():
        raise FileNotFoundError(f"expected an image or a folder of images, there is no {path}.")
    if not path.is_dir():
        return Source([path], str(path), True)
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".") and file.is_file()
    )
    if not files:
        raise ValueError(f"expected images in {path} or its folders ({', '.join(SUFFIXES)}), found none.")
    # One of each folder, then the next of each: the first few dozen are then not all of one class.
    before: Counter[Path] = Counter()
    ranked = []
    for file in files:
        ranked.append((before[file.parent], file))
        before[file.parent] += 1
    turns = ", in turn from its folders" if len(before) > 1 else ""
    return Source([file for _, file in sorted(ranked)], f"the {len(files)} in {path}{turns}", False, path)


class _Replayed:
    """An iterator that can start over, because what it has given is kept."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self.given: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        index = 0
        while True:
            if index == len(self.given):
                try:
                    self.given.append(next(self.iterator))
                except StopIteration:
                    return
            yield self.given[index]
            index += 1


class _MapStyle:
    """A Dataset that is read by index."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[index] for index in range(len(self.dataset)))


def pieces(item: Any, is_inside: bool = False) -> Iterator[Any]:
    """The tensors, pictures and paths in what a source yields: the images, without labels."""
    if isinstance(item, (Tensor, Image.Image, str, os.PathLike)):
        yield item
    elif isinstance(item, Mapping):
        key = next((key for key in KEYS if key in item), None)
        if key is None:
            raise TypeError(
                f"expected a dict with one of {', '.join(KEYS)}, got {', '.join(map(str, item))}."
            )
        yield from pieces(item[key], is_inside=True)
    elif isinstance(item, (list, tuple)):
        # (picture, mask) is an image with its label; a list of pictures is a batch.
        files = all(isinstance(part, (Image.Image, str, os.PathLike)) for part in item)
        is_batch = is_inside or (isinstance(item, list) and files)
        for part in item if is_batch else item[:1]:
            yield from pieces(part, is_inside=True)
    else:
        raise TypeError(f"expected tensors, PIL images or paths of images, got {_kind(item)}.")


def _kind(x: object) -> str:
    if isinstance(x, np.ndarray):
        return "a NumPy array; torch.from_numpy(x) makes a tensor of it, PIL.Image.fromarray(x) a picture"
    return type(x).__name__
