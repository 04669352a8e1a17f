"""timm's auto-augmentation policies, with pictures left in them by every Pillow.

At high magnitudes some policies posterize to 0 bits, a black picture in older releases of Pillow and an error
since its release 13, after a few hundred images. Here at least 1 bit stays.

Single images as workers make them: decoded, augmented by timm, uint8.

What is drawn for an image depends on (seed, epoch, position in the epoch) only, so it does not matter which
worker makes it, nor whether there are any.

torch's DataLoader as it is used here.

Training images that are read and augmented by worker processes, ahead of their use.

The test images in order, shared by the processes.

Every process gets the same number of batches of the same size: with collective operations in the model none
may run short. The end is padded with the last image, of weight 0.

>>> indices, weights = shares(5, batch_size=2, rank=1, world=2)
>>> indices.tolist(), weights.tolist()
([[2, 3], [4, 4]], [[1.0, 1.0], [0.0, 0.0]])
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import posterize
from timm.data.transforms import MaybePILToTensor
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from wellposed.errors import WorkerDiedError
from wellposed.train.batches.augment import normalised
from wellposed.train.batches.batch import Batch, EvalBatch, Preparation, Uploads, scale, updates, upload
from wellposed.train.batches.order import Indices, Order, Purpose, all_seeded
from wellposed.train.data.images import Split, UnreadableImageError, fitted, nothing_left
from wellposed.train.recipe import Recipe


def keep_a_bit(transform: Any) -> None:
    """Change the operations of a composed transform that posterize, in place."""
    for operation in _operations(getattr(transform, "transforms", [])):
        if operation.aug_fn is posterize:
            operation.aug_fn = _posterized


def _operations(steps: list[Callable[[Any], Any]]) -> Iterator[Any]:
    for step in steps:
        yield from getattr(step, "ops", ())
        for alternative in getattr(step, "policy", ()):
            yield from alternative


def _posterized(picture: Image.Image, bits: int, **rest: Any) -> Image.Image:
    posterized: Image.Image = posterize(picture, max(bits, 1), **rest)
    return posterized


Steps = tuple[Callable[[Any], Any], ...]
"""From a picture to a tensor (C, S, S), uint8."""


class Key(NamedTuple):
    """Which image, and where it stands; all that a worker is told."""

    epoch: int
    position: int
    image: int


class Item(NamedTuple):
    """An image (C, S, S), its label, and why it is not the one asked for, if so."""

    pixels: Tensor
    label: int
    problem: str


class Loaded(NamedTuple):
    """The items of one batch."""

    images: Tensor
    labels: Tensor
    problems: list[str]


def eval_steps(size: int) -> Steps:
    """The centre of the picture, as resident images are decoded too."""
    return partial(fitted, size=size), MaybePILToTensor()


def train_steps(recipe: Recipe, size: int, mean: Sequence[float]) -> Steps:
    """The training transforms that timm has for a resolved recipe, without what is done on the device.

    Without ``crop_scale`` the picture is first fitted, so that timm's random crop takes all of it.
    """
    crops = recipe.crop_scale is not None
    try:
        augment = create_transform(
            size,
            is_training=True,
            scale=(recipe.crop_scale or 1.0, 1.0),
            ratio=None if crops else (1.0, 1.0),
            hflip=recipe.flip or 0.0,
            color_jitter=recipe.color_jitter or None,
            auto_augment=recipe.worker_policy,
            interpolation="bicubic",
            mean=tuple(mean),
            use_prefetcher=True,  # gives uint8, not normalised
        )
    except Exception as error:  # timm's parser asserts, or fails in some other way
        raise ValueError(
            f"expected trivial, or one of timm's policies for auto_augment such as rand-m9-mstd0.5, got "
            f"{recipe.auto_augment!r} ({error or type(error).__name__})."
        ) from error
    keep_a_bit(augment)
    return (augment,) if crops else (partial(fitted, size=size), augment)


class Items(Dataset[Item]):
    """The images of a split by key.

    Args:
        split: where they are.
        steps: what is done to a picture.
        seed: of what the steps draw.
        replaces: where an image cannot be read give the next one of the split that can; otherwise give the
            problem alone.
    """

    def __init__(self, split: Split, steps: Steps, seed: int, *, replaces: bool) -> None:
        self.split, self.steps, self.seed, self.replaces = split, steps, seed, replaces

    def __getitem__(self, key: Key) -> Item:
        problem = ""
        for attempt in range(len(self.split) if self.replaces else 1):
            index = (key.image + attempt) % len(self.split)
            try:
                picture = self.split.picture(index)
            except UnreadableImageError as error:
                problem = problem or str(error)
            else:
                return Item(self._pixels(picture, key), int(self.split.labels[index]), problem)
        return Item(torch.empty(0, dtype=torch.uint8), -1, problem)

    def _pixels(self, picture: Image.Image, key: Key) -> Tensor:
        value: Any = picture
        with all_seeded(self.seed, Purpose.ITEM, key.epoch, key.position):
            for step in self.steps:
                value = step(value)
        assert isinstance(value, Tensor)
        return value


def together(items: list[Item]) -> Loaded:
    """One batch; where an image is missing there are only problems."""
    problems = [item.problem for item in items]
    if not all(item.pixels.numel() for item in items):
        return Loaded(torch.empty(0), torch.empty(0), problems)
    images, labels = default_collate([(item.pixels, item.label) for item in items])
    return Loaded(images, labels, problems)


def refuse_missing(loaded: Loaded, items: Items) -> None:
    """Raise an error that names the first image that could not be read, if one is missing in the batch."""
    if loaded.images.numel():
        return
    problem = next(filter(None, loaded.problems))
    if items.replaces:
        raise nothing_left(len(items.split), problem)
    raise UnreadableImageError(
        f"{problem} Repair or remove it, or leave such images out with skip_unreadable."
    )


T = TypeVar("T")

PREFETCH = 4
"""Batches that each worker makes ahead."""


def loader(
    items: Items, keys: Iterable[list[Key]], workers: int, device: torch.device, *, persistent: bool
) -> DataLoader[Item]:
    """Batches of items by their keys.

    Args:
        keys: of each batch; iterated over anew for every iteration.
        workers: processes; 0 makes the items in this one.
        device: for CUDA the batches are pinned.
        persistent: the workers stay from one iteration to the next.
    """
    return DataLoader(
        items,
        batch_sampler=keys,  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=together,
        pin_memory=device.type == "cuda",
        worker_init_fn=_leave_signals_to_the_trainer,
        prefetch_factor=PREFETCH if workers else None,
        persistent_workers=persistent and workers > 0,
        # Of its own: DataLoader would otherwise draw from the global one.
        generator=torch.Generator().manual_seed(0),
    )


def read_by(batches: Iterable[T]) -> Iterator[T]:
    """What workers read; one that died is an error that says what to do."""
    try:
        yield from batches
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise WorkerDiedError(
            f"a process that reads images died ({str(error).splitlines()[0]}), as they do when the memory is "
            "full; the same command resumes from the last checkpoint. Fewer workers= need less memory."
        ) from error


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Answer no signals but the training process's own.

    Ctrl-C and a scheduler's SIGTERM go to all processes of a job. The training process answers them by a
    checkpoint; a worker that dies meanwhile would break that off.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS, where only Ctrl-C is left to it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_the_trainer_says, daemon=True).start()


def _end_when_the_trainer_says() -> None:
    """Only here, where it waits for them, does a process learn who sent a signal."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


class KeysOfUpdates:
    """The keys of every pass of the updates in ``span``, one list a pass."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.span = range(0)
        self._epoch: tuple[int, int, Indices] | None = None

    def __iter__(self) -> Iterator[list[Key]]:
        for update in self.span:
            yield from self.of(update)

    def of(self, update: int) -> list[list[Key]]:
        epoch, step = self.order.place(update)
        indices = self._table(epoch)[step]
        positions = self.order.positions + step * self.order.batch_size
        return [
            [Key(epoch, position, image) for position, image in zip(*one_pass, strict=True)]
            for one_pass in zip(positions.tolist(), indices.tolist(), strict=True)
        ]

    def _table(self, epoch: int) -> Indices:
        now = epoch, self.order.rollbacks
        if self._epoch is None or self._epoch[:2] != now:
            self._epoch = *now, self.order.table(epoch)
        return self._epoch[2]


class StreamedBatches:
    """Batches of images that workers make; normalised, erased and mixed on the device.

    Args:
        items: the training images.
        preparation: what is done on the device.
        workers: processes that read; 0 reads in this one.
        notes: sentences for a report.
    """

    placement: Literal["device", "stream"] = "stream"

    def __init__(self, items: Items, preparation: Preparation, *, workers: int, notes: list[str]) -> None:
        self.items, self.preparation, self.workers, self.notes = items, preparation, workers, notes
        self.unreadable: list[str] = []
        self.updates_per_epoch = preparation.order.updates_per_epoch
        self._keys = KeysOfUpdates(preparation.order)
        self._upload = Uploads(preparation.device)
        self._loader: DataLoader[Item] | None = None
        self._batches: Iterator[Any] = iter(())
        self._turn = 0

    @property
    def images(self) -> int:
        return len(self.items.split) - len(self.unreadable)

    def iterate(self, start: int, stop: int) -> Iterator[tuple[int, list[Batch]]]:
        self._turn += 1
        turn = self._turn
        self._keys.span = updates(start, stop)
        if self._loader is None:
            device = self.preparation.device
            self._loader = loader(self.items, self._keys, self.workers, device, persistent=True)
        # Kept here and not by this generator, so that close() can let go of it.
        self._batches = read_by(self._loader)
        for update in range(start, stop):
            if turn != self._turn:
                raise RuntimeError(
                    f"iterate() was ended before update {update} by close(), reorder() or another iterate(); "
                    "use one at a time."
                )
            passes = self._keys.order.positions
            yield update, self._prepared(update, [next(self._batches) for _ in passes])

    def at(self, update: int) -> list[Batch]:
        loaded = [together([self.items[key] for key in keys]) for keys in self._keys.of(update)]
        return self._prepared(update, loaded)

    def reorder(self, rollbacks: int) -> None:
        self._turn += 1
        self.preparation.order.rollbacks = rollbacks

    def close(self) -> None:
        self._turn += 1
        self._batches, self._loader = iter(()), None

    def _prepared(self, update: int, loaded: list[Loaded]) -> list[Batch]:
        batches = []
        for plan, one_pass in zip(self.preparation.plans(update), loaded, strict=True):
            refuse_missing(one_pass, self.items)
            collect_unreadable(one_pass, self.unreadable)
            images, labels = self._upload([one_pass.images, one_pass.labels])
            batches.append(self.preparation.batch(update, plan, images, None, labels))
        return batches


def collect_unreadable(loaded: Loaded, unreadable: list[str]) -> None:
    """Add a message for each image that could not be read, once."""
    for problem in filter(None, loaded.problems):
        if problem not in unreadable:
            unreadable.append(problem)


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
