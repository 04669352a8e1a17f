"""torchvision's sets by name, from small stand-ins in the form in which torchvision keeps them."""

import gzip
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
import torchvision
from PIL import Image

from wellposed.train.data import open_data
from wellposed.train.data.libraries import SETS
from wellposed.train.fitting import default_folder
from wellposed.train.recipe import Recipe

NAMES = ["airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
EACH = 20


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchvision without its check that the files are the true ones."""
    for module in ("cifar", "svhn"):
        monkeypatch.setattr(f"torchvision.datasets.{module}.check_integrity", lambda *_: True)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked for; nothing is downloaded."""
    asked = []

    def fetch(url: str, *arguments: Any, **options: Any) -> None:
        asked.append(url)
        raise RuntimeError("no network\nat all")

    for module in ("cifar", "mnist"):
        monkeypatch.setattr(f"torchvision.datasets.{module}.download_and_extract_archive", fetch)
    return asked


def rows(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (EACH, 3072), dtype=np.uint8)


def labels(seed: int, classes: int = 10) -> list[int]:
    return np.random.default_rng([seed, 1]).permutation(np.arange(EACH) % classes).tolist()


def write_cifar10(root: Path) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        content = {"data": rows(number), "labels": labels(number)}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": NAMES}, protocol=2))
    return folder


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path) -> None:
    folder.mkdir(parents=True)
    for seed, (split, count) in enumerate((("train", 30), ("t10k", 20))):
        pixels = np.random.default_rng(seed).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(idx(pixels))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx((np.arange(count) % 10).astype(np.uint8)))


def assert_same(spec: str, train: Any, test: Any) -> Any:
    """Images and labels are those that torchvision gives."""
    data = open_data(spec)
    for split, theirs in ((data.train, train), (data.test, test)):
        assert len(split) == len(theirs) > 0
        for index in range(len(theirs)):
            picture, label = theirs[index]
            np.testing.assert_array_equal(np.asarray(split.picture(index)), np.asarray(picture))
            assert split.labels[index] == label
    return data


@pytest.mark.usefixtures("trusted")
def test_cifar10(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path)
    theirs = [torchvision.datasets.CIFAR10(tmp_path, train=is_train) for is_train in (True, False)]
    for spec in (f"torchvision:cifar10:{tmp_path}", f"cifar10:{tmp_path}", f"cifar10:{folder}"):
        data = assert_same(spec, *theirs)
    assert data.classes == tuple(NAMES)
    assert (len(data.train), data.channels, data.size, data.photographs) == (5 * EACH, 3, 32, True)
    np.testing.assert_array_equal(data.train.pixels, theirs[0].data)


@pytest.mark.usefixtures("trusted")
def test_cifar100_has_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for seed, name in enumerate(("train", "test")):
        content = {"data": rows(seed), "fine_labels": labels(seed, 20), "coarse_labels": [0] * EACH}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"fine {i}" for i in range(20)]}))
    data = open_data(f"cifar100:{tmp_path}")
    assert data.train.labels.tolist() == labels(0, 20)
    assert data.classes[7] == "fine 7"
    np.testing.assert_array_equal(data.test.pixels, rows(1).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def test_fashion_mnist(tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    write_idx(raw)
    theirs = [torchvision.datasets.FashionMNIST(tmp_path, train=is_train) for is_train in (True, False)]
    for spec in (f"fashion-mnist:{tmp_path}", f"fashion-mnist:{raw}", f"torchvision:FashionMNIST:{tmp_path}"):
        data = assert_same(spec, *theirs)
    assert data.classes == tuple(theirs[0].classes)
    assert (data.channels, data.size, data.photographs) == (1, 28, False)


@pytest.mark.usefixtures("trusted")
def test_svhn_has_its_channels_first_and_no_names_of_classes(tmp_path: Path) -> None:
    for split in ("train", "test"):
        pixels = np.random.default_rng(len(split)).integers(0, 256, (32, 32, 3, EACH), dtype=np.uint8)
        content = {"X": pixels, "y": np.array([labels(0)]).T + 1}
        scipy.io.savemat(tmp_path / f"{split}_32x32.mat", content)
    theirs = [torchvision.datasets.SVHN(tmp_path, split=split) for split in ("train", "test")]
    data = assert_same(f"torchvision:SVHN:{tmp_path}", *theirs)
    assert data.classes == tuple(map(str, range(10)))
    assert (data.channels, data.size, data.photographs) == (3, 32, False)


def test_food101_is_files(tmp_path: Path) -> None:
    """Names and numbers of the classes come from lists, and so do the splits."""
    root = tmp_path / "food-101"
    images = {split: {} for split in ("train", "test")}
    for label, name in enumerate(("pizza", "apple_pie")):
        (root / "images" / name).mkdir(parents=True)
        for number in range(6):
            pixels = np.full((24 + number, 30, 3), 40 * number + label, np.uint8)
            Image.fromarray(pixels).save(root / "images" / name / f"{number}.jpg")
            split = "train" if number < 4 else "test"
            images[split].setdefault(name, []).append(f"{name}/{number}")
    (root / "meta").mkdir()
    for split, listed in images.items():
        (root / "meta" / f"{split}.json").write_text(json.dumps(listed))
    theirs = [torchvision.datasets.Food101(tmp_path, split=split) for split in ("train", "test")]
    data = assert_same(f"torchvision:Food101:{tmp_path}", *theirs)
    assert data.classes == ("apple_pie", "pizza")
    assert (data.channels, data.size, data.photographs) == (3, None, True)
    broken = root / "images" / "pizza" / "2.jpg"
    broken.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"1 of 12 images .* cannot be read: .*pizza/2\.jpg"):
        open_data(f"torchvision:Food101:{tmp_path}")


def test_eurosat_has_no_split(tmp_path: Path) -> None:
    for label, name in enumerate(("Forest", "River")):
        folder = tmp_path / "eurosat" / "2750" / name
        folder.mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (64, 64), (number, label, 0)).save(folder / f"{name}_{number}.jpg")
    data = open_data(f"torchvision:EuroSAT:{tmp_path}", holdout=0.2)
    assert data.classes == ("Forest", "River")
    assert (len(data.train), len(data.test), data.is_test_drawn) == (16, 4, True)


def test_what_is_not_there_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    cache = tmp_path / "datasets"
    with pytest.raises(ValueError, match=rf"cannot open CIFAR10 in {cache}: no network; see torchvision"):
        open_data("torchvision:CIFAR10")
    assert offline == [torchvision.datasets.CIFAR10.url]
    monkeypatch.setattr(
        "torchvision.datasets.mnist.download_and_extract_archive",
        lambda url, download_root, filename, md5: write_named(Path(download_root), filename),
    )
    assert len(open_data("torchvision:MNIST").train) == 30
    assert (cache / "MNIST" / "raw").is_dir()


def write_named(folder: Path, archive: str) -> None:
    """The file that is in one of MNIST's archives."""
    write_idx(folder / "all")
    (folder / "all" / archive.removesuffix(".gz")).rename(folder / archive.removesuffix(".gz"))
    for left in (folder / "all").iterdir():
        left.unlink()
    (folder / "all").rmdir()


def test_an_archive_that_is_there_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "KMNIST" / "raw"
    write_idx(raw)
    for file in list(raw.iterdir()):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    monkeypatch.setattr("torchvision.datasets.utils.check_integrity", lambda path, *_: Path(path).is_file())
    assert len(open_data(f"torchvision:KMNIST:{tmp_path}").test) == 20


class _Runs:
    """Pickled as a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path: Path, protocol: int, offline) -> None:
    folder = write_cifar10(tmp_path)
    trace = tmp_path / "trace"
    content = {"data": rows(1), "labels": [_Runs(os.system, f"touch {trace}")]}
    (folder / "data_batch_3").write_bytes(pickle.dumps(content, protocol=protocol))
    for spec in (f"cifar10:{tmp_path}", f"torchvision:CIFAR10:{tmp_path}"):
        with pytest.raises(ValueError, match=r"torchvision cannot open CIFAR10 in .*"):
            open_data(spec)
    assert not trace.exists()
    pickle.loads((folder / "data_batch_3").read_bytes())  # it was a working one
    assert trace.exists()


@pytest.mark.usefixtures("trusted")
def test_labels_out_of_range_are_named(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path)
    content = {"data": rows(2), "labels": [*labels(2)[:-1], 10]}
    (folder / "data_batch_2").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=r"got 10 at index 39 .CIFAR10 train image 39.; 1 of 100"):
        open_data(f"cifar10:{tmp_path}")


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=rf"expected cifar-10-batches-py.* torchvision:CIFAR10:{tmp_path}"
    ):
        open_data(f"cifar10:{tmp_path}")
    folder = write_cifar10(tmp_path)
    (folder / "data_batch_2").unlink()
    with pytest.raises(ValueError, match=r"CIFAR10 in .*not found or corrupted; torchvision:CIFAR10"):
        open_data(f"cifar10:{tmp_path}")
    with pytest.raises(FileNotFoundError, match="there is no fashion-mnist in"):
        open_data(f"fashion-mnist:{tmp_path}")
    raw = tmp_path / "FashionMNIST" / "raw"
    write_idx(raw)
    images = raw / "t10k-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-500])
    with pytest.raises(ValueError, match="torchvision cannot open FashionMNIST in"):
        open_data(f"fashion-mnist:{tmp_path}")


def test_a_name_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"has no set 'CIFARS10'; did you mean 'CIFAR10'\?.*Expected one of"):
        open_data("torchvision:CIFARS10")
    with pytest.raises(ValueError, match="has no set 'CocoDetection'"):
        open_data("torchvision:CocoDetection")


@pytest.mark.parametrize("name", SETS)
def test_torchvision_takes_the_arguments(name: str, tmp_path: Path) -> None:
    """Each set is asked for in an empty folder: what is missing are the files alone."""
    kind = getattr(torchvision.datasets, name)
    for arguments in filter(None, (SETS[name].train, SETS[name].test)):
        options = {"download": False} if name == "SEMEION" else {}
        with pytest.raises((RuntimeError, FileNotFoundError)) as error:
            kind(tmp_path, **arguments, **options)
        assert "argument" not in str(error.value)


def test_the_folder_of_a_run_has_the_name_of_the_set() -> None:
    assert default_folder(Recipe(data="torchvision:SVHN")).name.startswith("SVHN-")
    assert default_folder(Recipe(data="torchvision:SVHN:/data")).name.startswith("SVHN-")
