"""The embedded digits as tensors, and a small ViT for them: for examples, benchmarks and tests.

>>> data = load_digits(seed=0)
>>> data.train_x.shape, data.test_x.shape
(torch.Size([1397, 1, 8, 8]), torch.Size([400, 1, 8, 8]))
>>> build_model(seed=0)(data.test_x[:2]).shape
torch.Size([2, 10])
"""

from dataclasses import dataclass

import timm
import torch
from torch import Tensor, nn

from wellposed.train.data import TEST_IMAGES, all_digits


@dataclass(frozen=True)
class Digits:
    """8 x 8 grey images (n, 1, 8, 8), standardised, and their labels."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_digits(seed: int) -> Digits:
    """Divided by the seed, as the trainer divides them."""
    pixels, labels = all_digits()
    x = (torch.from_numpy(pixels).float() * 16 / 255).round().unsqueeze(1)  # the original grey levels
    x = (x - x.mean()) / x.std()
    y = torch.from_numpy(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Digits(x[train], y[train], x[test], y[test])


def build_model(seed: int) -> nn.Module:
    """ViT with 16 patches of 2 x 2 pixels and a class token.

    Xavier initialisation, because with timm's own a model without skips does not start to learn.
    """
    torch.manual_seed(seed)
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        embed_dim=48,
        depth=6,
        num_heads=3,
    )
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model
