"""Where batches get their images: pixels that lie on the device, or files that worker processes read.

On the device all images are decoded once; nothing is read later, and nothing waits for the device. Workers
decode an image when its turn comes and augment it by timm's transforms. What is drawn for an image depends on
(seed, epoch, position in the epoch) only, so it does not matter which worker makes it, nor whether there are
any.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
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
from wellposed.train.batches.order import Key, Pass, Purpose, all_seeded
from wellposed.train.data.images import Split, UnreadableImageError, fitted
from wellposed.train.recipe import Recipe

Placement = Literal["device", "stream"]


class Loaded(NamedTuple):
    """The images of one pass, on the device.

    Args:
        pixels: uint8, (n, C, S, S).
        indices: (b,), which of the pixels are meant; None: all, in order.
        labels: (b,).
    """

    pixels: Tensor
    indices: Tensor | None
    labels: Tensor


class Resident:
    """Pixels (n, C, S, S), uint8, and labels (n,), int64, on the device.

    Its methods are those of :class:`Streamed`.
    """

    placement: Placement = "device"

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels, self.labels = pixels, labels
        self.images = len(pixels)

    def read(self, passes: Iterable[Pass]) -> Iterator[Loaded]:
        return map(self.take, passes)

    def take(self, one: Pass) -> Loaded:
        indices = upload(one.images, self.pixels.device)
        return Loaded(self.pixels, indices, self.labels[indices])

    def close(self) -> None:
        pass


PINNED_LIMIT = 64 * 2**20
"""Bytes; a whole set of images should not be locked in the host's memory."""


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device; on CUDA the copy of a small one is queued and the host does not wait."""
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    if device.type == "cuda" and tensor.nbytes <= PINNED_LIMIT:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


Steps = tuple[Callable[[Any], Any], ...]
"""From a picture to a tensor (C, S, S), uint8."""


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
    for step in augment.transforms:
        for operation in (*getattr(step, "ops", ()), *chain.from_iterable(getattr(step, "policy", ()))):
            if operation.aug_fn is posterize:
                operation.aug_fn = _posterized
    return (augment,) if crops else (partial(fitted, size=size), augment)


def _posterized(picture: Image.Image, bits: int, **rest: Any) -> Image.Image:
    """At high magnitudes some policies keep 0 bits: a black picture, and an error since Pillow 13."""
    posterized: Image.Image = posterize(picture, max(bits, 1), **rest)
    return posterized


Item = tuple[Tensor, int] | str
"""An image (C, S, S) and its label, or why it cannot be read: a worker's errors would come as tracebacks."""


class Items(Dataset[Item]):
    """The images of a split by key.

    Args:
        split: where they are.
        steps: what is done to a picture.
        seed: of what the steps draw.
    """

    def __init__(self, split: Split, steps: Steps, seed: int) -> None:
        self.split, self.steps, self.seed = split, steps, seed

    def __getitem__(self, key: Key) -> Item:
        try:
            value: Any = self.split.picture(key.image)
        except UnreadableImageError as error:
            return str(error)
        with all_seeded(self.seed, Purpose.ITEM, key.epoch, key.position):
            for step in self.steps:
                value = step(value)
        return value, int(self.split.labels[key.image])


Collated = list[Tensor] | str
"""Images and labels of a pass, or why one of the images cannot be read."""


def together(items: list[Item]) -> Collated:
    problem = next((item for item in items if isinstance(item, str)), None)
    return default_collate(items) if problem is None else problem


PREFETCH = 4
"""Passes that each worker makes ahead."""


class Streamed:
    """Images that workers make.

    Args:
        items: the images.
        device: where they go; for CUDA they are pinned.
        workers: processes, which stay from one ``read`` to the next; 0 makes the items in this one.
    """

    placement: Placement = "stream"

    def __init__(self, items: Items, device: torch.device, workers: int) -> None:
        self.items, self.workers, self.images = items, workers, len(items.split)
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._keys = _Keys()
        self._loader: DataLoader[Item] | None = None
        self._batches: Iterator[Collated] = iter(())

    def read(self, passes: Iterable[Pass]) -> Iterator[Loaded]:
        """The images of many passes; workers are ahead of their use."""
        self._keys.passes = passes
        if self._loader is None:
            self._loader = DataLoader(
                self.items,
                batch_sampler=self._keys,  # type: ignore[arg-type]
                num_workers=self.workers,
                collate_fn=together,
                pin_memory=self._device.type == "cuda",
                worker_init_fn=_leave_signals_to_the_trainer,
                prefetch_factor=PREFETCH if self.workers else None,
                persistent_workers=self.workers > 0,
                # Of its own: DataLoader would otherwise draw from the global one.
                generator=torch.Generator().manual_seed(0),
            )
        self._batches = read_by(self._loader)
        # Looked up each time and not held by a generator, so that close() can let go of the workers.
        while (collated := next(self._batches, None)) is not None:
            yield self._loaded(collated)

    def take(self, one: Pass) -> Loaded:
        """The images of one pass, bit for bit those that ``read`` gives."""
        return self._loaded(together([self.items[key] for key in one.keys]))

    def close(self) -> None:
        """End the worker processes."""
        self._batches, self._loader = iter(()), None

    def _loaded(self, collated: Collated) -> Loaded:
        if isinstance(collated, str):
            raise UnreadableImageError(
                f"{collated} Repair or remove it, or pack the set without such images: "
                "wellposed pack DATA -o FILE.npz --skip-unreadable."
            )
        pixels, labels = self._upload(collated)
        return Loaded(pixels, None, labels)

    def _upload(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies on the device; on CUDA they are made during the computation that is still going on."""
        if self._copies is None:
            return [tensor.to(self._device) for tensor in tensors]
        with torch.cuda.stream(self._copies):
            copies = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._copies)
        for copy in copies:
            # Made on one stream, used on another: its memory must not be given away before that use.
            copy.record_stream(current)
        return copies


Source = Resident | Streamed


class _Keys:
    """What a DataLoader asks for in its next iteration: the keys of each pass."""

    passes: Iterable[Pass] = ()

    def __iter__(self) -> Iterator[list[Key]]:
        return (one.keys for one in self.passes)


T = TypeVar("T")


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
