"""CIFAR's files as they are distributed, and pickles that are not what they seem."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision

from small_cifar import EACH, NAMES, labels, of_python_2, rows, write_cifar10
from wellposed.train.data import open_data
from wellposed.train.data.cifar_pickle import read_pickle


@pytest.fixture
def trusting_torchvision(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Torchvision's reader, without its check that the files are the true ones."""
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    return torchvision.datasets


def test_cifar10_as_torchvision_reads_it(tmp_path: Path, trusting_torchvision: Any) -> None:
    folder = write_cifar10(tmp_path)
    data = open_data(f"cifar10:{tmp_path}")
    for split, is_train in ((data.train, True), (data.test, False)):
        theirs = trusting_torchvision.CIFAR10(tmp_path, train=is_train)
        np.testing.assert_array_equal(split.pixels, theirs.data)
        np.testing.assert_array_equal(split.labels, theirs.targets)
        np.testing.assert_array_equal(np.asarray(split.picture(3)), np.asarray(theirs[3][0]))
    assert data.classes == tuple(NAMES)
    assert (data.channels, data.size, data.photographs) == (3, 32, True)
    np.testing.assert_array_equal(open_data(f"cifar10:{folder}").train.pixels, data.train.pixels)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_cifar100_has_fine_labels(tmp_path: Path, protocol: int) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for seed, name in enumerate(("train", "test")):
        content = {"data": rows(seed), "fine_labels": labels(seed, 20), "coarse_labels": [0] * EACH}
        (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))
    meta = {"fine_label_names": [f"fine {i}" for i in range(20)], "coarse_label_names": ["one"]}
    (folder / "meta").write_bytes(pickle.dumps(meta, protocol=protocol))
    data = open_data(f"cifar100:{tmp_path}")
    assert data.train.labels.tolist() == labels(0, 20)
    assert data.test.labels.tolist() == labels(1, 20)
    assert data.classes[7] == "fine 7"
    np.testing.assert_array_equal(data.test.pixels, rows(1).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


@pytest.mark.parametrize(("kind", "labels_each"), [("cifar10", 1), ("cifar100", 2)])
def test_the_binary_version(tmp_path: Path, kind: str, labels_each: int) -> None:
    if kind == "cifar10":
        folder, train, test = tmp_path / "cifar-10-batches-bin", "data_batch_{}.bin", "test_batch.bin"
        names, numbers = "batches.meta.txt", range(1, 6)
    else:
        folder, train, test = tmp_path / "cifar-100-binary", "train.bin", "test.bin"
        names, numbers = "fine_label_names.txt", range(1, 2)
    folder.mkdir()

    def binary(seed: int) -> bytes:
        coarse_and_fine = np.array([[9] * EACH, labels(seed)], np.uint8).T[:, -labels_each:]
        return np.concatenate([coarse_and_fine, rows(seed)], axis=1).tobytes()

    for number in numbers:
        (folder / train.format(number)).write_bytes(binary(number))
    (folder / test).write_bytes(binary(6))
    (folder / names).write_text("\n".join(NAMES) + "\n\n")
    data = open_data(f"{kind}:{tmp_path}")
    assert data.train.labels.tolist() == [label for number in numbers for label in labels(number)]
    np.testing.assert_array_equal(data.test.pixels, rows(6).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    assert data.classes == tuple(NAMES)
    (folder / test).write_bytes(binary(6)[:-5])
    with pytest.raises(ValueError, match=f"{test}, got .* bytes; it is cut"):
        open_data(f"{kind}:{tmp_path}")


class _Runs:
    """Pickled as a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path: Path, protocol: int) -> None:
    folder = write_cifar10(tmp_path)
    trace = tmp_path / "trace"
    content = {"data": rows(1), "labels": [_Runs(os.system, f"touch {trace}")]}
    (folder / "data_batch_3").write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(ValueError, match=r"data_batch_3 asks to run (posix|nt)\.system, .* nothing was run"):
        open_data(f"cifar10:{tmp_path}")
    assert not trace.exists()
    pickle.loads((folder / "data_batch_3").read_bytes())  # it was a working one
    assert trace.exists()


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (eval, ("1",), "builtins.eval"),
        (getattr, ("", "upper"), "builtins.getattr"),
        (np.load, ("x.npy",), "numpy.load"),
        (np.ndarray.tobytes, (np.zeros(1),), "builtins.getattr"),
    ],
)
def test_only_arrays_may_be_made(tmp_path: Path, function: Any, arguments: Any, name: str) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps({"data": _Runs(function, *arguments)}))
    with pytest.raises(ValueError, match=f"asks to run {name}"):
        read_pickle(tmp_path / "file")


@pytest.mark.parametrize("array", [np.array([{}, []], dtype=object), np.zeros(3), np.zeros(3, ">i4")])
def test_arrays_of_anything_but_bytes_are_not_made(tmp_path: Path, array: np.ndarray) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps({"data": array}))
    with pytest.raises(ValueError, match=r"expected an array of bytes in .*file"):
        read_pickle(tmp_path / "file")


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected cifar-10-batches-py or cifar-10-batches-bin"):
        open_data(f"cifar10:{tmp_path}")
    (tmp_path / "cifar-10-python.tar.gz").touch()
    with pytest.raises(FileNotFoundError, match=r"unpack .*cifar-10-python\.tar\.gz there"):
        open_data(f"cifar10:{tmp_path}")
    folder = write_cifar10(tmp_path)
    whole = (folder / "data_batch_2").read_bytes()
    (folder / "data_batch_2").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="data_batch_2 is damaged or no file of CIFAR"):
        open_data(f"cifar10:{tmp_path}")
    (folder / "data_batch_2").write_bytes(of_python_2(rows(2)[:, :3000], labels(2)))
    with pytest.raises(
        ValueError, match=r"expected 'data', an array of bytes \(n, 3072\), in .*data_batch_2"
    ):
        open_data(f"cifar10:{tmp_path}")
    (folder / "data_batch_2").write_bytes(of_python_2(rows(2), [*labels(2)[:-1], 10]))
    with pytest.raises(
        ValueError, match=r"got 10 at index 39 .cifar10 train image 39.; 1 of 100 are outside"
    ):
        open_data(f"cifar10:{tmp_path}")
    (folder / "data_batch_2").unlink()
    with pytest.raises(FileNotFoundError, match=r"cifar10 is not whole: there is no .*data_batch_2"):
        open_data(f"cifar10:{tmp_path}")
