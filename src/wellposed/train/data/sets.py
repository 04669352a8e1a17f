"""What every set must fulfil before it is trained on, and how it is divided.

``digits``: 1,797 handwritten digits, 8 x 8 pixels, that come with this package.

They are the test part of *Optical Recognition of Handwritten Digits* by E. Alpaydin and C. Kaynak (UCI
Machine Learning Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0), as scikit-learn ships it.
Changed: the grey levels 0 to 16 are scaled to 0 to 255.

Sets of images by name.

>>> data = open_data("digits")
>>> len(data.train), len(data.test), data.channels, data.size
(1397, 400, 1, 8)
>>> open_data("cifar-10:data")
Traceback (most recent call last):
ValueError: there is no set 'cifar-10:data'; did you mean cifar10:DIR? Expected digits, cifar10:DIR, ...
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from wellposed.text import closest
from wellposed.train.data.decoding import Look, counted, look, refusal
from wellposed.train.data.images import Contents, ImageData, Indices, Part, PixelImages, Split

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


TEST_IMAGES = 400


def all_digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Pixels (1797, 8, 8) and labels, in the order of the original."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        return file["pixels"], file["labels"].astype(np.int64)


def digits(seed: int) -> Contents:
    """The images; which 400 of them are for testing is drawn by the seed."""
    pixels, labels = all_digits()
    whole = Part(PixelImages(pixels[..., None], "digit"), labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).numpy()
    return Contents(
        classes=tuple(map(str, range(10))),
        train=whole.select(order[TEST_IMAGES:]),
        test=whole.select(order[:TEST_IMAGES]),
        photographs=False,
        is_test_drawn=True,
    )


FORMS = {
    "digits": "digits",
    "cifar10": "cifar10:DIR",
    "cifar100": "cifar100:DIR",
    "fashion-mnist": "fashion-mnist:DIR",
    "torchvision": "torchvision:NAME",
    "folder": "folder:DIR (or the folder alone)",
    "hf": "hf:NAME_OR_PARQUET",
    "wds": "wds:SHARDS",
    "packed": "packed:FILE.npz",
}
"""All ways to name a set."""

_BY_SUFFIX = {".npz": "packed:", ".parquet": "hf:", ".tar": "wds:"}


def open_data(
    spec: str,
    *,
    holdout: float = 0.1,
    seed: int = 0,
    limit: int | None = None,
    skip_unreadable: bool = False,
) -> ImageData:
    """A set to train on, checked: its labels, its classes, and the header of every image.

    Args:
        spec: one of :data:`FORMS`.
        holdout: share of each class to test on, where the set has no test split.
        seed: of what is held out, of ``limit``, and of the test images of ``digits``.
        limit: train on so many images only, drawn by the seed.
        skip_unreadable: leave out images that cannot be read, and say so in the notes, instead of stopping.
            Headers are checked here; an image whose header is whole and whose pixels are not is found when it
            is decoded.
    """
    if not 0 < holdout < 1:
        raise ValueError(f"holdout must be in (0, 1), got {holdout}; it is the share to test on.")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}.")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}.")
    contents = contents_of(spec, seed)
    classes, notes = contents.classes, contents.notes
    parts = [
        checked_labels(part, classes, f"{spec}, {split}")
        for split, part in (("train", contents.train), ("test", contents.test))
        if part is not None
    ]
    looks = [look(part.images, spec) for part in parts]
    parts, skipped = _readable(parts, looks, spec, skip_unreadable)
    notes += skipped
    if contents.test is None:
        (whole,) = parts
        kept, apart = held_out(whole.labels, holdout, seed)
        parts = [whole.select(kept), whole.select(apart)]
        notes += (f"{len(apart)} of {len(whole.labels)} images were held out for testing (seed {seed}).",)
    train, test = parts
    require_images(train, test, classes, spec)
    if limit is not None:
        train = limited(train, limit, seed, spec)
        notes += (f"{limit} training images were drawn (seed {seed}).",)
    for split, part in (("training", train), ("test", test)):
        missing = absent(part.labels, classes)
        if missing:
            notes += (f"There are no {split} images of {listed(missing)}.",)

    channels = 1 if all(seen.is_grey for seen in looks) else 3
    sizes = {seen.size for seen in looks}
    return ImageData(
        name=spec,
        classes=classes,
        train=Split(train.images, train.labels, channels),
        test=Split(test.images, test.labels, channels),
        channels=channels,
        size=sizes.pop() if len(sizes) == 1 else None,
        photographs=contents.photographs,
        notes=notes,
        is_test_drawn=contents.is_test_drawn or contents.test is None,
    )


def _readable(
    parts: list[Part], looks: list[Look], spec: str, skip_unreadable: bool
) -> tuple[list[Part], tuple[str, ...]]:
    messages = [message for seen in looks for _, message in seen.unreadable]
    if not messages:
        return parts, ()
    total = sum(len(part.labels) for part in parts)
    if not skip_unreadable:
        raise refusal(spec, messages, total)
    kept = [
        part.select(
            np.setdiff1d(np.arange(len(part.labels)), np.array([i for i, _ in seen.unreadable], np.int64))
        )
        for part, seen in zip(parts, looks, strict=True)
    ]
    return kept, (f"{counted(spec, messages, total)} They were left out.",)


def contents_of(spec: str, seed: int) -> Contents:
    """What the set holds, not checked yet. Each source is imported when it is asked for."""
    kind, colon, rest = spec.partition(":")
    if spec == "digits":
        return digits(seed)
    if colon and kind in FORMS and kind != "digits":
        if not rest:
            raise ValueError(f"expected {FORMS[kind]}, got {spec!r}; what comes after the colon is missing.")
        return _from_source(kind, rest)
    path = Path(spec).expanduser()
    if path.is_dir():
        from wellposed.train.data.folder import image_folder

        return image_folder(path)
    raise _unknown(spec, path)


def _from_source(kind: str, rest: str) -> Contents:
    path = Path(rest).expanduser()
    match kind:
        case "cifar10" | "cifar100" | "fashion-mnist":
            from wellposed.train.data.torchvision_sets import torchvision_files

            return torchvision_files(kind, path)
        case "torchvision":
            from wellposed.train.data.torchvision_sets import torchvision_set

            return torchvision_set(rest)
        case "folder":
            from wellposed.train.data.folder import image_folder

            return image_folder(path)
        case "packed":
            from wellposed.train.data.packed import packed

            return packed(path)
        case "hf":
            from wellposed.train.data.hub import hub

            return hub(rest)
        case _:
            from wellposed.train.data.shards import shards

            return shards(rest)


def _unknown(spec: str, path: Path) -> Exception:
    if path.is_file():
        prefix = _BY_SUFFIX.get(path.suffix)
        remedy = f"for this one write {prefix}{spec}" if prefix else f"expected {', '.join(FORMS.values())}"
        return ValueError(f"{spec} is a file; {remedy}.")
    kind = spec.partition(":")[0]
    if os.sep in kind or kind.startswith((".", "~")):
        return FileNotFoundError(f"expected a folder of images, there is no {path}.")
    close = closest(kind.lower(), FORMS)
    hint = f"did you mean {FORMS[close]}? " if close else ""
    return ValueError(
        f"there is no set {spec!r}; {hint}Expected {', '.join(FORMS.values())}; there is no folder of that "
        "name either."
    )
