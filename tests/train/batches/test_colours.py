import pytest
import torch
from torch import Tensor
from torchvision.transforms import functional as torchvision

from wellposed.train.augment import blurred, equalized, jittered, posterized, solarized, stretched

SIZE = 16


def _images(count: int = 6, channels: int = 3) -> Tensor:
    """Noise, dark noise, one colour, two colours: whole numbers from 0 to 255."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, channels, SIZE, SIZE)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if count > 3:
        images[1] //= 5
        images[2] = 17
        images[3] = 200
        images[3, :, 3] = 10
    return images


def test_jitter_is_torchvisions() -> None:
    images, factors = (
        _images(4).float(),
        torch.tensor([[1.3, 0.7, 1.2], [0.6, 1.4, 0.5], [1, 1, 1], [1, 2, 0]]),
    )
    out = jittered(images, factors)
    for image, (brightness, contrast, saturation), got in zip(images, factors.tolist(), out, strict=True):
        expected = torchvision.adjust_brightness(image / 255, brightness)
        expected = torchvision.adjust_contrast(expected, contrast)
        expected = torchvision.adjust_saturation(expected, saturation) * 255
        torch.testing.assert_close(got, expected, atol=0.2, rtol=0)  # torchvision's weights have 4 digits
    torch.testing.assert_close(out[2], images[2])


def test_jitter_of_one_channel_has_no_saturation() -> None:
    images = _images(1, channels=1).float()
    assert torch.equal(jittered(images, torch.tensor([[1.0, 1, 0]])), images)


@pytest.mark.parametrize("channels", [1, 3])
def test_what_has_no_strength_is_torchvisions(channels: int) -> None:
    images = _images(channels=channels)
    for ours, theirs in ((equalized, torchvision.equalize), (stretched, torchvision.autocontrast)):
        expected = theirs(images).float()
        # torchvision cuts the fraction off, to whole numbers.
        assert torch.equal(ours(images.float()).floor(), expected), theirs.__name__


def test_equalized_is_pillows() -> None:
    from PIL import ImageOps
    from torchvision.transforms.functional import pil_to_tensor, to_pil_image

    images = _images()
    for image, got in zip(images, equalized(images.float()), strict=True):
        assert torch.equal(got.byte(), pil_to_tensor(ImageOps.equalize(to_pil_image(image))))


def test_blurred_is_torchvisions_with_sharpness_0() -> None:
    images = _images()
    expected = torchvision.adjust_sharpness(images, 0.0).float()
    torch.testing.assert_close(blurred(images.float()), expected, atol=0.51, rtol=0)


def test_each_image_has_its_own_strength() -> None:
    images = _images(3)
    bits, thresholds = (torch.tensor(v).view(3, 1, 1, 1) for v in ([8.0, 2, 5], [255.0, 0, 99.5]))
    poster, solar = posterized(images.float(), bits), solarized(images.float(), thresholds)
    for image, bit, threshold, a, b in zip(
        images, bits.flatten(), thresholds.flatten(), poster, solar, strict=True
    ):
        assert torch.equal(a, torchvision.posterize(image, int(bit)).float())
        assert torch.equal(b, torchvision.solarize(image, float(threshold)).float())
