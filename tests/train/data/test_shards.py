"""WebDataset shards: the notation, the index, reading at random, damage."""

import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from split_pixels import Pixels
from wellposed.train.data import UnreadableImageError, images, open_data
from wellposed.train.data.archives import braces_expanded, shard_paths


def tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def samples(
    picture: Callable[..., Image.Image], as_file: Callable[..., bytes]
) -> Callable[..., dict[str, bytes]]:
    """Members of a shard: pictures numbered from ``first``, of two classes in turn."""

    def make(first: int, count: int = 6, ending: str = "png") -> dict[str, bytes]:
        members = {}
        for number in range(first, first + count):
            members[f"set/{number:05}.{ending}"] = as_file(picture(number), ending.upper())
            members[f"set/{number:05}.cls"] = f"{number % 2}\n".encode()
        return members

    return make


@pytest.fixture
def spec(tmp_path: Path, samples: Callable[..., dict[str, bytes]]) -> str:
    """Two shards for training and one for validation."""
    for number in range(2):
        tar(tmp_path / f"pets-train-{number:03}.tar", samples(6 * number))
    tar(tmp_path / "pets-val-000.tar", samples(12))
    return f"wds:{tmp_path}/pets-{{train-{{000..001}},val-000}}.tar"


def test_shards_by_their_names(spec: str, tmp_path: Path, picture: Callable[..., Image.Image]) -> None:
    data = open_data(spec)
    assert (len(data.train), len(data.test)) == (12, 6)
    assert data.classes == ("0", "1")
    assert (data.channels, data.size, data.notes) == (3, 16, ())
    for split, first in ((data.train, 0), (data.test, 12)):
        for index in np.random.default_rng(0).permutation(len(split)).tolist():
            np.testing.assert_array_equal(
                np.asarray(split.picture(index)), np.asarray(picture(first + index))
            )
            assert split.labels[index] == (first + index) % 2
    assert data.train.name(7) == f"{tmp_path}/pets-train-001.tar: set/00007.png"
    for other in (
        f"{tmp_path}/*.tar",
        f"{tmp_path}",
        f"{tmp_path}/pets-train-*.tar,{tmp_path}/pets-val-000.tar",
    ):
        np.testing.assert_array_equal(open_data(f"wds:{other}").train.labels, data.train.labels)


def test_shards_without_a_split_are_held_out_of(
    tmp_path: Path, samples: Callable[..., dict[str, bytes]]
) -> None:
    data = open_data(f"wds:{tar(tmp_path / 'latest.tar', samples(0, 20))}")  # holds the letters of test
    assert (len(data.train), len(data.test)) == (18, 2)
    assert "held out" in data.notes[0]


def test_labels_in_json_and_other_members(
    tmp_path: Path, picture: Callable[..., Image.Image], as_file
) -> None:
    members = {"._a.jpg": b"", "._a.cls": b""}
    for number, key in enumerate("abcd"):
        members[f"{key}.seg.png"] = b"not the image"
        members[f"{key}.JPG"] = as_file(picture(number), "JPEG")
        members[f"{key}.json"] = json.dumps({"label": number % 2, "about": "x"}).encode()
    data = open_data(f"wds:{tar(tmp_path / 'shard.tar', members)}", holdout=0.4)
    assert len(data.train) + len(data.test) == 4
    assert data.train.name(0).endswith(".JPG")


def test_pickled_and_read_by_threads_and_processes(spec: str) -> None:
    split = pickle.loads(pickle.dumps(open_data(spec).train))
    expected = [np.asarray(split.picture(index)) for index in range(12)]
    order = np.random.default_rng(0).integers(0, 12, 400).tolist()
    with ThreadPoolExecutor(8) as pool:
        for index, seen in zip(order, pool.map(split.picture, order), strict=True):
            np.testing.assert_array_equal(np.asarray(seen), expected[index])
    # Why that is safe: the position of the open file, which all share, is not used.
    assert isinstance(split.images, images.ArchivedImages)
    for archive in split.images._archives:
        assert os.lseek(images._opened(archive).descriptor, 0, os.SEEK_CUR) == 0
    # The processes are forked after the files were opened, and read from the same two at once.
    loader = DataLoader(Pixels(split), sampler=order, num_workers=2)
    for index, batch in zip(order, loader, strict=True):
        np.testing.assert_array_equal(batch[0].numpy(), expected[index])


def test_a_shard_that_changes_is_not_read_wrongly(
    spec: str, tmp_path: Path, samples: Callable[..., dict[str, bytes]]
) -> None:
    split = open_data(spec).train
    content = pickle.dumps(split)
    tar(tmp_path / "other.tar", samples(20, 5)).replace(tmp_path / "pets-train-000.tar")
    os.utime(tmp_path / "pets-train-000.tar", ns=(1, 1))
    images._opened.cache_clear()  # as in a new process
    with pytest.raises(OSError, match="was changed while it was in use"):
        pickle.loads(content).picture(0)


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9])
def test_a_cut_shard_is_named(spec: str, tmp_path: Path, kept: float) -> None:
    path = tmp_path / "pets-train-001.tar"
    content = path.read_bytes()
    end = content.rindex(b"set/00011.cls") + 1024  # the last block that is not zeros
    path.write_bytes(content[: int(end * kept)])
    with pytest.raises(ValueError, match=r"pets-train-001\.tar is cut"):
        open_data(spec)
    path.write_bytes(content[:end])  # at the border of a member, where tarfile sees nothing amiss
    with pytest.raises(ValueError, match=rf"pets-train-001\.tar is cut or damaged at byte {end}"):
        open_data(spec)
    where = content.rindex(b"set/00009.png")
    path.write_bytes(content[:where] + b"X" * 512 + content[where + 512 :])
    with pytest.raises(ValueError, match=rf"pets-train-001\.tar is cut or damaged at byte {where}"):
        open_data(spec)


def test_samples_that_are_not_whole(
    tmp_path: Path, picture: Callable[..., Image.Image], as_file: Callable[..., bytes]
) -> None:
    image = as_file(picture(0))
    cases = [
        ({"a.png": image}, "expected cls or json for the sample a of .*, got png"),
        ({"a.cls": b"0", "a.heic": image}, "expected jpg or .* for the sample a of .*, got cls, heic"),
        ({"a.png": image, "a.cls": b"cat"}, "expected a whole number as the label in a.cls of .*, got 'cat'"),
        ({"a.png": image, "a.json": b'{"class": 1}'}, "the label in a.json .*under 'label'"),
        ({"a.png": image, "a.json": b'{"label": 1.5}'}, "expected a whole number as the label in a.json"),
        ({"a.png": image, "a.PNG": image, "a.cls": b"0"}, "has two members a.png"),
        ({"a.png": image, "a.cls": b"1", "b.png": image, "b.cls": b"1"}, "no training image of class '0'"),
        ({"a.png": image, "a.cls": b"-1", "b.png": image, "b.cls": b"0"}, "got -1 at index 0 .*a.png"),
        ({"a.png": image, "a.cls": b"99999999999"}, "got 99999999999 with 1 training images"),
        ({}, "the train split of .* is empty"),
    ]
    for number, (members, message) in enumerate(cases):
        path = tar(tmp_path / f"{number}.tar", members)
        with pytest.raises(ValueError, match=message):
            open_data(f"wds:{path}")
    path = tar(tmp_path / "bad.tar", {"a.png": b"no image", "a.cls": b"0"})
    with pytest.raises(UnreadableImageError, match=r"bad\.tar: a\.png: cannot identify image file"):
        open_data(f"wds:{path}")


def test_what_is_no_local_tar(tmp_path: Path) -> None:
    for remote in ("pipe:curl x", "https://host/{0..3}.tar", "s3://bucket/a.tar"):
        with pytest.raises(
            ValueError, match=r"must be files on a local disk, got .*Copy them to a disk first"
        ):
            open_data(f"wds:{remote}")
    tar(tmp_path / "gone-000.tar", {})
    with pytest.raises(FileNotFoundError, match=r"there is no .*gone-001.tar"):
        open_data(f"wds:{tmp_path}/gone-{{000..001}}.tar")
    with tarfile.open(tmp_path / "packed.tar", "w:gz"):
        pass
    with pytest.raises(ValueError, match=r"packed\.tar .*no plain tar file.*must be unpacked"):
        open_data(f"wds:{tmp_path}/packed.tar")


def test_the_notation(tmp_path: Path) -> None:
    assert braces_expanded("a-{9..11}") == ["a-9", "a-10", "a-11"]
    assert braces_expanded("{x,y}-{0..1}") == ["x-0", "x-1", "y-0", "y-1"]
    assert braces_expanded("a{b{1..2},c}") == ["ab1", "ac", "ab2", "ac"]
    with pytest.raises(ValueError, match=r"ascending range of shards, got \{3\.\.1\}"):
        braces_expanded("{3..1}")
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).touch()
    assert shard_paths(f"{tmp_path}/{{b,a}}.tar, {tmp_path}/*.tar") == [
        tmp_path / "b.tar",
        tmp_path / "a.tar",
    ]
