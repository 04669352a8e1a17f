"""TrivialAugment, against torchvision's functions for one image at a time."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import functional as torchvision
from torchvision.transforms.functional import InterpolationMode

from train.batches.small_sets import arrays, batches, equal
from wellposed.train.augment import (
    OPERATIONS,
    STRENGTHS,
    TRIVIAL,
    Augmentation,
    draw,
    trivially_augmented,
)

SIZE = 32
FILL = torch.tensor([120.0, 110, 100]).view(3, 1, 1)
_affine: dict[str, object] = {"interpolation": InterpolationMode.NEAREST, "fill": [120.0, 110.0, 100.0]}


def _sheared(image: Tensor, x: float, y: float) -> Tensor:
    degrees = [math.degrees(math.atan(x)), math.degrees(math.atan(y))]
    return torchvision.affine(image, 0.0, [0, 0], 1.0, degrees, center=[0, 0], **_affine)


def _shifted(image: Tensor, x: float, y: float) -> Tensor:
    return torchvision.affine(image, 0.0, [int(x), int(y)], 1.0, [0.0, 0.0], **_affine)


EXPECTED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "identity": lambda image, s: image,
    "shear_x": lambda image, s: _sheared(image, 0.99 * s, 0.0),
    "shear_y": lambda image, s: _sheared(image, 0.0, 0.99 * s),
    "translate_x": lambda image, s: _shifted(image, 32 * s, 0),
    "translate_y": lambda image, s: _shifted(image, 0, 32 * s),
    "rotate": lambda image, s: torchvision.rotate(image, 135 * s, **_affine),
    "brightness": lambda image, s: torchvision.adjust_brightness(image / 255, 1 + 0.99 * s) * 255,
    "saturation": lambda image, s: torchvision.adjust_saturation(image / 255, 1 + 0.99 * s) * 255,
    "contrast": lambda image, s: torchvision.adjust_contrast(image / 255, 1 + 0.99 * s) * 255,
    "sharpness": lambda image, s: torchvision.adjust_sharpness(image / 255, 1 + 0.99 * s) * 255,
    "posterize": lambda image, s: torchvision.posterize(image, 8 - round(6 * abs(s))),
    "solarize": lambda image, s: torchvision.solarize(image, 255 * (1 - abs(s))),
    "stretch": lambda image, s: torchvision.autocontrast(image),
    "equalize": lambda image, s: torchvision.equalize(image),
}


def _images(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_torchvisions(name: str) -> None:
    strengths = torch.linspace(-1, 1, 61)[::4]
    images = _images(len(strengths))
    plan = torch.stack([torch.full_like(strengths, OPERATIONS.index(name)), strengths], dim=1)
    out = trivially_augmented(images, plan, FILL)
    for image, strength, got in zip(images, strengths.tolist(), out, strict=True):
        expected = EXPECTED[name](image, strength)
        if name.startswith(("shear", "rotate")):
            # Coordinates halfway between two pixels may go to either.
            assert (got != expected).float().mean() < 0.02
        else:
            # torchvision cuts fractions of whole numbers off, here they are rounded; its grey has 4 digits.
            least = 1.0 if name == "stretch" else 0.7
            assert (got.float() - expected.float()).abs().max() <= least


def test_images_of_a_batch_do_not_touch_each_other() -> None:
    images = _images(len(OPERATIONS))
    plan = torch.tensor([[index, 0.6] for index in range(len(OPERATIONS))])
    out = trivially_augmented(images, plan, FILL)
    for index in range(len(OPERATIONS)):
        alone = trivially_augmented(images[index : index + 1], plan[index : index + 1], FILL)
        assert torch.equal(out[index], alone[0])
    assert torch.equal(out[0], images[0])
    assert all((out[index] != images[index]).any() for index in range(1, len(OPERATIONS) - 2))


def test_operations_and_strengths_are_drawn_alike_often() -> None:
    plan = draw(Augmentation(trivial=True), 0, 0, 50_000, SIZE)
    operations, strengths = plan[:, TRIVIAL].T
    shares = np.bincount(operations.astype(int), minlength=len(OPERATIONS)) / 50_000
    assert len(shares) == len(OPERATIONS)
    assert np.abs(shares - 1 / len(OPERATIONS)).max() < 0.005
    steps, counts = np.unique(np.rint(np.abs(strengths) * 30), return_counts=True)
    assert steps.tolist() == list(range(STRENGTHS))
    assert np.abs(counts / 50_000 - 1 / STRENGTHS).max() < 0.005
    assert abs((strengths < 0).mean() - 15 / 31) < 0.01


def test_other_augmentations_are_drawn_as_without_it() -> None:
    without = draw(Augmentation(flip=0.5, shift=2, erase=0.5), 0, 3, 64, SIZE)
    beside = draw(Augmentation(flip=0.5, shift=2, erase=0.5, trivial=True), 0, 3, 64, SIZE)
    assert (without[:, :15] == beside[:, :15]).all()
    assert (without[:, TRIVIAL] == 0).all()


def test_streamed_and_resident_images_get_the_same() -> None:
    options = {"auto_augment": "trivial", "crop_padding": 2}
    resident, _ = batches(arrays(), placement="device", **options)
    streamed, _ = batches(arrays(), placement="stream", workers=0, **options)
    plain, _ = batches(arrays(), placement="device", crop_padding=2)
    for (_, ours), (_, theirs), (_, without) in zip(
        resident.iterate(0, 3), streamed.iterate(0, 3), plain.iterate(0, 3), strict=True
    ):
        assert equal(ours, theirs)
        assert not equal(ours, without)
