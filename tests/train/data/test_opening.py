"""Sets by name: the embedded one, what is drawn, what is refused."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from wellposed import digits
from wellposed.train.data import ImageData, checked_labels, held_out, numbered_classes, open_data
from wellposed.train.data.images import Part, PixelImages


def test_the_digits_are_those_of_scikit_learn_divided_as_the_tensors_are() -> None:
    theirs = load_digits()
    data = open_data("digits", seed=3)
    tensors = digits.load_digits(3)
    levels = torch.from_numpy(np.concatenate([data.test.pixels, data.train.pixels])).squeeze(-1)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.from_numpy(np.rint(theirs.images * 255 / 16).astype(np.uint8))[order], levels)
    np.testing.assert_array_equal(data.train.labels, tensors.train_y)
    np.testing.assert_array_equal(data.test.labels, tensors.test_y)
    assert (data.channels, data.size, data.photographs) == (1, 8, False)
    assert (len(data.train), len(data.test)) == (1397, 400)
    assert data.train.picture(5).mode == "L"
    np.testing.assert_array_equal(np.asarray(data.train.picture(5)), data.train.pixels[5, :, :, 0])


def test_the_seed_draws_the_test_images() -> None:
    first, again, other = (open_data("digits", seed=seed).test.pixels for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_smaller_limit_is_a_part_of_a_larger_one() -> None:
    whole = open_data("digits")
    few, more = (open_data("digits", limit=limit) for limit in (50, 200))
    np.testing.assert_array_equal(few.train.pixels, more.train.pixels[:50])
    names = {whole.train.name(index) for index in range(len(whole.train))}
    assert {more.train.name(index) for index in range(200)} < names
    np.testing.assert_array_equal(few.test.pixels, whole.test.pixels)
    assert not np.array_equal(few.train.pixels, open_data("digits", limit=50, seed=1).train.pixels)
    assert "50 training images were drawn (seed 0)." in few.notes


def test_classes_that_a_limit_leaves_without_images_are_told() -> None:
    data = open_data("digits", limit=3)
    missing = sorted(set(range(10)) - set(data.train.labels.tolist()))
    assert len(data.classes) == 10
    assert any(
        note.startswith(f"There are no training images of class '{missing[0]}'") for note in data.notes
    )


def test_labels_are_read_only_and_stay_so_in_another_process() -> None:
    split = pickle.loads(pickle.dumps(open_data("digits").train))
    assert split.labels.dtype == np.int64
    for array in (split.labels, open_data("digits").train.labels, open_data("digits").train.pixels):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_subset_keeps_names_labels_and_order() -> None:
    split = open_data("digits").train
    part = split.subset([7, 2])
    assert [part.name(0), part.name(1)] == [split.name(7), split.name(2)]
    np.testing.assert_array_equal(part.labels, split.labels[[7, 2]])
    np.testing.assert_array_equal(np.asarray(part.picture(1)), np.asarray(split.picture(2)))
    zeros = split.subset(split.labels == 0)
    assert set(zeros.labels.tolist()) == {0}
    assert len(split.subset([])) == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cifar-10:data", r"did you mean cifar10:DIR\?.*packed:FILE.npz"),
        ("cifar10", r"did you mean cifar10:DIR\?"),
        ("fashionmnist:x", r"did you mean fashion-mnist:DIR\?"),
        ("Digits", r"did you mean digits\?"),
        ("digits:8", r"did you mean digits\?"),
        ("packed:", "what comes after the colon is missing"),
        ("quite else", r"there is no set 'quite else'; Expected digits, .* there is no folder of that name"),
    ],
)
def test_an_unknown_name_is_told_the_forms(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_data(spec)


def test_a_missing_folder_and_a_file_without_its_form(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere"):
        open_data(str(tmp_path / "nowhere"))
    for name, form in (("set.npz", "packed:"), ("set.parquet", "hf:"), ("set.tar", "wds:")):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=f"for this one write {form}"):
            open_data(str(tmp_path / name))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 1398}, "limit must be at most the 1397 training images of digits, got 1398"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"holdout": 1.0}, r"holdout must be in \(0, 1\), got 1.0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_data("digits", **options)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 3, 0], r"pets, train: labels must be from 0 to 2 for 3 classes, got 3 at index 2 \(pet 2\)"),
        ([0, -1, 1, -1], "got -1 at index 1 .*; 2 of 4 are outside"),
        ([0.0, 1.0, 2.0, 0.0], "labels must be whole numbers, got float64"),
        ([0, 1, 2], r"expected one label for each of 4 images, got labels of shape \(3,\)"),
    ],
)
def test_labels_that_cannot_be(labels: list[float], message: str) -> None:
    part = Part(PixelImages(np.zeros((4, 2, 2, 1), np.uint8), "pet"), np.array(labels))
    with pytest.raises(ValueError, match=message):
        checked_labels(part, ("a", "b", "c"), "pets, train")


def test_a_wild_label_is_told_before_names_are_made_for_all_below() -> None:
    with pytest.raises(ValueError, match="got 10000000000 with 3 training images"):
        numbered_classes(np.array([0, 1, 10**10]), None, "pets")


def test_held_out_of_each_class() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2, 4], [40, 20, 3, 1]))
    train, test = held_out(labels, 0.1, seed=5)
    assert sorted([*train, *test]) == list(range(64))
    assert np.bincount(labels[test], minlength=5).tolist() == [4, 2, 1, 0, 0]
    assert not np.array_equal(test, held_out(labels, 0.1, seed=6)[1])


def test_a_set_of_pixels_is_what_the_protocol_says(write_folder: Callable[..., Path]) -> None:
    data = open_data("digits")
    assert isinstance(data, ImageData)
    folder = open_data(str(write_folder("a/1.png", "a/2.png", "b/1.png", "b/2.png")))
    assert folder.train.pixels is None
    assert data.train.pixels is not None
    assert data.train.pixels.shape == (1397, 8, 8, 1)
