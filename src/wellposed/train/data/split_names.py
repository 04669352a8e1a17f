"""Which files or parts of a set are for training, and which for testing, by their names.

>>> split_of(Path("imagenet-train-0001.tar")), split_of(Path("data/validation/0000.parquet"))
('train', 'val')
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

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
