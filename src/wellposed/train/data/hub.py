"""``hf:NAME``: sets of the Hugging Face hub, and local Parquet files, through the datasets package.

Local files are taken where the name is a .parquet file, a folder of such, or a pattern like
``data/*.parquet``; the names of the files say the split (train, validation, test).
"""

import glob
import importlib
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from wellposed.train.data.folder import grouped, train_and_test
from wellposed.train.data.images import Contents, EncodedImages, Indices, Part
from wellposed.train.data.sets import numbered_classes

_IMAGE_NAMES = ("image", "img")
_LABEL_NAMES = ("label", "labels", "fine_label")


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
        if isinstance(cell, bytes):
            return BytesIO(cell)
        if isinstance(cell, str):
            return cell
        raise ValueError(f"expected the bytes of an image, got {type(cell).__name__}")

    def content(self, index: int) -> bytes:
        file = self.file(index)
        return Path(file).read_bytes() if isinstance(file, str) else file.read()


def hub(name: str) -> Contents:
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
    image = _image_column(datasets, features, name)
    label = _label_column(datasets, features, name)
    train_labels = _labels(train, label, name)
    test_labels = None if test is None else _labels(test, label, name)
    classes = getattr(features[label], "names", None)
    if classes is None:
        classes, train_labels, test_labels = _named(train_labels, test_labels, f"hf:{name}")

    def part(dataset: Any, labels: npt.NDArray[Any], split: str) -> Part:
        column = dataset.select_columns([image]).with_format(None)
        if isinstance(features[image], datasets.Image):
            column = column.cast_column(image, datasets.Image(decode=False))
        return Part(HubImages(column, image, f"hf:{name} {split} image", np.arange(len(labels))), labels)

    return Contents(
        classes=tuple(map(str, classes)),
        train=part(train, train_labels, "train"),
        test=part(test, test_labels, "test") if test_labels is not None else None,
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
    except (
        Exception
    ) as error:  # the package, its file formats and its network stack have errors of many kinds
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        remedy = (
            "check the name and the connection, or give local Parquet files as hf:FOLDER"
            if local is None
            else "check that the files are whole"
        )
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


def _image_column(datasets: Any, features: Any, name: str) -> str:
    of_type = (column for column, feature in features.items() if isinstance(feature, datasets.Image))
    return _column("image", _IMAGE_NAMES, next(of_type, None), features, name)


def _label_column(datasets: Any, features: Any, name: str) -> str:
    of_type = (column for column, feature in features.items() if isinstance(feature, datasets.ClassLabel))
    return _column("label", _LABEL_NAMES, next(of_type, None), features, name)


def _column(what: str, names: tuple[str, ...], otherwise: str | None, features: Any, name: str) -> str:
    column = next((each for each in names if each in features), otherwise)
    if column is None:
        raise ValueError(
            f"expected a column {' or '.join(names)}, or one of that type, for the {what}s of hf:{name}; got "
            f"{', '.join(features)}. Rename the column."
        )
    return column


def _labels(dataset: Any, column: str, name: str) -> npt.NDArray[Any]:
    cells = dataset.select_columns([column]).with_format("arrow")[:][column]
    if cells.null_count:
        raise ValueError(f"{cells.null_count} of {len(cells)} labels of hf:{name} are missing ({column}).")
    labels: npt.NDArray[Any] = np.asarray(cells.to_pylist())
    return labels


def _named(
    train: npt.NDArray[Any], test: npt.NDArray[Any] | None, what: str
) -> tuple[tuple[str, ...], npt.NDArray[Any], npt.NDArray[Any] | None]:
    """Names of the classes where the column has none, and the labels: its texts in order, or its numbers."""
    if train.dtype.kind != "U":
        return numbered_classes(train, test, what), train, test
    texts = train if test is None else np.concatenate([train, test])
    names = np.unique(texts)
    numbers = None if test is None else np.searchsorted(names, test)
    return tuple(names.tolist()), np.searchsorted(names, train), numbers
