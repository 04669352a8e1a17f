"""What every set must fulfil before it is trained on, and how it is divided."""

from typing import Any

import numpy as np
import numpy.typing as npt

from wellposed.train.data.compact import Indices
from wellposed.train.data.split import Part

_NAMED = 5


def checked_labels(part: Part, classes: tuple[str, ...], what: str) -> Part:
    """The part with labels of int64, if there is one in 0 .. K-1 for each image."""
    labels = np.asarray(part.labels)
    if labels.shape != (len(part.images),):
        raise ValueError(
            f"{what}: expected one label for each of {len(part.images)} images, got labels of shape "
            f"{labels.shape}."
        )
    if labels.dtype.kind not in "iu" and labels.size:
        raise ValueError(f"{what}: labels must be whole numbers, got {labels.dtype} such as {labels[0]!r}.")
    outside = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if outside.size:
        first = int(outside[0])
        raise ValueError(
            f"{what}: labels must be from 0 to {len(classes) - 1} for {len(classes)} classes, got "
            f"{labels[first]} at index {first} ({part.images.name(first)}); {outside.size} of {len(labels)} "
            "are outside."
        )
    return Part(part.images, labels.astype(np.int64))


def numbered_classes(train: npt.NDArray[Any], test: npt.NDArray[Any] | None, what: str) -> tuple[str, ...]:
    """Names of classes that are numbers alone: up to the largest label.

    >>> numbered_classes(np.array([0, 2, 1]), None, "pets")
    ('0', '1', '2')
    """
    both = train if test is None else np.concatenate([train, test])
    highest = int(both.max()) if both.size and both.dtype.kind in "iu" else -1
    if highest >= len(train):  # said before a billion names are made
        raise ValueError(
            f"{what}: labels must be from 0 to the number of classes - 1, got {highest} with {len(train)} "
            "training images."
        )
    return tuple(map(str, range(highest + 1)))


def require_images(train: Part, test: Part, classes: tuple[str, ...], what: str) -> None:
    """Both splits have images, and training all classes."""
    for split, part in (("train", train), ("test", test)):
        if not len(part.labels):
            raise ValueError(f"the {split} split of {what} is empty; expected at least one image.")
    empty = absent(train.labels, classes)
    if empty:
        raise ValueError(
            f"{what} has no training image of {listed(empty)} among its {len(classes)} classes; add some, or "
            "leave the class out and number the others from 0."
        )


def absent(labels: npt.NDArray[Any], classes: tuple[str, ...]) -> list[str]:
    """Classes without a label."""
    counts = np.bincount(labels, minlength=len(classes))
    return [classes[label] for label in np.flatnonzero(counts == 0)]


def listed(names: list[str]) -> str:
    """The first few.

    >>> listed(["cat", "dog"])
    "class 'cat' and class 'dog'"
    """
    shown = [f"class {name!r}" for name in names[:_NAMED]]
    if len(names) > _NAMED:
        shown.append(f"{len(names) - _NAMED} more classes")
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def held_out(labels: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
    """Indices for training and for testing: of each class the share, at least one image and not all.

    A class of a single image has none for testing.

    >>> train, test = held_out(np.array([0] * 10 + [1] * 20), 0.2, seed=0)
    >>> np.bincount(np.array([0] * 10 + [1] * 20)[test])
    array([2, 4])
    """
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(np.bincount(labels))[:-1])
    is_test = np.zeros(len(labels), bool)
    for label, members in enumerate(by_class):
        count = min(max(round(share * len(members)), 1), len(members) - 1)
        # Drawn for each class by itself: the others may change without changing this one.
        if count > 0:
            is_test[np.random.default_rng([seed, label]).permutation(members)[:count]] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def limited(part: Part, limit: int, seed: int, what: str) -> Part:
    """The first ``limit`` of a permutation drawn by the seed: a smaller limit is a part of a larger one."""
    if limit > len(part.labels):
        raise ValueError(
            f"limit must be at most the {len(part.labels)} training images of {what}, got {limit}."
        )
    return part.select(np.random.default_rng(seed).permutation(len(part.labels))[:limit])
