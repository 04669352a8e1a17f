"""Folders of images, whole and damaged."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from split_pixels import Pixels
from wellposed.train import data as folder_module
from wellposed.train.data import Split, UnreadableImageError, open_data

WriteFolder = Callable[..., Path]
SPLIT = ("train/cat/1.png", "train/cat/2.png", "train/dog/1.png", "val/cat/9.png", "val/dog/9.png")


def names(split: Split, root: Path) -> list[str]:
    return [str(Path(split.name(index)).relative_to(root)) for index in range(len(split))]


@pytest.mark.parametrize("test_name", ["val", "validation", "test"])
def test_train_and_test_folders(
    write_folder: WriteFolder, picture: Callable[..., Image.Image], test_name: str
) -> None:
    root = write_folder(*(path.replace("val/", f"{test_name}/") for path in SPLIT))
    data = open_data(str(root))
    assert data.classes == ("cat", "dog")
    assert names(data.train, root) == ["train/cat/1.png", "train/cat/2.png", "train/dog/1.png"]
    assert names(data.test, root) == [f"{test_name}/cat/9.png", f"{test_name}/dog/9.png"]
    assert data.train.labels.tolist() == [0, 0, 1]
    assert data.test.labels.tolist() == [0, 1]
    np.testing.assert_array_equal(np.asarray(data.test.picture(1)), np.asarray(picture(4)))
    assert (data.channels, data.size, data.photographs, data.notes) == (3, 16, True, ())
    assert open_data(f"folder:{root}").classes == data.classes


def test_validation_goes_before_test(write_folder: WriteFolder) -> None:
    root = write_folder(*SPLIT, "test/cat/5.png")
    data = open_data(str(root))
    assert names(data.test, root)[0].startswith("val/")
    assert "the validation split was used for testing" in data.notes[0]


def test_a_share_of_each_class_is_held_out(write_folder: WriteFolder) -> None:
    root = write_folder(*(f"{name}/{number:02}.png" for name in ("cat", "dog") for number in range(10)))
    data, other = (open_data(str(root), holdout=0.3, seed=seed) for seed in (0, 1))
    assert np.bincount(data.test.labels).tolist() == [3, 3]
    assert set(names(data.train, root)) | set(names(data.test, root)) == {
        f"{name}/{number:02}.png" for name in ("cat", "dog") for number in range(10)
    }
    assert names(data.test, root) != names(other.test, root)
    assert data.notes == ("6 of 20 images were held out for testing (seed 0).",)


def test_a_class_may_be_called_train(write_folder: WriteFolder) -> None:
    data = open_data(str(write_folder("bus/1.png", "bus/2.png", "train/1.png", "train/2.png")))
    assert data.classes == ("bus", "train")


def test_hidden_files_others_and_links(write_folder: WriteFolder, tmp_path: Path) -> None:
    root = write_folder(*SPLIT, "train/cat/deep/3.png", "train/.hidden/1.png")
    (root / "train" / "cat" / ".DS_Store").write_bytes(b"x")
    (root / "train" / "cat" / "readme.txt").write_text("cats")
    (root / "train" / "LICENSE").write_text("free")
    (root / "train" / "dog" / "loop").symlink_to(root / "train" / "dog")
    elsewhere = write_folder("7.PNG", into="elsewhere")
    (root / "train" / "dog" / "linked").symlink_to(elsewhere)
    data = open_data(str(root))
    assert names(data.train, root) == [
        "train/cat/1.png",
        "train/cat/2.png",
        "train/cat/deep/3.png",
        "train/dog/1.png",
        "train/dog/linked/7.PNG",
    ]
    assert data.notes == ("2 files that are not images of a class were skipped (no ending, .txt).",)


def test_what_the_headers_say(write_folder: WriteFolder, picture: Callable[..., Image.Image]) -> None:
    paths = ("a/1.png", "a/2.png", "b/1.png", "b/2.png")
    grey = open_data(str(write_folder(*paths, mode="L", into="grey")))
    assert (grey.channels, grey.size, grey.train.picture(0).mode) == (1, 16, "L")
    flat = open_data(str(write_folder(*paths, size=(16, 12), into="flat")))
    assert (flat.channels, flat.size) == (3, None)
    root = write_folder(*paths, mode="L", into="mixed")
    picture(0, (20, 20)).save(root / "a/1.png")
    mixed = open_data(str(root))
    assert (mixed.channels, mixed.size) == (3, None)
    root = write_folder("train/a/0.png", mode="L", into="coloured test")
    write_folder("val/a/0.png", size=(20, 20), into="coloured test")
    apart = open_data(str(root))
    assert (apart.channels, apart.size, apart.train.picture(0).mode) == (3, None, "RGB")
    assert {mixed.train.picture(index).mode for index in range(len(mixed.train))} == {"RGB"}


def test_palettes_transparency_and_16_bits(
    write_folder: WriteFolder, picture: Callable[..., Image.Image]
) -> None:
    root = write_folder("train/a/0.png", "val/a/0.png")
    picture(1, mode="P").save(root / "train/a/palette.png")
    picture(2, mode="RGBA").save(root / "train/a/transparent.png")
    deep = np.arange(256, dtype=np.uint16).reshape(16, 16) * 256 + 17
    Image.fromarray(deep).save(root / "train/a/deep.png")
    split = open_data(str(root)).train
    found = {Path(split.name(index)).name: split.picture(index) for index in range(len(split))}
    np.testing.assert_array_equal(
        np.asarray(found["palette.png"]), np.asarray(picture(1, mode="P").convert("RGB"))
    )
    np.testing.assert_array_equal(np.asarray(found["transparent.png"]), np.asarray(picture(2)))
    np.testing.assert_array_equal(np.asarray(found["deep.png"])[..., 0], np.arange(256).reshape(16, 16))


@pytest.fixture
def damaged(write_folder: WriteFolder) -> Path:
    root = write_folder(
        *(f"train/{name}/{i}.png" for name in ("cat", "dog") for i in range(9)), "val/cat/0.png"
    )
    (root / "train/cat/3.png").write_bytes(b"no image")
    (root / "train/dog/4.png").write_bytes(b"")
    (root / "train/dog/gone.jpg").symlink_to("nowhere")
    Image.fromarray(np.zeros((4, 4), np.float32)).save(root / "val/cat/floats.tif")
    return root


def test_unreadable_images_are_counted_and_named(damaged: Path) -> None:
    with pytest.raises(UnreadableImageError) as caught:
        open_data(str(damaged))
    message = str(caught.value)
    assert message.startswith(f"4 of 21 images of {damaged} cannot be read: ")
    assert "train/cat/3.png: cannot identify image file; " in message
    assert "train/dog/gone.jpg: No such file or directory; " in message
    assert "floats.tif: the range of its values, of mode F, is not known" in message
    assert "--skip-unreadable" in message


def test_unreadable_images_can_be_left_out(damaged: Path) -> None:
    data = open_data(str(damaged), skip_unreadable=True)
    assert (len(data.train), len(data.test)) == (16, 1)
    assert data.size == 16
    assert not {"train/cat/3.png", "train/dog/4.png"} & set(names(data.train, damaged))
    assert data.notes[0].startswith("4 of 21 images of ")
    assert data.notes[0].endswith("They were skipped.")
    assert data.notes[1] == "There are no test images of class 'dog'."


def test_many_unreadable_images_are_not_all_named(write_folder: WriteFolder) -> None:
    root = write_folder("cat/0.png", "dog/0.png")
    for number in range(30):
        (root / "cat" / f"bad{number}.jpg").write_bytes(b"no image")
    with pytest.raises(UnreadableImageError, match=r"30 of 32 images .*; and 25 more"):
        open_data(str(root))


def test_a_class_left_empty_is_named(write_folder: WriteFolder) -> None:
    root = write_folder("cat/0.png", "cat/1.png", "dog/0.png")
    (root / "dog/0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="has no training image of class 'dog'"):
        open_data(str(root), skip_unreadable=True)


def test_a_fault_of_the_machine_is_no_unreadable_image(
    write_folder: WriteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_folder("cat/0.png", "cat/1.png", "dog/0.png")

    def too_many(self: object, index: int) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(folder_module.FileImages, "file", too_many)
    with pytest.raises(OSError, match="Too many open files"):
        open_data(str(root), skip_unreadable=True)


def test_an_image_that_breaks_off_is_named_when_it_is_decoded(write_folder: WriteFolder) -> None:
    root = write_folder("cat/0.jpg", "cat/1.jpg", "dog/0.jpg", size=(64, 64))
    for path in root.rglob("*.jpg"):
        path.write_bytes(path.read_bytes()[:-900])
    data = open_data(str(root))
    with pytest.raises(UnreadableImageError, match=r"(cat|dog)/\d.jpg cannot be read: .*truncated"):
        data.train.picture(0)


def test_folders_that_are_no_set(write_folder: WriteFolder, tmp_path: Path) -> None:
    cases = {
        "no classes": ((), "expected one folder a class in"),
        "images alone": (("1.png",), "expected one folder a class in"),
        "no train": (("val/cat/1.png", "test/cat/1.png"), "expected a train split in .*, got test, val"),
        "other classes": ((*SPLIT, "val/cow/1.png"), "has classes that .*train lacks: 'cow'"),
    }
    for name, (paths, message) in cases.items():
        (tmp_path / name).mkdir()
        root = write_folder(*paths, into=name)
        with pytest.raises(ValueError, match=message):
            open_data(str(root))
    root = write_folder(*SPLIT, into="empty class")
    (root / "train" / "cow").mkdir()
    (root / "train" / "cow" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"class 'cow' has no images in .*train/cow"):
        open_data(str(root))
    root = write_folder("train/cat/1.png", into="empty test")
    (root / "val" / "cat").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"the test split of .* is empty"):
        open_data(str(root))
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        open_data(f"folder:{tmp_path / 'nowhere'}")


def test_a_class_whose_name_is_no_text_is_named(write_folder: WriteFolder) -> None:
    folder = write_folder("cat/1.png", "cat/2.png")
    try:
        Path(os.fsdecode(os.fsencode(folder) + b"/d\xffg")).mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    with pytest.raises(
        ValueError, match=r"UTF-8 text, got the folder 'd\\udcffg' in .*; rename it"
    ) as raised:
        open_data(str(folder))
    str(raised.value).encode()


def test_worker_processes_see_the_same_images(write_folder: WriteFolder) -> None:
    split = open_data(str(write_folder(*(f"{name}/{i}.png" for name in "ab" for i in range(12))))).train
    seen = [batch.numpy()[0] for batch in DataLoader(Pixels(split), num_workers=2)]
    np.testing.assert_array_equal(np.stack(seen), np.stack([Pixels(split)[i] for i in range(len(split))]))
