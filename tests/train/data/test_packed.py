"""Packed sets: reading, making, and what keeps them whole."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from wellposed.train.data import UnreadableImageError, images, open_data
from wellposed.train.data.archives import pack

WriteFolder = Callable[..., Path]
EXAMPLES = tuple(f"{split}/{name}/{i}.jpg" for split in ("train", "val") for name in "ab" for i in range(3))


def arrays(contents: list[bytes], labels: list[int], split: str) -> dict[str, np.ndarray]:
    return {
        f"{split}_bytes": np.frombuffer(b"".join(contents), np.uint8),
        f"{split}_offsets": np.cumsum([0, *map(len, contents)]),
        f"{split}_labels": np.array(labels, np.int16),
    }


@pytest.fixture
def plain(picture: Callable[..., Image.Image], as_file: Callable[..., bytes]) -> dict[str, np.ndarray]:
    contents = [as_file(picture(seed), "JPEG") for seed in range(9)]
    return {
        "classes": np.array(["cat", "dog"]),
        **arrays(contents[:6], [0, 1] * 3, "train"),
        **arrays(contents[6:], [1, 0, 1], "test"),
    }


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_the_documented_form(
    tmp_path: Path,
    plain: dict[str, np.ndarray],
    picture: Callable[..., Image.Image],
    as_file: Callable[..., bytes],
    save: Any,
) -> None:
    save(tmp_path / "set.npz", **plain)
    data = open_data(f"packed:{tmp_path / 'set.npz'}")
    assert data.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [0, 1] * 3
    assert (data.channels, data.size, data.photographs) == (3, 16, True)
    for split, first in ((data.train, 0), (data.test, 6)):
        for index in range(len(split)):
            (tmp_path / "one.jpg").write_bytes(as_file(picture(first + index), "JPEG"))
            with Image.open(tmp_path / "one.jpg") as expected:
                np.testing.assert_array_equal(np.asarray(split.picture(index)), np.asarray(expected))
    assert data.train.name(4) == f"{tmp_path / 'set.npz'} train image 4"
    part = data.train.subset([4, 1])
    assert part.name(0) == data.train.name(4)
    np.testing.assert_array_equal(np.asarray(part.picture(0)), np.asarray(data.train.picture(4)))


def test_the_bytes_are_mapped_and_not_pickled(tmp_path: Path, plain: dict[str, np.ndarray]) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, **plain)
    split = open_data(f"packed:{path}").train
    content = pickle.dumps(split)
    assert len(content) < len(plain["train_bytes"]) / 2
    np.testing.assert_array_equal(np.asarray(pickle.loads(content).picture(2)), np.asarray(split.picture(2)))
    os.utime(path, ns=(1, 1))
    images._opened.cache_clear()  # as in a new process
    with pytest.raises(OSError, match="was changed while it was in use"):
        pickle.loads(content).picture(2)


def test_a_set_for_measuring_is_not_for_training(tmp_path: Path, plain: dict[str, np.ndarray]) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, **{key: value for key, value in plain.items() if not key.startswith("train")})
    with pytest.raises(ValueError, match="test split only; it is for measuring, not for training"):
        open_data(f"packed:{path}")
    np.savez(path, **{key: value for key, value in plain.items() if not key.startswith("test")})
    assert len(open_data(f"packed:{path}", holdout=0.3).test) == 2


def test_files_that_are_no_packed_set(tmp_path: Path, plain: dict[str, np.ndarray]) -> None:
    path = tmp_path / "set.npz"
    with pytest.raises(FileNotFoundError, match=r"there is no file .*set.npz; wellposed pack makes one"):
        open_data(f"packed:{path}")
    short = plain["train_offsets"].copy()
    short[-1] += 1
    changes: list[tuple[dict[str, Any], str]] = [
        ({"classes": None}, "expected 'classes' in it, got train_bytes"),
        ({"train_labels": None}, "it has train_bytes, but no train_labels"),
        ({"train_offsets": short}, "train_offsets must ascend from 0 to the"),
        ({"train_offsets": short[::-1]}, "train_offsets must ascend"),
        ({"train_offsets": short.astype(float)}, "train_offsets must be one row of integers, got float64"),
        (
            {"train_bytes": plain["train_bytes"].astype(int)},
            "train_bytes must be one row of bytes, got int64",
        ),
        ({"train_labels": np.array([0, 1, 2, 0, 1, 0])}, "from 0 to 1 for 2 classes, got 2 at index 2"),
        ({"train_labels": np.array([0, 1])}, "expected one label for each of 6 images"),
        ({"train_labels": np.zeros(6, int)}, "no training image of class 'dog'"),
        ({"classes": np.array(["cat", {}], dtype=object)}, "cannot be read as a packed set: Object arrays"),
    ]
    for change, message in changes:
        np.savez(path, **{key: value for key, value in (plain | change).items() if value is not None})
        with pytest.raises(ValueError, match=message):
            open_data(f"packed:{path}")
    np.savez(path, **plain)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"set\.npz cannot be read as a packed set"):
        open_data(f"packed:{path}")
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"set\.npz cannot be read as a packed set"):
        open_data(f"packed:{path}")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ValueError, match="it holds one array"):
        open_data(f"packed:{tmp_path / 'one.npy'}")


def test_a_folder_packed_keeps_its_bytes(write_folder: WriteFolder, tmp_path: Path) -> None:
    root = write_folder(*EXAMPLES)
    made = pack(root, tmp_path / "set.npz")
    with np.load(tmp_path / "set.npz", allow_pickle=False) as file:
        for split, folder in (("train", "train"), ("test", "val")):
            files = sorted((root / folder).rglob("*.jpg"))
            assert file[f"{split}_bytes"].tobytes() == b"".join(path.read_bytes() for path in files)
            assert np.diff(file[f"{split}_offsets"]).tolist() == [path.stat().st_size for path in files]
        assert file["classes"].tolist() == ["a", "b"]
    assert made.name == f"packed:{tmp_path / 'set.npz'}"
    assert made.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "set.npz"]


def test_other_images_are_packed_without_loss(
    write_folder: WriteFolder, picture: Callable[..., Image.Image], tmp_path: Path
) -> None:
    root = write_folder(*(path.replace("jpg", "bmp") for path in EXAMPLES))
    made = pack(str(root), tmp_path / "set.npz")
    np.testing.assert_array_equal(np.asarray(made.train.picture(4)), np.asarray(picture(4)))
    smaller = pack(str(root), tmp_path / "small.npz", quality=60)
    assert (tmp_path / "small.npz").stat().st_size < (tmp_path / "set.npz").stat().st_size
    assert not np.array_equal(np.asarray(smaller.train.picture(4)), np.asarray(picture(4)))


def test_digits_packed_are_the_digits(tmp_path: Path) -> None:
    digits, made = open_data("digits", seed=2), pack("digits", tmp_path / "set.npz", seed=2)
    assert (made.channels, made.size, made.photographs) == (1, 8, False)
    np.testing.assert_array_equal(made.test.labels, digits.test.labels)
    for index in range(0, 400, 37):
        np.testing.assert_array_equal(
            np.asarray(made.test.picture(index)), digits.test.pixels[index, :, :, 0]
        )


def test_what_breaks_leaves_nothing_new(write_folder: WriteFolder, tmp_path: Path) -> None:
    root = write_folder(*EXAMPLES, size=(64, 64))
    out = tmp_path / "out" / "set.npz"
    out.parent.mkdir()
    out.write_bytes(b"an older one")
    for path in ("train/a/1.jpg", "val/b/2.jpg"):
        (root / path).write_bytes((root / path).read_bytes()[:-900])  # headers are whole
    with pytest.raises(UnreadableImageError, match=r"1 of 6 images of .*, train, cannot be read: .*a/1.jpg"):
        pack(root, out)
    assert [path.name for path in out.parent.iterdir()] == ["set.npz"]
    assert out.read_bytes() == b"an older one"
    made = pack(root, out, skip_unreadable=True)
    assert made.train.labels.tolist() == [0, 0, 1, 1, 1]
    assert made.test.labels.tolist() == [0, 0, 0, 1, 1]
    assert ["a/1.jpg" in note or "b/2.jpg" in note for note in made.notes] == [True, True]


@pytest.mark.parametrize(
    ("out", "options", "error", "message"),
    [
        ("set.zip", {}, ValueError, r"out must end with \.npz"),
        ("set.npz", {"quality": 0}, ValueError, "quality must be from 1 to 95, got 0"),
        ("nowhere/set.npz", {}, FileNotFoundError, "there is no folder .*nowhere"),
    ],
)
def test_places_that_cannot_be(
    tmp_path: Path, out: str, options: dict[str, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pack("digits", tmp_path / out, **options)
