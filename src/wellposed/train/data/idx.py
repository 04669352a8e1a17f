"""``fashion-mnist:DIR``: files of the idx format, plain or as .gz, as torchvision keeps them.

H. Xiao, K. Rasul, R. Vollgraf, *Fashion-MNIST*, 2017. An idx file is: two bytes 0, the type (8 is a byte),
the number of axes, the length of each as a big-endian integer, and the values.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from wellposed.files import read_bytes
from wellposed.train.data.images import Bytes, Contents, Part, PixelImages

MOST_BYTES = 2**28

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_FIRST = "train-images-idx3-ubyte"


def fashion_mnist(folder: Path) -> Contents:
    for path in (folder / "FashionMNIST" / "raw", folder / "raw", folder):
        if _with_gz(path / _FIRST) is not None:
            return Contents(CLASSES, _part(path, "train"), _part(path, "t10k"), photographs=False)
    raise FileNotFoundError(
        f"there is no fashion-mnist in {folder}; expected FashionMNIST/raw/{_FIRST} or the files themselves, "
        "plain or as .gz."
    )


def _part(folder: Path, split: str) -> Part:
    pixels = read_idx(folder / f"{split}-images-idx3-ubyte", axes=3)
    labels = read_idx(folder / f"{split}-labels-idx1-ubyte", axes=1)
    what = "train" if split == "train" else "test"
    return Part(PixelImages(pixels[..., None], f"fashion-mnist {what} image"), labels)


def read_idx(path: Path, axes: int) -> Bytes:
    """The array of bytes in an idx file, or in the same with .gz."""
    found = _with_gz(path)
    if found is None:
        raise FileNotFoundError(f"there is no {path}, nor {path.name}.gz.")
    try:
        raw = _content(found)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{found} is cut or damaged ({error}); get it anew.") from error
    header = 4 + 4 * axes
    if raw[:4] != bytes((0, 0, 8, axes)) or len(raw) < header:
        raise ValueError(f"expected an idx file of bytes with {axes} axes, got something else in {found}.")
    shape = struct.unpack(f">{axes}I", raw[4:header])
    if len(raw) - header != math.prod(shape):
        expected = " x ".join(map(str, shape))
        raise ValueError(f"expected {expected} values in {found}, got {len(raw) - header}; get it anew.")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _content(path: Path) -> bytes:
    """Of the file, unpacked where it is; no set of this format has more than :data:`MOST_BYTES`."""
    if path.suffix != ".gz":
        return read_bytes(path, MOST_BYTES)
    with gzip.open(path) as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"expected at most {MOST_BYTES:,} bytes in {path}, got more; get it anew.")
    return raw


def _with_gz(path: Path) -> Path | None:
    return next((each for each in (path, path.with_name(f"{path.name}.gz")) if each.is_file()), None)
