"""Sets of images by name.

>>> data = open_data("digits")
>>> len(data.train), len(data.test), data.channels, data.size
(1397, 400, 1, 8)
>>> open_data("cifar-10:data")
Traceback (most recent call last):
ValueError: there is no set 'cifar-10:data'; did you mean cifar10:DIR? Expected digits, cifar10:DIR, ...
"""

import difflib
import os
from pathlib import Path

import numpy as np

from wellposed.train.data import checks
from wellposed.train.data.headers import Look, counted, look, refusal
from wellposed.train.data.split import Contents, ImageData, Part, Split

FORMS = {
    "digits": "digits",
    "cifar10": "cifar10:DIR",
    "cifar100": "cifar100:DIR",
    "fashion-mnist": "fashion-mnist:DIR",
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
        checks.checked_labels(part, classes, f"{spec}, {split}")
        for split, part in (("train", contents.train), ("test", contents.test))
        if part is not None
    ]
    looks = [look(part.images, spec) for part in parts]
    parts, skipped = _readable(parts, looks, spec, skip_unreadable)
    notes += skipped
    if contents.test is None:
        (whole,) = parts
        kept, apart = checks.held_out(whole.labels, holdout, seed)
        parts = [whole.select(kept), whole.select(apart)]
        notes += (f"{len(apart)} of {len(whole.labels)} images were held out for testing (seed {seed}).",)
    train, test = parts
    checks.require_images(train, test, classes, spec)
    if limit is not None:
        train = checks.limited(train, limit, seed, spec)
        notes += (f"{limit} training images were drawn (seed {seed}).",)
    for split, part in (("training", train), ("test", test)):
        missing = checks.absent(part.labels, classes)
        if missing:
            notes += (f"There are no {split} images of {checks.listed(missing)}.",)

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
        from wellposed.train.data.digits import digits

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
        case "cifar10" | "cifar100":
            from wellposed.train.data.cifar import cifar

            return cifar(kind, path)
        case "fashion-mnist":
            from wellposed.train.data.idx import fashion_mnist

            return fashion_mnist(path)
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
    close = difflib.get_close_matches(kind.lower(), list(FORMS), n=1, cutoff=0.5)
    hint = f"did you mean {FORMS[close[0]]}? " if close else ""
    return ValueError(
        f"there is no set {spec!r}; {hint}Expected {', '.join(FORMS.values())}; there is no folder of that "
        "name either."
    )
