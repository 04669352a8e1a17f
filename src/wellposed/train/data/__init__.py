"""Labelled images to train on, by name: what every set must fulfil first, and how it is divided.

``digits`` are 1,797 handwritten digits, 8 x 8 pixels, that come with this package: the test part of *Optical
Recognition of Handwritten Digits* by E. Alpaydin and C. Kaynak (UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, licence CC BY 4.0), as scikit-learn ships it. Changed: the grey levels 0 to
16 are scaled to 0 to 255.

>>> data = open_data("digits")
>>> len(data.train), len(data.test), data.channels, data.size
(1397, 400, 1, 8)
>>> open_data("cifar-10:data")
Traceback (most recent call last):
ValueError: there is no set 'cifar-10:data'; did you mean cifar10:DIR? Expected digits, cifar10:DIR, ...

A folder of images has one folder a class: either ``DIR/train/CLASS/*.jpg`` with ``DIR/val``,
``DIR/validation`` or ``DIR/test`` next to it, or ``DIR/CLASS/*.jpg``, of which a share is held out. Classes
are sorted by name. Images may lie deeper inside of a class; hidden files are not read; links are followed.

>>> split_of(Path("imagenet-train-0001.tar")), split_of(Path("data/validation/0000.parquet"))
('train', 'val')
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from wellposed.image_files import SUFFIXES
from wellposed.text import closest
from wellposed.train.data.images import (
    NAMED,
    Contents,
    FileImages,
    ImageData,
    Indices,
    Part,
    PixelImages,
    Split,
    UnreadableImageError,
    counted,
    decode_all,
    decode_readable,
    look,
    refusal,
)

__all__ = ["ImageData", "Split", "UnreadableImageError", "decode_all", "decode_readable", "open_data"]

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
        skip_unreadable: for :func:`~wellposed.train.data.archives.pack`: skip images whose headers cannot be
            read, and say so in the notes, instead of stopping.

    Returns:
        The images by index, which are decoded when they are asked for.

    Example:
        >>> open_data("digits", limit=100).train
        Split(100 images, L)
    """
    if not 0 < holdout < 1:
        raise ValueError(f"holdout must be in (0, 1), got {holdout}; it is the share to test on.")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}.")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}.")
    contents = contents_of(spec, seed)
    classes, notes = contents.classes, contents.notes
    parts = [checked_labels(contents.train, classes, f"{spec}, train")]
    if contents.test is not None:
        parts.append(checked_labels(contents.test, classes, f"{spec}, test"))
    looks = [look(part.images, spec) for part in parts]
    channels = 1 if all(seen.is_grey for seen in looks) else 3
    splits = [Split(part.images, part.labels, channels) for part in parts]
    if unreadable := [message for seen in looks for message in seen.unreadable.values()]:
        total = sum(map(len, splits))
        if not skip_unreadable:
            raise refusal(spec, unreadable, total)
        splits = [
            split.subset(np.setdiff1d(np.arange(len(split)), list(seen.unreadable)))
            for split, seen in zip(splits, looks, strict=True)
        ]
        notes += (f"{counted(spec, unreadable, total)} They were skipped.",)
    if contents.test is None:
        (whole,) = splits
        splits = [whole.subset(chosen) for chosen in held_out(whole.labels, holdout, seed)]
        notes += (f"{len(splits[1])} of {len(whole)} images were held out for testing (seed {seed}).",)
    train, test = splits
    require_images(train, test, classes, spec)
    if limit is not None:
        if limit > len(train):
            raise ValueError(
                f"limit must be at most the {len(train)} training images of {spec}, got {limit}."
            )
        # The first ones of a permutation: a smaller limit is a part of a larger one.
        train = train.subset(np.random.default_rng(seed).permutation(len(train))[:limit])
        notes += (f"{limit} training images were drawn (seed {seed}).",)
    for name, split in (("training", train), ("test", test)):
        if missing := absent(split.labels, classes):
            notes += (f"There are no {name} images of {listed(missing)}.",)
    sizes = set().union(*(seen.sizes for seen in looks))
    width, height = sizes.pop() if len(sizes) == 1 else (0, 1)
    return ImageData(
        name=spec,
        classes=classes,
        train=train,
        test=test,
        channels=channels,
        size=width if width == height else None,
        photographs=contents.photographs,
        notes=notes,
        is_test_drawn=contents.is_test_drawn or contents.test is None,
    )


def contents_of(spec: str, seed: int) -> Contents:
    """What the set holds, not checked yet."""
    from wellposed.train.data import archives, libraries

    if spec == "digits":
        return digits(seed)
    kind, colon, rest = spec.partition(":")
    if not colon and Path(spec).expanduser().is_dir():
        kind, rest = "folder", spec
    elif not colon or kind not in FORMS or kind == "digits":
        raise _unknown(spec, Path(spec).expanduser())
    if not rest:
        raise ValueError(f"expected {FORMS[kind]}, got {spec!r}; what comes after the colon is missing.")
    path = Path(rest).expanduser()
    match kind:
        case "folder":
            return image_folder(path)
        case "torchvision":
            return libraries.torchvision_set(rest)
        case "hf":
            return libraries.hub(rest)
        case "wds":
            return archives.shards(rest)
        case "packed":
            return archives.packed(path)
        case _:
            return libraries.torchvision_files(kind, path)


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


def require_images(train: Split, test: Split, classes: tuple[str, ...], what: str) -> None:
    """Both splits have images, and training all classes."""
    for name, split in (("train", train), ("test", test)):
        if not len(split):
            raise ValueError(f"the {name} split of {what} is empty; expected at least one image.")
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
    shown = [f"class {name!r}" for name in names[:NAMED]]
    if len(names) > NAMED:
        shown.append(f"{len(names) - NAMED} more classes")
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


TEST_IMAGES = 400


def all_digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Pixels (1797, 8, 8) and labels, in the order of the original."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        return file["pixels"], file["labels"].astype(np.int64)


def digits(seed: int) -> Contents:
    """The images; which 400 of them are for testing is drawn by the seed."""
    pixels, labels = all_digits()
    images = PixelImages(pixels[..., None], "digit")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).numpy()
    test, train = (Part(images.select(chosen), labels[chosen]) for chosen in np.split(order, [TEST_IMAGES]))
    return Contents(
        classes=tuple(map(str, range(10))),
        train=train,
        test=test,
        photographs=False,
        is_test_drawn=True,
    )


SplitName = Literal["train", "val", "test"]
Item = TypeVar("Item")

WORDS: dict[str, SplitName] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
"""Words for a split."""


def split_of(path: Path) -> SplitName | None:
    """By the first such word in the file's name, else by the name of its folder."""
    words = re.findall("[a-z]+", path.stem.lower())
    return next((WORDS[word] for word in words if word in WORDS), WORDS.get(path.parent.name.lower()))


def grouped(paths: Iterable[Path], what: str) -> dict[SplitName, list[Path]]:
    """The files of each split; all are for training where no name says a split."""
    groups: dict[SplitName | None, list[Path]] = {}
    for path in paths:
        groups.setdefault(split_of(path), []).append(path)
    unnamed = groups.pop(None, [])
    named: dict[SplitName, list[Path]] = {split: found for split, found in groups.items() if split}
    if unnamed and named:
        other = next(iter(named.values()))[0]
        raise ValueError(
            f"expected train, val or test in the names of all files of {what}, or of none; got {unnamed[0]} "
            f"next to {other}."
        )
    return named or {"train": unnamed}


def train_and_test(splits: Mapping[Any, Item], what: str) -> tuple[Item, Item | None, tuple[str, ...]]:
    """What to train on, what to test on (None: nothing is set apart) and notes.

    Of a validation and a test split the former: the latter often comes without its labels, and is for the
    very end.
    """
    known = {WORDS[name]: item for name, item in splits.items() if name in WORDS}
    if "train" not in known:
        found = ", ".join(splits) or "none"
        raise ValueError(
            f"expected a train split in {what}, got {found}; the part to train on must be named train."
        )
    notes: tuple[str, ...] = ()
    if "val" in known and "test" in known:
        notes = (f"{what} has a validation and a test split; the validation split was used for testing.",)
    return known["train"], known.get("val", known.get("test")), notes


Listing = dict[str, list[str]]
"""The images of each class, as paths from the folder of all."""


def image_folder(folder: Path) -> Contents:
    """One folder a class, in two splits or in one."""
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder of images, there is no folder {folder}.")
    inner = _folders(folder)
    splits = {name.lower(): folder / name for name in inner if name.lower() in WORDS}
    # A class may be called train too; it then has no folders of classes inside.
    has_train = any(WORDS[name] == "train" and _folders(path) for name, path in splits.items())
    if splits and (has_train or len(splits) == len(inner)):
        train_root, test_root, notes = train_and_test(splits, str(folder))
    else:
        train_root, test_root, notes = folder, None, ()

    train, others = _listing(train_root)
    empty = next((name for name, paths in train.items() if not paths), None)
    if empty is not None:
        raise ValueError(
            f"class {empty!r} has no images in {train_root / empty} (expected {', '.join(SUFFIXES)}); add "
            "some or remove the folder."
        )
    test: Listing = {}
    if test_root is not None:
        test, more_others = _listing(test_root)
        others += more_others
    if foreign := [name for name in test if name not in train]:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        raise ValueError(
            f"{test_root} has classes that {train_root} lacks: {', '.join(map(repr, foreign[:5]))}{more}; "
            "the folders of the two must have the same names."
        )
    if others:
        endings = ", ".join(suffix or "no ending" for suffix, _ in others.most_common(5))
        notes += (f"{others.total()} files that are not images of a class were skipped ({endings}).",)

    def part(root: Path, images: Listing) -> Part:
        counts = [len(images.get(name, [])) for name in train]
        paths = [path for name in train for path in images.get(name, [])]
        return Part(FileImages(root, paths), np.repeat(np.arange(len(train)), counts))

    tested = None if test_root is None else part(test_root, test)
    return Contents(tuple(train), part(train_root, train), tested, notes=notes)


def _listing(root: Path) -> tuple[Listing, Counter[str]]:
    """The images, and how many files are none, by suffix."""
    names = _folders(root)
    if not names:
        raise ValueError(f"expected one folder a class in {root}, such as {root / 'cat'}, found no folders.")
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:  # Python keeps bytes that are no UTF-8 as lone surrogates
            raise ValueError(
                f"the names of classes must be UTF-8 text, got the folder {name!r} in {str(root)!r}; "
                "rename it."
            ) from error
    images: Listing = {name: [] for name in names}
    others = Counter(
        Path(entry.name).suffix
        for entry in os.scandir(root)
        if not entry.name.startswith(".") and not entry.is_dir()
    )
    for name, found in images.items():
        for path in _files(root / name, os.path.join(name, ""), set()):
            suffix = os.path.splitext(path)[1].lower()
            if suffix in SUFFIXES:
                found.append(path)
            else:
                others[suffix] += 1
        found.sort()
    return images, others


def _folders(root: Path) -> list[str]:
    return sorted(
        entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")
    )


def _files(folder: Path, prefix: str, above: set[tuple[int, int]]) -> Iterator[str]:
    """All files below; one that a dead link stands for too, to be named as unreadable later."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:  # a link to a folder that it lies in
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _files(Path(entry.path), f"{prefix}{entry.name}{os.sep}", above | {here})
            else:
                yield prefix + entry.name
