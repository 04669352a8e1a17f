"""Sets of other libraries: ``torchvision:NAME`` and ``hf:NAME``.

``torchvision:NAME`` keeps the files in torch's cache, ``torchvision:NAME:DIR`` in a folder; what is missing
is downloaded. ``cifar10:DIR``, ``cifar100:DIR`` and ``fashion-mnist:DIR`` name three of them, and only read.
CIFAR's files are pickles, which could run code. torchvision compares the MD5 sum of each with that of the
original before it is opened.

``hf:NAME`` is a set of the Hugging Face hub. Local Parquet files are taken where the name is a .parquet file,
a folder of such, or a pattern like ``data/*.parquet``; the names of the files say the split.
"""

import glob
import importlib
import inspect
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from wellposed.files import alone_in
from wellposed.text import nearest
from wellposed.train.data import grouped, numbered_classes, train_and_test
from wellposed.train.data.images import Contents, EncodedImages, FileImages, Indices, Part, PixelImages

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
    "SEMEION": _WHOLE._replace(photographs=False),
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
    # The processes of a run, and runs at the same time, ask for it together.
    with alone_in(root, DOWNLOAD_SECONDS):
        return _contents(name, root, download=True)


def torchvision_files(short: str, folder: Path) -> Contents:
    """One of :data:`SHORT`, whose files are in the folder or are the folder."""
    from torchvision import datasets

    name = SHORT[short]
    inner = Path(getattr(getattr(datasets, name), "base_folder", f"{name}/raw"))
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
    first = _opened(name, root, chosen.train, download=download)
    train, test = _part(first, f"{name} train image"), None
    if chosen.test is not None:
        test = _part(_opened(name, root, chosen.test, download=download), f"{name} test image")
    names = getattr(first, "classes", None)
    if names is None:
        classes = numbered_classes(train.labels, None if test is None else test.labels, name)
    else:
        # ImageNet's classes have several names each.
        classes = tuple(each if isinstance(each, str) else str(each[0]) for each in names)
    return Contents(classes, train, test, photographs=chosen.photographs)


def _opened(name: str, root: Path, arguments: Mapping[str, Any], *, download: bool) -> Any:
    """One of torchvision's sets; what it downloads is asked for only if it cannot be opened without."""
    from torchvision import datasets

    kind = getattr(datasets, name)
    can_download = "download" in inspect.signature(kind).parameters
    remedy = f"see torchvision.datasets.{name}"
    try:
        return kind(root, **arguments, **({"download": False} if can_download else {}))
    except Exception as error:  # torchvision and its parsers have errors of many kinds
        failure = error
    if can_download and download:
        try:
            return kind(root, **arguments, download=True)
        except Exception as error:
            failure = error
    elif can_download:
        remedy = f"torchvision:{name}:{root} downloads it"
    said = (str(failure) or type(failure).__name__).splitlines()[0].rstrip(".")
    said = said.removesuffix(" You can use download=True to download it").rstrip(".")
    raise ValueError(f"torchvision cannot open {name} in {root}: {said}; {remedy}.") from failure


def _part(dataset: Any, what: str) -> Part:
    """The images of one of torchvision's sets: an array, a list of paths, or pairs of a path and a label."""
    labels = _first(dataset, "targets", "labels", "_labels")
    pixels = _first(dataset, "data")
    if pixels is not None:
        array = np.asarray(pixels)  # (n, H, W), (n, 3, H, W) or (n, H, W, 3)
        if array.ndim == 3:
            array = array[..., None]
        elif array.shape[1] == 3:
            array = np.ascontiguousarray(array.transpose(0, 2, 3, 1))
        return Part(PixelImages(array, what), np.asarray(labels))
    paths = _first(dataset, "_image_files", "_images")
    if paths is None:
        pairs = _first(dataset, "_samples", "samples", "imgs")
        paths, labels = [path for path, _ in pairs], [label for _, label in pairs]
    return Part(FileImages("/", [str(Path(path).absolute()) for path in paths]), np.asarray(labels))


def _first(dataset: Any, *names: str) -> Any:
    return next((getattr(dataset, name) for name in names if hasattr(dataset, name)), None)


class HubImages(EncodedImages):
    """One column of a Dataset, whose cells are bytes, or a struct of bytes and path."""

    def __init__(self, dataset: Any, column: str, what: str, rows: Indices) -> None:
        self._dataset, self._column, self._what, self._rows = dataset, column, what, rows

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, index: int) -> str:
        return f"{self._what} {self._rows[index]}"

    def select(self, indices: Indices) -> "HubImages":
        return HubImages(self._dataset, self._column, self._what, self._rows[indices])

    def file(self, index: int) -> str | IO[bytes]:
        cell = self._dataset[int(self._rows[index])][self._column]
        if isinstance(cell, dict):
            cell = cell.get("bytes") or cell.get("path")
        if not isinstance(cell, (bytes, str)):
            raise ValueError(f"expected the bytes of an image, got {type(cell).__name__}")
        return BytesIO(cell) if isinstance(cell, bytes) else cell


def hub(name: str) -> Contents:
    """A set of the Hugging Face hub, or local Parquet files."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            "hf: sets are read by datasets, which is not installed; install it with: "
            "pip install 'wellposed[datasets]'"
        ) from error
    found = _load(datasets, name)
    # One Dataset of a set that has no splits.
    splits = found if isinstance(found, dict) else {"train": found}
    train, test, notes = train_and_test(splits, f"hf:{name}")
    features = train.features
    image = _column(features, datasets.Image, ("image", "img"), name)
    label = _column(features, datasets.ClassLabel, ("label", "labels", "fine_label"), name)
    train_labels = _labels(train, label, name)
    test_labels = None if test is None else _labels(test, label, name)
    classes = getattr(features[label], "names", None)
    if classes is None and train_labels.dtype.kind == "U":
        known = np.unique(train_labels if test_labels is None else np.append(train_labels, test_labels))
        classes, train_labels = known.tolist(), np.searchsorted(known, train_labels)
        test_labels = None if test_labels is None else np.searchsorted(known, test_labels)
    elif classes is None:
        classes = numbered_classes(train_labels, test_labels, f"hf:{name}")

    def part(dataset: Any, labels: npt.NDArray[Any], split: str) -> Part:
        column = dataset.select_columns([image]).with_format(None)
        if isinstance(features[image], datasets.Image):
            column = column.cast_column(image, datasets.Image(decode=False))
        return Part(HubImages(column, image, f"hf:{name} {split} image", np.arange(len(labels))), labels)

    return Contents(
        classes=tuple(map(str, classes)),
        train=part(train, train_labels, "train"),
        test=None if test_labels is None else part(test, test_labels, "test"),
        notes=notes,
    )


def _load(datasets: Any, name: str) -> Any:
    local = _local_files(name)
    try:
        if local is None:
            return datasets.load_dataset(name)
        words = {"train": "train", "val": "validation", "test": "test"}
        files = {words[split]: list(map(str, paths)) for split, paths in grouped(local, f"hf:{name}").items()}
        return datasets.load_dataset("parquet", data_files=files)
    except Exception as error:  # the package, its file formats and its network have errors of many kinds
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        remedy = "check that the files are whole"
        if local is None:
            remedy = "check the name and the connection, or give local Parquet files as hf:FOLDER"
        raise ValueError(f"hf:{name} cannot be loaded: {first_line}; {remedy}.") from error


def _local_files(name: str) -> list[Path] | None:
    """Parquet files on the disk; None if the name is one of the hub's."""
    path = Path(name).expanduser()
    if path.is_dir():
        found = sorted(file for file in path.rglob("*.parquet") if not file.name.startswith("."))
        if not found:
            raise FileNotFoundError(
                f"expected .parquet files in {path}, found none; for a folder of images give {name} alone."
            )
        return found
    if path.suffix == ".parquet" or glob.has_magic(name):
        found = sorted(Path(file) for file in glob.glob(str(path), recursive=True))
        if not found:
            raise FileNotFoundError(f"expected Parquet files, there is no {path}.")
        return found
    return None


def _column(features: Any, kind: type, names: tuple[str, ...], set_name: str) -> str:
    """By its name, or else the first of its type."""
    of_type = (column for column, feature in features.items() if isinstance(feature, kind))
    column: str | None = next((each for each in names if each in features), None) or next(of_type, None)
    if column is None:
        raise ValueError(
            f"expected a column {' or '.join(names)}, or one of that type, for the {names[0]}s of "
            f"hf:{set_name}; got {', '.join(features)}. Rename the column."
        )
    return column


def _labels(dataset: Any, column: str, name: str) -> npt.NDArray[Any]:
    cells = dataset.select_columns([column]).with_format("arrow")[:][column]
    if cells.null_count:
        raise ValueError(f"{cells.null_count} of {len(cells)} labels of hf:{name} are missing ({column}).")
    labels: npt.NDArray[Any] = np.asarray(cells.to_pylist())
    return labels
