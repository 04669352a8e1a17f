"""Images for a probe, from whatever a user has, as batches that the model takes.

A tensor, files, a folder, PIL images, a DataLoader or a Dataset all become batches on the model's device and
in its dtype. Files are decoded when their batch comes. Files and PIL images are preprocessed as the model
expects (:func:`model_transform`); tensors go in as they are.

>>> import timm, torch
>>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
>>> [tuple(batch.shape) for batch in image_batches(torch.randn(5, 3, 32, 32), model, batch_size=4)]
[(4, 3, 32, 32), (1, 3, 32, 32)]
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from wellposed.anatomy.example import LIBRARIES
from wellposed.image_files import SUFFIXES, decode, reason
from wellposed.interrupts import uninterrupted
from wellposed.probes.model_input import (
    Transform,
    channels_of,
    expected_channels,
    expected_size,
    image_axis,
    is_of,
    model_transform,
    takes_images,
    takes_videos,
)
from wellposed.probes.named_inputs import DEFAULT_LIMIT, KEYS, NamedBatches, NamedInputs, as_named
from wellposed.probes.observe import plain, preserved
from wellposed.text import few

Batch = Tensor | NamedInputs


def image_batches(
    images: object,
    model: nn.Module,
    *,
    batch_size: int = 16,
    limit: int | None = None,
    transform: Transform | None = None,
) -> "ImageBatches | NamedBatches":
    """The images as batches; see :class:`ImageBatches`, for other inputs :class:`NamedBatches`.

    Args:
        images: a float tensor (B, C, H, W), videos with one more axis for a model of videos, or the tokens
            that a model without a patch embedding takes; the path of an image or of a folder; a list of
            paths, PIL images or tensors (C, H, W); a DataLoader, a Dataset, or any iterable of images or
            batches. Of a tuple the first element counts, of a dict the first of :data:`KEYS`. What an
            iterator has given is kept, to start over. For a model of texts, of sounds or of several inputs:
            a dict of its arguments (token ids with their mask), a tensor of token ids, or a DataLoader of
            these.
        model: batches come on the device and in the dtype of its first floating parameter.
        batch_size: images in a batch; larger batches are split.
        limit: images in all. None is all of a tensor or a list, :data:`DEFAULT_LIMIT` of anything else.
        transform: for files and PIL images, in place of :func:`model_transform`.
    """
    for name, value in (("batch_size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if isinstance(images, NamedBatches):
        return images.again(batch_size, limit)
    if isinstance(images, NamedInputs):
        images = images.values
    if isinstance(images, Iterator):
        images = source_of(images)  # a look at its first item takes it
    if (source := _named_source(images, plain(model))) is not None:
        return NamedBatches(source, plain(model), batch_size, limit)
    return ImageBatches(images, model, batch_size, limit, transform)


def first_images(images: object, model: nn.Module, count: int) -> Batch:
    """The first ``count`` images, or all if there are fewer, as one batch.

    Of named inputs those of the first batch, if it has fewer.
    """
    with uninterrupted(), preserved(model):  # a DataLoader draws random numbers
        batches: Iterable[Batch] = image_batches(images, model, batch_size=count, limit=count)
        return next(iter(batches))


def first_image(images: object, model: nn.Module) -> Batch:
    """The first image as a batch of one; the first text without its padding."""
    batch = first_images(images, model, 1)
    return batch if isinstance(batch, Tensor) else batch.take(slice(0, 1)).unpadded()


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


@dataclass
class _Replayed:
    """An iterator that can start over, because what it has given is kept."""

    iterator: Iterator[Any]
    given: list[Any] = field(default_factory=list)

    def __iter__(self) -> Iterator[Any]:
        for index in itertools.count():
            if index == len(self.given):
                try:
                    self.given.append(next(self.iterator))
                except StopIteration:
                    return
            yield self.given[index]


@dataclass
class _MapStyle:
    """A Dataset that is read by index."""

    dataset: Any

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


def _named_source(images: object, model: nn.Module) -> Source | None:
    """The source if it is of named inputs."""
    if isinstance(images, (Tensor, Mapping)):
        return source_of(images) if as_named(images, model) is not None else None
    if isinstance(images, (ImageBatches, str, os.PathLike)) or not isinstance(images, Iterable):
        return None
    if isinstance(images, (list, tuple)) and not isinstance(images, Source):
        is_named = bool(images) and isinstance(images[0], Mapping) and as_named(images[0], model) is not None
        return source_of(images) if is_named else None
    source = source_of(images)
    with uninterrupted(), preserved(model):
        first = next(iter(source.items), None)
    return source if isinstance(first, Mapping) and as_named(first, model) is not None else None


class ImageBatches:
    """Batches on the model's device and in its dtype; iterating again starts over.

    ``count`` is the number of images so far, ``unreadable`` names the files that gave none and says why, and
    ``notes`` are sentences for a report. They start over too.
    """

    def __init__(
        self,
        images: object,
        model: nn.Module,
        batch_size: int = 16,
        limit: int | None = None,
        transform: Transform | None = None,
    ) -> None:
        self.count = 0
        self.unreadable: list[tuple[str, str]] = []
        if isinstance(images, ImageBatches):  # the same images again; what it has counted stays
            limit = min((most for most in (limit, images._limit) if most is not None), default=None)
            transform = transform or images._given_transform
            self._source: Source = images._source
            images = images._images_given
        else:
            self._source = source_of(images)
        self._images_given: object = images
        self._files = 0
        self._model, self._batch_size = plain(model), batch_size
        self._transform: Transform | None = transform
        self._given_transform: Transform | None = transform
        self._how = "Files were preprocessed by the transform= that was given."
        self._is_default_limit = limit is None and not self._source.is_chosen
        self._limit: int | None = DEFAULT_LIMIT if self._is_default_limit else limit

        self._channels, self._size = expected_channels(self._model), expected_size(self._model)
        self._mode = "L" if channels_of(self._model) == 1 else "RGB"
        is_encoder = isinstance(self._model, (nn.TransformerEncoder, nn.TransformerEncoderLayer))
        given = images.ndim if isinstance(images, Tensor) else 4
        self._axis = image_axis(self._model)
        # Of a batch: tokens have 3 axes, images 4, videos 5.
        self._axes = 4
        if is_encoder or (given == 3 and not takes_images(self._model)):
            self._axes = 3
        elif takes_videos(self._model) or (given == 5 and not is_of(self._model, *LIBRARIES)):
            self._axes = 5
        if isinstance(images, Tensor):
            self._check(images, is_batch=True)

    @property
    def notes(self) -> list[str]:
        """What a reader of the measurement should know of the images."""
        notes = []
        if self._is_default_limit and self.count == self._limit:
            notes.append(f"The first {self.count} images of {self._source.what} were used.")
        if self._files:
            notes.append(self._how)
        if self.unreadable:
            notes.append(
                f"{len(self.unreadable)} of {self._files} files could not be read: {self._listed()}."
            )
        if self._source.shuffles:
            notes.append("The DataLoader shuffles: another run may see other images.")
        return notes

    def __iter__(self) -> Iterator[Tensor]:
        self.count, self._files, self.unreadable = 0, 0, []
        first: Tensor | None = None
        group: list[Tensor] = []
        for image in self._images():
            first = image if first is None else first
            if image.shape != first.shape:
                raise ValueError(
                    f"all images must have one shape, got {_shape(first)} and {_shape(image)} "
                    f"(image {self.count + len(group)}); resize them."
                )
            group.append(image)
            is_last = self.count + len(group) == self._limit
            if is_last or len(group) == self._batch_size:
                yield self._batch(group)
                group = []
            if is_last:
                return
        if group:
            yield self._batch(group)
        if self.count == 0:
            why = f"; none of {self._files} files could be read: {self._listed()}" if self._files else ""
            raise ValueError(f"expected at least one image, found none in {self._source.what}{why}.")

    def _images(self) -> Iterator[Tensor]:
        """One image (C, H, W), video (four axes), or the tokens (L, C) of one, at a time."""
        for item in self._source.items:
            for piece in pieces(item):
                if isinstance(piece, Tensor):
                    self._check(piece)
                    is_batch = piece.ndim == self._axes
                    yield from piece.unbind(self._axis) if is_batch else (piece,)
                elif (image := self._opened(piece)) is not None:
                    yield self._transformed(image)

    def _batch(self, group: list[Tensor]) -> Tensor:
        batch = torch.stack(group, self._axis)
        parameter = next((p for p in self._model.parameters() if p.is_floating_point()), None)
        if parameter is not None:
            batch = batch.to(parameter.device, parameter.dtype)
        if not batch.is_meta and not batch.isfinite().all():
            bad = [i for i, image in enumerate(batch.unbind(self._axis)) if not image.isfinite().all()]
            raise ValueError(
                f"expected finite images, got NaN or infinite values in image {self.count + bad[0]} "
                f"({batch.dtype}); fix it or leave it out."
            )
        self.count += len(group)
        return batch

    def _check(self, x: Tensor, *, is_batch: bool = False) -> None:
        """Raises unless the tensor holds images (or tokens) that the model takes, one or a batch."""
        if self._given_transform is not None:
            raise ValueError(
                "transform= is for files and PIL images, got a tensor, which goes to the model as it is; "
                "apply it before, and leave transform= out."
            )
        if not x.is_floating_point():
            raise ValueError(
                f"expected images in floating point, as the model takes them, got {x.dtype}; use "
                "(x / 255 - mean) / std, or pass files or PIL images, which are preprocessed."
            )
        axes = self._axes
        if x.ndim != axes and (is_batch or x.ndim != axes - 1):
            tokens = "tokens (L, B, C)" if self._axis else "tokens (B, L, C)"
            videos = "videos (B, T, C, H, W) or (B, C, T, H, W), as the model takes them"
            wanted = {3: tokens, 4: "images (B, C, H, W)", 5: videos}[axes]
            remedy = f"; x.unsqueeze({self._axis}) makes a batch of one" if x.ndim == axes - 1 else ""
            raise ValueError(f"expected {wanted}, got a tensor of shape {_shape(x)}{remedy}.")
        if not x.numel():
            raise ValueError(f"expected at least one image, got a tensor of shape {_shape(x)}.")
        if axes == 4:
            self._check_fits(*x.shape[-3:])

    def _check_fits(self, channels: int, height: int, width: int) -> None:
        if self._channels not in (None, channels):
            raise ValueError(
                f"the model takes images of {self._channels} channels, got {channels}; the axes are "
                "(B, C, H, W), x.permute(0, 3, 1, 2) makes them of (B, H, W, C)."
            )
        if self._size not in (None, (height, width)):
            assert self._size is not None
            option = "img_size" if is_of(self._model, "timm") else "image_size"
            raise ValueError(
                f"the model takes images of {self._size[0]} x {self._size[1]}, got {height} x {width}; "
                f"resize them, or create it with {option}={height if height == width else (height, width)}."
            )

    def _opened(self, piece: "str | os.PathLike[str] | Image.Image") -> Image.Image | None:
        """The picture, or None for a file that cannot be read."""
        self._files += 1
        try:
            return decode(piece, self._mode, any_depth=self._given_transform is not None)
        except Exception as error:  # decoders raise many kinds; the other files can still be read
            if isinstance(piece, Image.Image):
                name = f"picture {self._files - 1}"
            else:
                name = os.path.relpath(piece, self._source.folder) if self._source.folder else str(piece)
            self.unreadable.append((name, reason(error)))
            return None

    def _transformed(self, image: Image.Image) -> Tensor:
        if self._axes == 5:
            raise ValueError(
                "expected videos, as the model takes them, got files or pictures; pass a tensor "
                "(B, T, C, H, W) or (B, C, T, H, W), or a DataLoader of these."
            )
        if self._transform is None:
            self._transform, self._how = model_transform(self._model)
        x = self._transform(image)
        if not (isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()):
            got = f"{x.dtype} of shape {_shape(x)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"transform= must make a float tensor (C, H, W) of a PIL image, got {got}.")
        self._check_fits(*x.shape)
        return x

    def _listed(self) -> str:
        return few((f"{name} ({why})" for name, why in self.unreadable), 5, "; ")


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))
