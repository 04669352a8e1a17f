from typing import Any

import pytest
import torch

from train.batches.small_sets import MEAN, SIZE, STD, arrays, batches
from wellposed.train import batches as placement
from wellposed.train.batches import choose_placement, make_batches
from wellposed.train.recipe import Recipe

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 10, "accumulate": 2, "world": 2},
            r"batch_size must be a multiple of 2 processes x accumulate=2 = 4, got 10; use 8 or 12\.",
        ),
        ({"batch_size": 1, "world": 2}, r"= 2, got 1; use 2 or 2\."),
        (
            {"batch_size": 6, "accumulate": 2, "mixup": 0.8},
            r"even number, .* = 3 in a pass; use batch_size=8\.",
        ),
        ({"batch_size": 6, "world": 2, "cutmix": 0.8}, r"even number"),
        ({"batch_size": 38}, r"at most the number of training images, 37, got 38; lower batch_size\."),
        ({"crop_padding": 8}, r"crop_padding must be less than the image's side of 8 pixels, got 8"),
        (
            {"auto_augment": "v0", "placement": "device"},
            r"done by workers, got placement=device; use .*stream",
        ),
        ({"auto_augment": "v0", "color_jitter": 0.4}, r"timm ignores color_jitter with auto_augment=v0"),
        ({"auto_augment": "rond-m9"}, r"one of timm's policies for auto_augment .* got 'rond-m9'"),
        ({"rank": 2, "world": 2}, r"rank must be in \[0, world\), got rank=2 and world=2"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches(arrays(), **options)


def test_bad_normalisation_and_no_test_images_are_refused() -> None:
    options: dict[str, Any] = {"image_size": SIZE, "device": CPU}
    with pytest.raises(ValueError, match="mean and std must have 1 values each"):
        make_batches(Recipe(batch_size=8), arrays(channels=1), mean=MEAN, std=STD, **options)
    with pytest.raises(ValueError, match="those of std positive"):
        make_batches(Recipe(batch_size=8), arrays(), mean=MEAN, std=(1.0, 0.0, 1.0), **options)
    with pytest.raises(ValueError, match="expected test images in small, got none"):
        make_batches(Recipe(batch_size=8), arrays(test=0), mean=MEAN, std=STD, **options)


def test_refusals_come_before_any_image_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("an image was read")

    monkeypatch.setattr("wellposed.train.batches.decode_all", read)
    with pytest.raises(ValueError, match="lower batch_size"):
        batches(arrays(), batch_size=38)
    with pytest.raises(AssertionError, match="was read"):
        batches(arrays())


def test_auto_keeps_on_the_device_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    data = arrays()
    needed = placement.bytes_needed(data, SIZE)
    assert needed == 48 * (3 * 64 + 8)
    monkeypatch.setattr(placement, "bytes_allowed", lambda device: needed)
    assert choose_placement(Recipe(), data, SIZE, CPU) == "device"
    assert choose_placement(Recipe(placement="stream"), data, SIZE, CPU) == "stream"
    assert choose_placement(Recipe(auto_augment="v0"), data, SIZE, CPU) == "stream"
    assert choose_placement(Recipe(auto_augment="trivial"), data, SIZE, CPU) == "device"
    monkeypatch.setattr(placement, "bytes_allowed", lambda device: needed - 1)
    assert choose_placement(Recipe(), data, SIZE, CPU) == "stream"
    with pytest.raises(ValueError, match=r"the images take 0\.0 MiB, .* use placement=stream, or lower"):
        choose_placement(Recipe(placement="device"), data, SIZE, CPU)


def test_the_budget_of_a_cpu() -> None:
    assert 0 < placement.bytes_allowed(CPU) <= 8 * 2**30
