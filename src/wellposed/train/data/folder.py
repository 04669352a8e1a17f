"""A folder of images, one folder a class; and which files of a set are for training, by their names.

Either ``DIR/train/CLASS/*.jpg`` with ``DIR/val``, ``DIR/validation`` or ``DIR/test`` next to it, or
``DIR/CLASS/*.jpg``, of which a share is held out. Classes are sorted by name. Images may lie deeper inside of
a class; hidden files are not looked at; links are followed.

>>> split_of(Path("imagenet-train-0001.tar")), split_of(Path("data/validation/0000.parquet"))
('train', 'val')
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from wellposed.image_files import SUFFIXES
from wellposed.train.data.images import Contents, FileImages, Part

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
            f"beside {other}."
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


class _Listing(NamedTuple):
    """The images of each class, as paths from the root; and how many files are none, by suffix."""

    root: Path
    images: dict[str, list[str]]
    others: Counter[str]

    def part(self, classes: tuple[str, ...]) -> Part:
        counts = [len(self.images.get(name, [])) for name in classes]
        paths = [path for name in classes for path in self.images.get(name, [])]
        return Part(FileImages(self.root, paths), np.repeat(np.arange(len(classes)), counts))


def image_folder(folder: Path) -> Contents:
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

    train = _listing(train_root)
    empty = next((name for name, paths in train.images.items() if not paths), None)
    if empty is not None:
        raise ValueError(
            f"class {empty!r} has no images in {train_root / empty} (expected {', '.join(SUFFIXES)}); add "
            "some or remove the folder."
        )
    test = None if test_root is None else _listing(test_root)
    foreign = [] if test is None else [name for name in test.images if name not in train.images]
    if foreign:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        raise ValueError(
            f"{test_root} has classes that {train_root} lacks: {', '.join(map(repr, foreign[:5]))}{more}; "
            "the folders of the two must have the same names."
        )
    others = train.others if test is None else train.others + test.others
    if others:
        endings = ", ".join(suffix or "no ending" for suffix, _ in others.most_common(5))
        notes += (f"{others.total()} files that are not images of a class were skipped ({endings}).",)
    classes = tuple(train.images)
    return Contents(classes, train.part(classes), None if test is None else test.part(classes), notes=notes)


def _listing(root: Path) -> _Listing:
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
    images: dict[str, list[str]] = {name: [] for name in names}
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
    return _Listing(root, images, others)


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
