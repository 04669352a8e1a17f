"""PixelGraying against unfold, gray, fold, and in the places where it is used."""

import pickle

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor
from torch.nn.functional import fold, unfold
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from reference.spectra import generator
from wellposed.nn import PixelGraying
from wellposed.nn.functional import gray

METHODS = ("svd", "spectral", "dct")
# Patch height and width, image height and width.
GRIDS = {
    "square": (4, (16, 16)),
    "oblong image": (4, (8, 20)),
    "oblong patch": ((2, 8), (16, 16)),
    "one patch": ((16, 16), (16, 16)),
    "one pixel a patch": (1, (4, 6)),
}

over_methods = pytest.mark.parametrize("method", METHODS)
over_grids = pytest.mark.parametrize(("patch", "size"), GRIDS.values(), ids=GRIDS.keys())


def random_images(*shape: int, seed: int = 10) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=generator(seed))


def by_unfolding(images: Tensor, patch: int | tuple[int, int], method: str, rescale: bool) -> Tensor:
    patches = unfold(images, patch, stride=patch).mT
    grayed = gray(patches, 0.7, method, rescale=rescale)
    return fold(grayed.mT, images.shape[-2:], patch, stride=patch)


@pytest.mark.pairwise
@over_methods
@over_grids
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("rescale", [True, False], ids=["rescaled", "literal"])
def test_equals_unfold_gray_fold(method, patch, size, channels, rescale):
    images = random_images(2, channels, *size)
    actual = PixelGraying(patch, 0.7, method, rescale=rescale)(images)
    torch.testing.assert_close(actual, by_unfolding(images, patch, method, rescale), rtol=0, atol=1e-12)


@pytest.mark.every_value
@over_methods
@over_grids
def test_one_image_equals_a_batch_of_one(method, patch, size):
    image = random_images(3, *size)
    module = PixelGraying(patch, 0.7, method)
    assert module(image).shape == image.shape
    assert torch.equal(module(image), module(image[None])[0])


@over_methods
def test_any_leading_axes(method):
    images = random_images(2, 3, 3, 8, 8)
    module = PixelGraying(4, 0.7, method)
    torch.testing.assert_close(module(images), module(images.flatten(0, 1)).unflatten(0, (2, 3)))


@pytest.mark.every_value
@over_methods
@over_grids
def test_eps_one_is_the_identity(method, patch, size):
    images = random_images(2, 3, *size)
    assert torch.equal(PixelGraying(patch, 1, method)(images), images)


@pytest.mark.every_value
@over_methods
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtype_is_kept(method, dtype):
    assert PixelGraying(4, 0.7, method)(random_images(2, 3, 8, 8).to(dtype)).dtype == dtype


@over_methods
def test_memory_layout_does_not_matter(method):
    images = random_images(2, 3, 8, 8)
    module = PixelGraying(4, 0.7, method)
    torch.testing.assert_close(module(images.to(memory_format=torch.channels_last)), module(images))


@over_methods
def test_gradient(method):
    module = PixelGraying((2, 3), 0.7, method)
    images = random_images(2, 1, 4, 6).requires_grad_()
    assert torch.autograd.gradcheck(module, images, atol=1e-6, rtol=1e-5)


def _transform(method: str = "svd") -> v2.Transform:
    return v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), PixelGraying(4, 0.7, method)])


def _photo(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (16, 24, 3), dtype=np.uint8)


@over_methods
def test_last_step_of_a_transform(method):
    photo = _photo()
    actual = _transform(method)(PIL.Image.fromarray(photo))
    image = torch.from_numpy(photo).permute(2, 0, 1).float() / 255
    assert actual.dtype == torch.float32
    torch.testing.assert_close(
        torch.as_tensor(actual), PixelGraying(4, 0.7, method)(image), rtol=0, atol=1e-5
    )


@over_methods
def test_pickle_keeps_every_setting(method):
    module = PixelGraying((2, 4), 0.6, method, rescale=False, floor=1e-3)
    copy = pickle.loads(pickle.dumps(module))
    images = random_images(2, 3, 8, 8)
    assert repr(copy) == repr(module)
    assert torch.equal(copy(images), module(images))


class _Photos(Dataset):
    """Six photos, grayed by the process that loads them."""

    def __init__(self, transform: v2.Transform) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(PIL.Image.fromarray(_photo(index)))


@pytest.mark.parametrize("method", ["svd", "dct"])
def test_in_the_workers_of_a_data_loader(method):
    photos = _Photos(_transform(method))
    loaded = torch.cat(list(DataLoader(photos, batch_size=3, num_workers=2)))
    expected = torch.stack([torch.as_tensor(photos[index]) for index in range(len(photos))])
    torch.testing.assert_close(loaded, expected, rtol=0, atol=1e-5)
