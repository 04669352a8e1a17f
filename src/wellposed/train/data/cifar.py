"""``cifar10:DIR`` and ``cifar100:DIR``: the files as they are distributed and as torchvision unpacks them.

A. Krizhevsky, *Learning Multiple Layers of Features from Tiny Images*, 2009. Either the Python version
(pickles, read by :mod:`~wellposed.train.data.cifar_pickle`) or the binary version; of CIFAR-100 the fine
labels.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wellposed.train.data.cifar_pickle import read_pickle
from wellposed.train.data.images import Bytes, Contents, Part, PixelImages

SIDE = 32
_PIXELS = 3 * SIDE * SIDE

Labels = npt.NDArray[Any]


class _Form(NamedTuple):
    """One way in which a set is distributed."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    read: Callable[[Path], tuple[Bytes, Labels]]
    read_names: Callable[[Path], list[str]]


def _from_pickle(key: str) -> Callable[[Path], tuple[Bytes, Labels]]:
    def read(path: Path) -> tuple[Bytes, Labels]:
        content = read_pickle(path)
        pixels, labels = content.get("data"), content.get(key)
        if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
            raise ValueError(f"expected 'data', an array of bytes (n, {_PIXELS}), in {path}.")
        if not isinstance(labels, list):
            raise ValueError(f"expected {key!r}, a list, in {path}, got {', '.join(content)}.")
        return pixels, np.asarray(labels)

    return read


def _from_binary(labels_each: int) -> Callable[[Path], tuple[Bytes, Labels]]:
    def read(path: Path) -> tuple[Bytes, Labels]:
        rows = np.fromfile(path, np.uint8)
        length = labels_each + _PIXELS
        if rows.size % length:
            raise ValueError(
                f"expected images of {length} bytes in {path}, got {rows.size} bytes; it is cut."
            )
        rows = rows.reshape(-1, length)
        return rows[:, labels_each:], rows[:, labels_each - 1]  # the fine label comes last

    return read


def _names_from_pickle(key: str) -> Callable[[Path], list[str]]:
    def read(path: Path) -> list[str]:
        names = read_pickle(path).get(key)
        if not isinstance(names, list):
            raise ValueError(f"expected {key!r}, a list of names, in {path}.")
        return list(map(str, names))

    return read


def _names_from_text(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split()


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_FORMS = {
    "cifar10": (
        _Form(
            folder="cifar-10-batches-py",
            archive="cifar-10-python.tar.gz",
            train=_BATCHES,
            test=("test_batch",),
            names="batches.meta",
            read=_from_pickle("labels"),
            read_names=_names_from_pickle("label_names"),
        ),
        _Form(
            folder="cifar-10-batches-bin",
            archive="cifar-10-binary.tar.gz",
            train=tuple(f"{name}.bin" for name in _BATCHES),
            test=("test_batch.bin",),
            names="batches.meta.txt",
            read=_from_binary(labels_each=1),
            read_names=_names_from_text,
        ),
    ),
    "cifar100": (
        _Form(
            folder="cifar-100-python",
            archive="cifar-100-python.tar.gz",
            train=("train",),
            test=("test",),
            names="meta",
            read=_from_pickle("fine_labels"),
            read_names=_names_from_pickle("fine_label_names"),
        ),
        _Form(
            folder="cifar-100-binary",
            archive="cifar-100-binary.tar.gz",
            train=("train.bin",),
            test=("test.bin",),
            names="fine_label_names.txt",
            read=_from_binary(labels_each=2),
            read_names=_names_from_text,
        ),
    ),
}


def cifar(which: str, folder: Path) -> Contents:
    """``which`` is cifar10 or cifar100."""
    form, path = _find(which, folder)
    for name in (*form.train, *form.test, form.names):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{which} is not whole: there is no {path / name}; unpack it anew.")
    return Contents(
        classes=tuple(form.read_names(path / form.names)),
        train=_part(form, path, form.train, f"{which} train image"),
        test=_part(form, path, form.test, f"{which} test image"),
    )


def _find(which: str, folder: Path) -> tuple[_Form, Path]:
    """The form that is there, in the folder or in its own one within."""
    for form in _FORMS[which]:
        for path in (folder / form.folder, folder):
            if (path / form.train[0]).is_file():
                return form, path
    folders = " or ".join(form.folder for form in _FORMS[which])
    archives = (folder / form.archive for form in _FORMS[which])
    archive = next((path for path in archives if path.is_file()), None)
    remedy = f"unpack {archive} there" if archive else f"expected {folders}, as torchvision unpacks it"
    raise FileNotFoundError(f"there is no {which} in {folder}; {remedy}.")


def _part(form: _Form, path: Path, files: tuple[str, ...], what: str) -> Part:
    pixels, labels = zip(*(form.read(path / name) for name in files), strict=True)
    planes = np.concatenate(pixels).reshape(-1, 3, SIDE, SIDE)
    return Part(
        PixelImages(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), what),
        np.concatenate(labels),
    )
