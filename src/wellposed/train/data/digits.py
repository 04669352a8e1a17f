"""``digits``: 1,797 handwritten digits, 8 x 8 pixels, that come with this package.

They are the test part of *Optical Recognition of Handwritten Digits* by E. Alpaydin and C. Kaynak (UCI
Machine Learning Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0), as scikit-learn ships it.
Changed: the grey levels 0 to 16 are scaled to 0 to 255.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from wellposed.train.data.images import PixelImages
from wellposed.train.data.split import Contents, Part

TEST_IMAGES = 400


def all_digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Pixels (1797, 8, 8) and labels, in the order of the original."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        return file["pixels"], file["labels"].astype(np.int64)


def digits(seed: int) -> Contents:
    """The images; which 400 of them are for testing is drawn by the seed."""
    pixels, labels = all_digits()
    whole = Part(PixelImages(pixels[..., None], "digit"), labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).numpy()
    return Contents(
        classes=tuple(map(str, range(10))),
        train=whole.select(order[TEST_IMAGES:]),
        test=whole.select(order[:TEST_IMAGES]),
        photographs=False,
        is_test_drawn=True,
    )
