"""Whole splits decoded at once."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from wellposed.train.data import UnreadableImageError, decode_all, decode_readable, open_data
from wellposed.train.data.images import PixelImages, Split, fitted

WriteFolder = Callable[..., Path]


@pytest.mark.parametrize("size", [(50, 37), (37, 50), (48, 48), (20, 91), (32, 32), (33, 32)])
@pytest.mark.parametrize("side", [32, 40])
def test_fitted_as_torchvision_does(
    picture: Callable[..., Image.Image], size: tuple[int, int], side: int
) -> None:
    resize = v2.Resize(side, interpolation=v2.InterpolationMode.BICUBIC)
    expected = v2.CenterCrop(side)(resize(picture(0, size)))
    np.testing.assert_array_equal(np.asarray(fitted(picture(0, size), side)), np.asarray(expected))


@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_and_pictures_agree(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (70, 12, 12, 4 - channels), dtype=np.uint8)
    split = Split(PixelImages(pixels, "image"), np.zeros(70, int), 4 - channels)
    at_once = decode_all(split, 12, channels)
    assert at_once.flags.c_contiguous
    mode = "L" if channels == 1 else "RGB"
    one_by_one = [np.asarray(split.picture(index).convert(mode)) for index in range(70)]
    np.testing.assert_array_equal(at_once.transpose(0, 2, 3, 1).reshape(70, 12, 12, -1).squeeze(), one_by_one)


def test_arrays_of_another_size_are_fitted() -> None:
    split = open_data("digits").test
    at_once = decode_all(split, 16, 3)
    assert at_once.shape == (400, 3, 16, 16)
    expected = np.asarray(split.picture(7).convert("RGB").resize((16, 16), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(at_once[7].transpose(1, 2, 0), expected)


def test_a_folder_in_threads_is_in_order(write_folder: WriteFolder) -> None:
    root = write_folder(*(f"{name}/{i:03}.png" for name in "ab" for i in range(100)), size=(80, 70))
    split = open_data(str(root)).train
    pixels = decode_all(split, 24, 3)
    expected = [
        np.asarray(fitted(split.picture(index), 24)).transpose(2, 0, 1) for index in range(len(split))
    ]
    np.testing.assert_array_equal(pixels, expected)
    assert torch.from_numpy(pixels).shape == (180, 3, 24, 24)


def test_all_damaged_images_are_in_one_error_or_left_out(write_folder: WriteFolder) -> None:
    root = write_folder(
        *(f"train/{name}/{i}.jpg" for name in "ab" for i in range(4)), "val/a/0.jpg", size=(64, 64)
    )
    for path in ("train/a/0.jpg", "train/b/3.jpg"):
        (root / path).write_bytes((root / path).read_bytes()[:-900])
    split = open_data(str(root)).train
    with pytest.raises(UnreadableImageError, match=r"2 of 8 images .*a/0\.jpg: .*truncated.*b/3\.jpg"):
        decode_all(split, 64, 3)
    readable = decode_readable(split, 64, 3)
    assert readable.indices.tolist() == [1, 2, 3, 4, 5, 6]
    assert len(readable.unreadable) == 2
    rest = split.subset(readable.indices)
    np.testing.assert_array_equal(readable.pixels, decode_all(rest, 64, 3))


def test_no_images() -> None:
    assert decode_all(open_data("digits").train.subset([]), 16, 1).shape == (0, 1, 16, 16)
