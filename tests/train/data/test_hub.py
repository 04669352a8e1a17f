"""Sets through the datasets package, from local Parquet files."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from wellposed.train.data import UnreadableImageError, open_data


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def write(
    tmp_path: Path, picture: Callable[..., Image.Image], as_file: Callable[..., bytes]
) -> Callable[..., Path]:
    """A plain Parquet file of 8 images, without what datasets would write beside them."""

    def write(
        name: str,
        *,
        seed: int = 0,
        image: str = "image",
        label: str = "label",
        labels: list[Any] | None = None,
        is_struct: bool = True,
    ) -> Path:
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        contents = [as_file(picture(seed + number)) for number in range(8)]
        cells = [{"bytes": content, "path": None} for content in contents] if is_struct else contents
        table = pyarrow.table({image: cells, label: labels or [number % 2 for number in range(8)]})
        pyarrow.parquet.write_table(table, path)
        return path

    return write


@pytest.mark.parametrize("is_struct", [True, False])
def test_splits_by_the_names_of_files(
    write: Callable[..., Path], picture: Callable[..., Image.Image], is_struct: bool
) -> None:
    folder = write("data/train-00000-of-00002.parquet", is_struct=is_struct).parent
    write("data/train-00001-of-00002.parquet", seed=8, is_struct=is_struct)
    write("data/validation-00000-of-00001.parquet", seed=16, is_struct=is_struct)
    data = open_data(f"hf:{folder.parent}")
    assert (len(data.train), len(data.test)) == (16, 8)
    assert data.classes == ("0", "1")
    assert (data.channels, data.size, data.photographs) == (3, 16, True)
    for split, index, seed in ((data.train, 11, 11), (data.test, 3, 19)):
        np.testing.assert_array_equal(np.asarray(split.picture(index)), np.asarray(picture(seed)))
    assert data.test.name(3).endswith("test image 3")
    part = data.train.subset([11, 0])
    np.testing.assert_array_equal(np.asarray(part.picture(0)), np.asarray(picture(11)))


def test_a_file_a_pattern_and_folders_as_splits(write: Callable[..., Path]) -> None:
    alone = write("alone.parquet")
    data = open_data(f"hf:{alone}")
    assert (len(data.train), len(data.test)) == (6, 2)
    assert "held out" in data.notes[0]
    write("default/train/0000.parquet")
    write("default/test/0000.parquet", seed=8)
    data = open_data(f"hf:{alone.parent}/default/**/*.parquet")
    assert (len(data.train), len(data.test)) == (8, 8)


def test_a_set_that_datasets_wrote(tmp_path: Path, picture: Callable[..., Image.Image]) -> None:
    features = datasets.Features(
        {
            "photo": datasets.Image(),
            "kind": datasets.ClassLabel(names=["cat", "dog"]),
            "id": datasets.Value("int32"),
        }
    )
    rows = {"photo": [picture(i) for i in range(6)], "kind": [0, 1] * 3, "id": list(range(6))}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    data = open_data(f"hf:{tmp_path / 'train.parquet'}", holdout=0.4)
    assert data.classes == ("cat", "dog")
    number = int(data.train.name(2).split()[-1])
    np.testing.assert_array_equal(np.asarray(data.train.picture(2)), np.asarray(picture(number)))


def test_labels_that_are_texts(write: Callable[..., Path]) -> None:
    folder = write("train.parquet", image="img", label="labels", labels=["dog", "cat"] * 4).parent
    write("test.parquet", image="img", label="labels", labels=["dog"] * 8)
    data = open_data(f"hf:{folder}")
    assert data.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [1, 0] * 4
    assert data.test.labels.tolist() == [1] * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": "photo"}, "expected a column image or img, .* got photo, label"),
        ({"label": "kind"}, "expected a column label or labels or fine_label, .* got image, kind"),
        ({"labels": [0, 1, None, 1, 0, 1, 0, 1]}, "1 of 8 labels of .* are missing"),
        ({"labels": [0, 1, -1, 1, 0, 1, 0, 1]}, "got -1 at index 2 .*train image 2"),
        ({"labels": [0.5] * 8}, "labels must be whole numbers, got float64"),
        ({"labels": [0, 2] * 4}, "no training image of class '1' among its 3 classes"),
    ],
)
def test_columns_and_labels_that_cannot_be(
    write: Callable[..., Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_data(f"hf:{write('train.parquet', **options)}")


def test_what_is_missing_or_damaged_is_named(write: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no .*gone\.parquet"):
        open_data(f"hf:{tmp_path}/gone.parquet")
    (tmp_path / "bare").mkdir()
    with pytest.raises(FileNotFoundError, match=r"expected \.parquet files in .*bare, found none"):
        open_data(f"hf:{tmp_path}/bare")
    path = write("train.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"cannot be loaded: .*; check that the files are whole"):
        open_data(f"hf:{path}")
    write("train.parquet")
    write("extra.parquet")
    with pytest.raises(ValueError, match=r"or of none; got .*extra\.parquet next to .*train\.parquet"):
        open_data(f"hf:{path.parent}")


def test_cells_that_are_no_images(tmp_path: Path) -> None:
    table = pyarrow.table({"image": [b"no image", b"neither"], "label": [0, 1]})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(UnreadableImageError, match=r"2 of 2 images of hf:.*train image 0: cannot identify"):
        open_data(f"hf:{tmp_path / 'train.parquet'}")


def test_a_name_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"hf:nobody/nothing cannot be loaded: .*; check the name and the conn"
    ):
        open_data("hf:nobody/nothing")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'wellposed\[datasets\]'"):
        open_data("hf:nobody/nothing")
