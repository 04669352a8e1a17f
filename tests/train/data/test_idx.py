"""Fashion-MNIST's files."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torchvision

from wellposed.train.data import open_data


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write(folder: Path, packed: bool = False) -> None:
    folder.mkdir(parents=True)
    for seed, (split, count) in enumerate((("train", 30), ("t10k", 20))):
        pixels = np.random.default_rng(seed).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for name, array in ((f"{split}-images-idx3-ubyte", pixels), (f"{split}-labels-idx1-ubyte", labels)):
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (folder / name).write_bytes(idx(array))


def test_as_torchvision_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "FashionMNIST" / "raw")
    data = open_data(f"fashion-mnist:{tmp_path}")
    for split, is_train in ((data.train, True), (data.test, False)):
        theirs = torchvision.datasets.FashionMNIST(tmp_path, train=is_train)
        np.testing.assert_array_equal(split.pixels[..., 0], theirs.data)
        np.testing.assert_array_equal(split.labels, theirs.targets)
    assert data.classes == tuple(theirs.classes)
    assert (data.channels, data.size, data.photographs) == (1, 28, False)


def test_packed_and_in_the_folder_itself(tmp_path: Path) -> None:
    write(tmp_path / "plain")
    write(tmp_path / "packed", packed=True)
    plain, packed = (open_data(f"fashion-mnist:{tmp_path / name}") for name in ("plain", "packed"))
    np.testing.assert_array_equal(plain.train.pixels, packed.train.pixels)


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no fashion-mnist in"):
        open_data(f"fashion-mnist:{tmp_path}")
    folder = tmp_path / "set"
    write(folder, packed=True)
    spec = f"fashion-mnist:{folder}"
    images, labels = folder / "t10k-images-idx3-ubyte.gz", folder / "t10k-labels-idx1-ubyte.gz"
    images.write_bytes(images.read_bytes()[:-500])
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte\.gz is cut or damaged"):
        open_data(spec)
    images.write_bytes(gzip.compress(idx(np.zeros((20, 28, 28), np.uint8))[:-1]))
    with pytest.raises(ValueError, match=r"expected 20 x 28 x 28 values in .*t10k-images.*, got 15679"):
        open_data(spec)
    images.write_bytes(gzip.compress(b"something else"))
    with pytest.raises(ValueError, match="expected an idx file of bytes with 3 axes"):
        open_data(spec)
    images.write_bytes(gzip.compress(idx(np.zeros((20, 28, 28), np.uint8))))
    labels.write_bytes(gzip.compress(idx(np.zeros(19, np.uint8))))
    with pytest.raises(ValueError, match="expected one label for each of 20 images"):
        open_data(spec)
    labels.unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*t10k-labels-idx1-ubyte, nor"):
        open_data(spec)
