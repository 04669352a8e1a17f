"""Single images as workers make them: decoded, augmented by timm, uint8.

What is drawn for an image depends on (seed, epoch, position in the epoch) only, so it does not matter which
worker makes it, nor whether there are any.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from PIL import Image
from timm.data import create_transform
from timm.data.transforms import MaybePILToTensor
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from wellposed.train.batches.draws import Purpose, all_seeded
from wellposed.train.batches.policies import keep_a_bit
from wellposed.train.data.decoding import fitted
from wellposed.train.data.headers import nothing_left
from wellposed.train.data.images import UnreadableImageError
from wellposed.train.data.split import Split
from wellposed.train.recipe import Recipe

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
