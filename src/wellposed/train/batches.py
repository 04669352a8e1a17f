"""The batches of every update and of a test, from a recipe and a set of images.

What batches need of the two is checked before any image is read, and whether the images are kept on the
device or streamed through workers is chosen by their size.

Images come from pixels that lie on the device, or from files that worker processes read. On the device all
are decoded once; nothing is read later, and nothing waits for the device. Workers decode an image when its
turn comes and augment it by timm's transforms. What is drawn for an image depends on (seed, epoch, position
in the epoch) only, so it does not matter which worker makes it, nor whether there are any.

Every process gets the same number of test batches of the same size: with collective operations in the model
none may run short. The end is padded with the last image, of weight 0.

>>> indices, weights = shares(5, batch_size=2, rank=1, world=2)
>>> indices.tolist(), weights.tolist()
([[2, 3], [4, 4]], [[1.0, 1.0], [0.0, 0.0]])
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from wellposed.train.augment import NOISE_STARTS, Augmentation, Mixing, augmented, draw, normalised
from wellposed.train.data.images import ImageData, Split, UnreadableImageError, decode_all, fitted
from wellposed.train.order import Indices, Key, Order, Pass, Purpose, all_seeded, generator
from wellposed.train.recipe import Recipe


@dataclass(frozen=True)
class Batch:
    """One pass of one process: images (b, C, S, S), float32, normalised, on the device.

    The labels are (b,) int64, or (b, K) float32 with mixup, CutMix or label smoothing.
    """

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class EvalBatch:
    """Test images with labels (b,) int64 and weights (b,) float32: 1, or 0 for padding."""

    images: Tensor
    labels: Tensor
    weights: Tensor


Placement = Literal["device", "stream"]


class Loaded(NamedTuple):
    """The images of one pass, on the device: those at the indices (b,), or without them all, in order."""

    pixels: Tensor
    """(n, C, S, S), uint8."""
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
    """The images of a split by key; ``seed`` is that of what the steps draw."""

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
        """Copies on the device; on CUDA they are made while the GPU still computes."""
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


def make_batches(
    recipe: Recipe,
    data: ImageData,
    *,
    image_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | str,
    rank: int = 0,
    world: int = 1,
    compile: bool = False,
) -> "tuple[TrainBatches, EvalBatches]":
    """The batches of a training run, and of its tests.

    Args:
        recipe: resolved: None for ``flip``, ``crop_padding`` and ``crop_scale`` means off.
        data, image_size: the images, and the side of those in batches.
        mean, std: of each channel, for pixels from 0 to 1.
        device, rank, world: where the batches go, in which of how many processes.
        compile: compile the augmentation, on CUDA; a CPU does it as it is.
    """
    device = torch.device(device)
    check_share(recipe, rank, world)
    check_images(recipe, data, image_size, mean, std)
    if recipe.batch_size > len(data.train):
        raise ValueError(
            f"batch_size must be at most the number of training images, {len(data.train)}, got "
            f"{recipe.batch_size}; lower batch_size."
        )
    augmentation = Augmentation.of(recipe)
    if choose_placement(recipe, data, image_size, device) == "device":
        sources: list[Source] = [
            Resident(
                upload(decode_all(split, image_size, data.channels), device), upload(split.labels, device)
            )
            for split in (data.train, data.test)
        ]
    else:
        # Tests take the centre of the picture, as resident images are decoded too.
        centre = partial(fitted, size=image_size), MaybePILToTensor()
        steps: tuple[Steps, Steps] = train_steps(recipe, image_size, mean), centre
        sources = [
            Streamed(Items(split, each, recipe.seed), device, recipe.workers)
            for split, each in zip((data.train, data.test), steps, strict=True)
        ]
        augmentation = augmentation.after_workers()
    order = Order(
        len(data.train),
        recipe.batch_size,
        accumulate=recipe.accumulate,
        rank=rank,
        world=world,
        seed=recipe.seed,
    )
    mixing = Mixing(
        recipe.mixup or 0.0,
        recipe.cutmix,
        recipe.smoothing,
        classes=len(data.classes),
        seed=recipe.seed,
        probability=recipe.mix_probability,
    )
    train = TrainBatches(
        sources[0],
        augmentation,
        mixing,
        order,
        mean=mean,
        std=std,
        size=image_size,
        device=device,
        compile=compile and device.type == "cuda",
    )
    # As large as a pass of training, so that a compiled model sees one shape.
    eval_size = recipe.batch_size // (world * recipe.accumulate)
    test = EvalBatches(sources[1], eval_size, mean=mean, std=std, device=device, rank=rank, world=world)
    return train, test


SHARE = 1 / 4
"""Of the memory that the images may take; the rest is for the model and what it computes."""
CPU_LIMIT = 8 * 2**30


def choose_placement(recipe: Recipe, data: ImageData, image_size: int, device: torch.device) -> Placement:
    """What ``recipe.placement`` means for this data and device.

    ``auto`` keeps the images on the device if their bytes, decoded, are at most a quarter of its free memory;
    on a CPU a quarter of the machine's, at most 8 GiB. What only workers can do is streamed.
    """
    if recipe.placement == "stream":
        return "stream"
    needed, budget = bytes_needed(data, image_size), bytes_allowed(device)
    if recipe.placement == "auto":
        return "device" if recipe.worker_policy is None and needed <= budget else "stream"
    if recipe.worker_policy is not None:
        raise ValueError(
            f"auto_augment={recipe.worker_policy} is done by workers, got placement=device; use "
            "placement=stream, or auto_augment=trivial, or no auto_augment."
        )
    if needed > budget:
        raise ValueError(
            f"placement=device: the images take {_size(needed)}, a quarter of the memory of {device} that "
            f"can be used is {_size(budget)}; use placement=stream, or lower image_size or limit."
        )
    return "device"


def bytes_needed(data: ImageData, image_size: int) -> int:
    """Pixels and labels of both splits."""
    return (len(data.train) + len(data.test)) * (data.channels * image_size**2 + 8)


def bytes_allowed(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(SHARE * free)
    # All of the machine's memory and not what is free: that changes with the cache of files, and with it the
    # images that a training run sees would.
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(int(SHARE * total), CPU_LIMIT)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def check_share(recipe: Recipe, rank: int, world: int) -> None:
    """An update must divide evenly among processes and passes."""
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, world), got rank={rank} and world={world}.")
    slots = world * recipe.accumulate
    size, rest = divmod(recipe.batch_size, slots)
    words = f"{world} processes x accumulate={recipe.accumulate}"
    if rest or not size:
        raise ValueError(
            f"batch_size must be a multiple of {words} = {slots}, got {recipe.batch_size}; use "
            f"{max(size, 1) * slots} or {(size + 1) * slots}."
        )
    if (recipe.mixup or recipe.cutmix) and size % 2:
        raise ValueError(
            f"mixup and cutmix pair the images of a pass, so it needs an even number, got batch_size="
            f"{recipe.batch_size} over {words} = {size} in a pass; use batch_size={(size + 1) * slots}."
        )


def with_batch_size(recipe: Recipe, images: int, world: int) -> tuple[Recipe, list[str]]:
    """The recipe with batches no larger than the set, so that an epoch has an update, and a note of that."""
    if recipe.batch_size <= images:
        return recipe, []
    step = world * recipe.accumulate * (2 if recipe.mixup or recipe.cutmix else 1)
    if images < step:
        raise ValueError(
            f"expected at least {step} training images, for one batch of the recipe, got {images}; add some."
        )
    lowered = replace(recipe, batch_size=images // step * step)
    return lowered, [
        f"batch_size is {lowered.batch_size}, not {recipe.batch_size}: there are {images} training images."
    ]


def check_images(
    recipe: Recipe, data: ImageData, size: int, mean: Sequence[float], std: Sequence[float]
) -> None:
    """The images, their normalisation, and augmentation that would do nothing."""
    if recipe.task != "mae" and len(data.classes) < 2:
        raise ValueError(
            f"expected at least two classes to tell apart in {data.name}, got {len(data.classes)} "
            f"({', '.join(data.classes)}); add images of another class, or pre-train with task=mae."
        )
    if not len(data.test):
        raise ValueError(f"expected test images in {data.name}, got none; add some, or raise holdout.")
    if len(mean) != data.channels or len(std) != data.channels or min(std) <= 0:
        raise ValueError(
            f"mean and std must have {data.channels} values each, as {data.name} has channels, those of std "
            f"positive, got mean={tuple(mean)} and std={tuple(std)}."
        )
    if recipe.crop_padding is not None and recipe.crop_padding >= size:
        raise ValueError(
            f"crop_padding must be less than the image's side of {size} pixels, got {recipe.crop_padding}; "
            "an eighth of the side is usual."
        )
    policy = recipe.worker_policy
    if policy is not None and recipe.color_jitter and "3a" not in policy:
        raise ValueError(
            f"timm ignores color_jitter with auto_augment={policy}, got color_jitter="
            f"{recipe.color_jitter}; drop one of them."
        )


def scale(values: Sequence[float], device: torch.device) -> Tensor:
    """A mean or deviation of the channels, for pixels from 0 to 255, as (C, 1, 1)."""
    return (torch.tensor(values, dtype=torch.float32) * 255).view(-1, 1, 1).to(device)


class TrainBatches:
    """The batches of every update; the same whenever and however often they are asked for.

    ``order`` shows which rows of an update's plan are this process's.
    """

    def __init__(
        self,
        source: Source,
        augmentation: Augmentation,
        mixing: Mixing,
        order: Order,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        size: int,
        device: torch.device,
        compile: bool,
    ) -> None:
        self.source, self.placement, self.images = source, source.placement, source.images
        self.augmentation, self.mixing, self.order = augmentation, mixing, order
        self.updates_per_epoch = order.updates_per_epoch
        self.size, self.device = size, device
        self.mean, self.std = scale(mean, device), scale(std, device)
        self._noise: Tensor | None = None
        if augmentation.erase:
            count = NOISE_STARTS + len(mean) * size * size
            values = generator(order.seed, Purpose.NOISE).standard_normal(count, dtype=np.float32)
            self._noise = upload(values, device)
        self._augmented: Callable[..., Tensor] = augmented
        if compile:
            self._augmented = torch.compile(augmented, dynamic=False)
        self._turn = 0

    def iterate(self, start: int, stop: int) -> Iterator[tuple[int, list[Batch]]]:
        """The updates from ``start`` up to ``stop``, each with this process's passes."""
        if not 0 <= start <= stop:
            raise ValueError(f"expected 0 <= start <= stop, got start={start} and stop={stop}.")
        self._turn += 1
        turn, order = self._turn, self.order
        loaded = self.source.read(one for update in range(start, stop) for one in order.passes(update))
        for update in range(start, stop):
            if turn != self._turn:
                raise RuntimeError(
                    f"iterate() was ended before update {update} by close() or another iterate(); "
                    "use one at a time."
                )
            yield update, self._prepared(update, [next(loaded) for _ in order.positions])

    def at(self, update: int) -> list[Batch]:
        """The passes of one update, bit for bit those that ``iterate`` gives."""
        return self._prepared(update, map(self.source.take, self.order.passes(update)))

    def close(self) -> None:
        """End the worker processes, if there are any."""
        self._turn += 1
        self.source.close()

    def _prepared(self, update: int, loaded: Iterable[Loaded]) -> list[Batch]:
        order = self.order
        plans: list[Tensor | None] = [None] * len(order.positions)
        if self.augmentation != Augmentation():
            plan = draw(self.augmentation, order.seed, update, order.batch_size, self.size)
            plans = list(upload(plan[order.positions], self.device).unbind(0))
        batches = []
        for drawn, (pixels, indices, labels) in zip(plans, loaded, strict=True):
            images = self._augmented(
                pixels, indices, drawn, self.mean, self.std, self._noise, self.augmentation
            )
            batches.append(Batch(*self.mixing(update, images, labels)))
        return batches


def shares(images: int, batch_size: int, rank: int, world: int) -> tuple[Indices, NDArray[np.float32]]:
    """(batches, batch_size) indices of images and their weights."""
    batches = -(-images // (batch_size * world))
    all_of_them = np.arange(batches * world * batch_size).reshape(batches, world, batch_size)[:, rank]
    return np.minimum(all_of_them, images - 1), (all_of_them < images).astype(np.float32)


class EvalBatches:
    """The test images in order, shared by the processes, in batches of one size, that of each process."""

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        rank: int,
        world: int,
    ) -> None:
        self.source, self.images, self.device = source, source.images, device
        self.mean, self.std = scale(mean, device), scale(std, device)
        self._indices, self._weights = shares(source.images, batch_size, rank, world)

    def __len__(self) -> int:
        """Batches of this process; every process has as many."""
        return len(self._indices)

    def __iter__(self) -> Iterator[EvalBatch]:
        passes = (Pass(0, indices, indices) for indices in self._indices)
        try:
            for loaded, weights in zip(self.source.read(passes), self._weights, strict=True):
                pixels = loaded.pixels if loaded.indices is None else loaded.pixels[loaded.indices]
                images = normalised(pixels, self.mean, self.std)
                yield EvalBatch(images, loaded.labels, upload(weights, self.device))
        finally:
            self.source.close()  # the memory of the workers is free until the next test
