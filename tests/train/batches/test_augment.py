import pytest
import torch
from torch import Tensor
from torchvision.transforms import functional as torchvision

from wellposed.train.augment import (
    NOISE_STARTS,
    Augmentation,
    augmented,
    draw,
    erased,
    moved,
    normalised,
    resized_crop,
)

SIZE = 16
MEAN, STD = (torch.tensor(v).view(3, 1, 1) * 255 for v in ([0.5, 0.4, 0.3], [0.2, 0.25, 0.3]))


def _images(count: int = 6, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, SIZE, SIZE), dtype=torch.uint8, generator=generator)


def _moved(images: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
    return moved(images, shift, flip, torch.zeros(3, 1, 1), torch.ones(3, 1, 1))


def test_normalised_is_torchvisions() -> None:
    expected = torchvision.normalize(_images() / 255, [0.5, 0.4, 0.3], [0.2, 0.25, 0.3])
    torch.testing.assert_close(normalised(_images(), MEAN, STD), expected)


def test_no_shift_and_no_flip_change_nothing() -> None:
    images = _images()
    out = moved(images, torch.zeros(6, 2), torch.zeros(6), MEAN, STD)
    assert torch.equal(out, normalised(images, MEAN, STD))


def test_flip_mirrors_and_twice_is_the_same() -> None:
    images, flip = _images(), torch.tensor([1.0, 0, 1, 1, 0, 0])
    once = _moved(images, torch.zeros(6, 2), flip)
    for image, out, is_flipped in zip(images.float(), once, flip.bool(), strict=True):
        assert torch.equal(out, image.flip(-1) if is_flipped else image)
    assert torch.equal(_moved(once.byte(), torch.zeros(6, 2), flip), images.float())


def test_shift_is_a_crop_of_the_padded_image_and_flip_goes_with_it() -> None:
    images = _images()
    shift = torch.tensor([[0.0, 0], [3, -2], [-4, 4], [15, 15], [1, 0], [0, -15]])
    flip = torch.tensor([0.0, 0, 0, 0, 1, 1])
    out = _moved(images, shift, flip)
    for image, (down, right), is_flipped, got in zip(images, shift.long().tolist(), flip, out, strict=True):
        padded = torch.nn.functional.pad(image.float(), [SIZE] * 4)
        rows = slice(SIZE + down, 2 * SIZE + down)
        window = padded[:, rows, SIZE + right : 2 * SIZE + right]
        if is_flipped:
            # The window moves over the image, then what is seen is mirrored.
            window = padded.flip(-1)[:, rows, SIZE - right : 2 * SIZE - right]
        assert torch.equal(got, window)


def test_outside_is_the_mean_colour() -> None:
    out = moved(_images(1), torch.tensor([[4.0, 0]]), torch.zeros(1), MEAN, STD)
    assert (out[:, :, -4:] == 0).all()
    assert (out[:, :, :-4] != 0).any()


def test_resized_crop_of_all_is_the_same_to_rounding() -> None:
    images = normalised(_images(), MEAN, STD)
    whole = torch.tensor([[0.0, 0, 1, 1]]).expand(6, 4)
    torch.testing.assert_close(resized_crop(images, whole), images, atol=2e-5, rtol=0)


def test_resized_crop_is_torchvisions() -> None:
    images = _images(3).float()
    boxes = [(0, 0, 8, 4), (3, 5, 10, 11), (8, 12, 8, 4)]
    out = resized_crop(images, torch.tensor(boxes) / SIZE)
    for image, box, got in zip(images, boxes, out, strict=True):
        expected = torchvision.resized_crop(image, *box, [SIZE, SIZE], antialias=False)
        # torchvision cuts before it resizes; an inner border sees its neighbours here.
        inner = slice(4, -4)
        torch.testing.assert_close(got[:, inner, inner], expected[:, inner, inner], atol=1e-3, rtol=0)


def test_erasing_fills_the_rectangle_and_nothing_else() -> None:
    images = normalised(_images(3), MEAN, STD)
    noise = torch.randn(10 + images[0].numel(), generator=torch.Generator().manual_seed(0))
    rectangles = torch.tensor([[2.0, 3, 7, 5], [0, 0, 0, 0], [0, 0, SIZE, SIZE]])
    out = erased(images, rectangles, noise, torch.tensor([4.0, 0, 9]))
    inside = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    inside[2:7, 3:5] = True
    filling = noise[4 : 4 + images[0].numel()].view_as(images[0])
    assert torch.equal(out[0][:, ~inside], images[0][:, ~inside])
    assert torch.equal(out[0][:, inside], filling[:, inside])
    assert torch.equal(out[1], images[1])
    assert torch.equal(out[2].flatten(), noise[9 : 9 + images[0].numel()])


@pytest.mark.parametrize("channels", [1, 3])
def test_the_whole_compiles_once_and_gives_the_same(channels: int) -> None:
    augmentation = Augmentation(flip=0.5, shift=2, crop_scale=0.3, jitter=0.4, erase=0.5, trivial=True)
    pixels, indices = _images(20, channels), torch.tensor([3, 1, 19, 4])
    noise = torch.randn(NOISE_STARTS + pixels[0].numel(), generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(augmented, backend="aot_eager", fullgraph=True, dynamic=False)

    def agree(update: int) -> None:
        plan = torch.from_numpy(draw(augmentation, 0, update, 4, SIZE))
        arguments = (pixels, indices, plan, MEAN[:channels], STD[:channels], noise, augmentation)
        torch.testing.assert_close(compiled(*arguments), augmented(*arguments))

    agree(0)
    with torch.compiler.set_stance("fail_on_recompile"):
        agree(1)
