"""``torchvision:NAME``: the classification sets of ``torchvision.datasets``, with their downloads.

``torchvision:NAME`` keeps the files in torch's cache, ``torchvision:NAME:DIR`` in a folder; what is missing
is downloaded. ``cifar10:DIR``, ``cifar100:DIR`` and ``fashion-mnist:DIR`` name three of them, and only read.

CIFAR's files are pickles, which could run code. torchvision compares the MD5 sum of each with that of the
original before it is opened.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from wellposed.files import alone_in
from wellposed.text import nearest
from wellposed.train.data.folder import FileImages
from wellposed.train.data.images import Contents, Part, PixelImages, Slices
from wellposed.train.data.sets import numbered_classes

SHORT = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "fashion-mnist": "FashionMNIST"}

DOWNLOAD_SECONDS = 3600.0
"""How long a process waits for another one that downloads the same."""


class _Set(NamedTuple):
    """How torchvision names the splits of a set.

    Args:
        train: arguments of the class for the training images.
        test: the same for the others; None where the set has no split, so that a share is held out.
        photographs: mirroring leaves the class as it is.
    """

    train: Mapping[str, Any]
    test: Mapping[str, Any] | None
    photographs: bool = True


def _splits(train: str, test: str, *, photographs: bool = True) -> _Set:
    return _Set({"split": train}, {"split": test}, photographs)


_FLAG = _Set({"train": True}, {"train": False})
_SYMBOLS = _FLAG._replace(photographs=False)
_WHOLE = _Set({}, None)
SETS = {
    "CIFAR10": _FLAG,
    "CIFAR100": _FLAG,
    "Country211": _splits("train", "valid"),
    "DTD": _splits("train", "val"),
    "EMNIST": _Set({"split": "balanced", "train": True}, {"split": "balanced", "train": False}, False),
    "EuroSAT": _WHOLE,
    "FGVCAircraft": _splits("trainval", "test"),
    "FashionMNIST": _SYMBOLS,
    "Flowers102": _splits("train", "val"),
    "Food101": _splits("train", "test"),
    "GTSRB": _splits("train", "test", photographs=False),
    "ImageNet": _splits("train", "val"),
    "Imagenette": _splits("train", "val"),
    "KMNIST": _SYMBOLS,
    "MNIST": _SYMBOLS,
    "OxfordIIITPet": _splits("trainval", "test"),
    "Places365": _Set({"split": "train-standard", "small": True}, {"split": "val", "small": True}),
    "QMNIST": _SYMBOLS,
    "RenderedSST2": _splits("train", "val", photographs=False),
    "SEMEION": _Set({}, None, False),
    "STL10": _splits("train", "test"),
    "SUN397": _WHOLE,
    "SVHN": _splits("train", "test", photographs=False),
    "StanfordCars": _splits("train", "test"),
    "USPS": _SYMBOLS,
}


def torchvision_set(spec: str) -> Contents:
    """A set by its name in ``torchvision.datasets``, downloaded if it is not there."""
    asked, colon, folder = spec.partition(":")
    name = {each.lower(): each for each in SETS}.get(asked.lower())
    if name is None:
        raise ValueError(
            f"torchvision has no set {asked!r}{nearest(asked, SETS)} Expected one of {', '.join(SETS)}."
        )
    cache = Path(torch.hub.get_dir()).parent / "datasets"  # type: ignore[no-untyped-call]
    root = Path(folder).expanduser() if colon else cache
    root.mkdir(parents=True, exist_ok=True)
    # The processes of a run, and runs beside each other, ask for it at the same time.
    with alone_in(root, DOWNLOAD_SECONDS):
        return _contents(name, root, download=True)


def torchvision_files(short: str, folder: Path) -> Contents:
    """One of :data:`SHORT`, whose files are in the folder or are the folder."""
    from torchvision import datasets

    name = SHORT[short]
    kind = getattr(datasets, name)
    inner = Path(getattr(kind, "base_folder", f"{name}/raw"))
    here = folder.absolute()
    if not (here / inner).is_dir() and here.parts[-len(inner.parts) :] == inner.parts:
        here = here.parents[len(inner.parts) - 1]
    if not (here / inner).is_dir():
        raise FileNotFoundError(
            f"there is no {short} in {folder}; expected {inner}, as torchvision unpacks it. "
            f"torchvision:{name}:{folder} downloads it there."
        )
    return _contents(name, here, download=False)


def _contents(name: str, root: Path, *, download: bool) -> Contents:
    chosen = SETS[name]
    found = [
        _opened(name, root, arguments, download=download)
        for arguments in (chosen.train, chosen.test)
        if arguments is not None
    ]
    splits = ("train", "test")
    parts = [_part(each, f"{name} {split} image") for each, split in zip(found, splits, strict=False)]
    test = parts[1] if len(parts) > 1 else None
    names = getattr(found[0], "classes", None)
    if names is None:
        classes = numbered_classes(parts[0].labels, None if test is None else test.labels, name)
    else:
        # ImageNet's classes have several names each.
        classes = tuple(each if isinstance(each, str) else str(each[0]) for each in names)
    return Contents(classes, parts[0], test, photographs=chosen.photographs)


def _opened(name: str, root: Path, arguments: Mapping[str, Any], *, download: bool) -> Any:
    from torchvision import datasets

    kind = getattr(datasets, name)
    can_download = "download" in inspect.signature(kind).parameters
    given = {**arguments, "download": False} if can_download else arguments
    try:
        return kind(root, **given)
    except Exception as error:  # torchvision and its parsers have errors of many kinds
        if not (download and can_download):
            raise _refusal(name, root, error, downloads=can_download) from error
    try:
        return kind(root, **{**given, "download": True})
    except Exception as error:
        raise _refusal(name, root, error, downloads=False) from error


def _refusal(name: str, root: Path, error: Exception, *, downloads: bool) -> ValueError:
    said = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
    said = said.removesuffix(" You can use download=True to download it").rstrip(".")
    remedy = f"torchvision:{name}:{root} downloads it" if downloads else "see torchvision.datasets." + name
    return ValueError(f"torchvision cannot open {name} in {root}: {said}; {remedy}.")


def _part(dataset: Any, what: str) -> Part:
    """The images of one of torchvision's sets: an array, a list of paths, or pairs of a path and a label."""
    labels = _first(dataset, "targets", "labels", "_labels")
    pixels = _first(dataset, "data")
    if pixels is not None:
        return Part(PixelImages(_images_last(np.asarray(pixels)), what), np.asarray(labels))
    paths: Sequence[Any] | None = _first(dataset, "_image_files", "_images")
    if paths is None:
        pairs = _first(dataset, "_samples", "samples", "imgs")
        paths, labels = [path for path, _ in pairs], [label for _, label in pairs]
    absolute = (str(Path(path).absolute()) for path in paths)
    return Part(FileImages(Path("/"), Slices.of_texts(absolute)), np.asarray(labels))


def _first(dataset: Any, *names: str) -> Any:
    return next((getattr(dataset, name) for name in names if hasattr(dataset, name)), None)


def _images_last(pixels: Any) -> Any:
    """(n, H, W), (n, 3, H, W) or (n, H, W, 3) as (n, H, W, C)."""
    if pixels.ndim == 3:
        return pixels[..., None]
    return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)) if pixels.shape[1] == 3 else pixels
