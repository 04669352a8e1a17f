"""Which patches are hidden: a pure function of (seed, update) and of the place in the batch.

Shapes: B images, N patches, K visible ones.

>>> noise = torch.tensor([[0.9, 0.1, 0.5, 0.3]])
>>> mask = mask_of(noise, visible=2)
>>> mask.hidden.tolist(), mask.visible.tolist(), mask.restore.tolist()
([[True, False, True, False]], [[1, 3]], [[2, 0, 3, 1]])
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wellposed.train.batches.draws import Purpose, generator

_PURPOSES = {"train": Purpose.MASK, "test": Purpose.TEST_MASK}
_TEST_BLOCK = 256
"""Test images whose masks are drawn together."""


class Mask(NamedTuple):
    """What is hidden in a batch of images.

    Attributes:
        hidden: (B, N) bool.
        visible: (B, K) indices of the visible patches, in raster order: an operation that depends on the
            order of the tokens, as DCT graying does, sees them in the order of a whole image.
        restore: (B, N) for each patch its place in the row [visible patches, hidden patches].
    """

    hidden: Tensor
    visible: Tensor
    restore: Tensor


def mask_noise(
    seed: int, update: int, batch_size: int, tokens: int, *, split: Literal["train", "test"] = "train"
) -> Tensor:
    """(batch_size, tokens) uniform numbers on the CPU, for the whole batch of an update.

    A process takes the rows of its own images; so the masks do not depend on the number of processes, nor on
    what was drawn before.

    >>> torch.equal(mask_noise(0, 5, 2, 9), mask_noise(0, 5, 4, 9)[:2])
    True
    """
    numbers = generator(seed, _PURPOSES[split], update).random((batch_size, tokens), dtype=np.float32)
    return torch.from_numpy(numbers)


def fixed_mask_noise(seed: int, first: int, count: int, tokens: int) -> Tensor:
    """(count, tokens) for the test images from position ``first`` on, the same in any division into batches.

    >>> torch.equal(fixed_mask_noise(0, 250, 20, 9)[5:], fixed_mask_noise(0, 255, 15, 9))
    True
    """
    blocks = range(first // _TEST_BLOCK, (first + count - 1) // _TEST_BLOCK + 1)
    noise = torch.cat([mask_noise(seed, block, _TEST_BLOCK, tokens, split="test") for block in blocks])
    start = first - blocks.start * _TEST_BLOCK
    return noise[start : start + count]


def visible_count(tokens: int, mask_ratio: float) -> int:
    """How many of the patches stay visible, at least one and not all."""
    if not 0 < mask_ratio < 1:
        raise ValueError(f"mask_ratio must be in (0, 1), got {mask_ratio}; 0.75 is usual.")
    visible = tokens - round(tokens * mask_ratio)
    if not 0 < visible < tokens:
        raise ValueError(
            f"mask_ratio={mask_ratio} of {tokens} patches leaves {visible} visible, expected at least one "
            "visible and one hidden; take smaller patches or another ratio."
        )
    return visible


def mask_of(noise: Tensor, visible: int) -> Mask:
    """The ``visible`` patches of the smallest noise stay, of equal ones the first."""
    # Stable sorts: equal numbers must not be sorted differently on another device.
    ranks = noise.argsort(dim=1, stable=True).argsort(dim=1)
    hidden = ranks >= visible
    order = hidden.to(torch.uint8).argsort(dim=1, stable=True)
    return Mask(hidden, order[:, :visible], order.argsort(dim=1))


def take(tokens: Tensor, indices: Tensor) -> Tensor:
    """(B, K, D): of each image's tokens (B, N, D) those at its ``indices`` (B, K)."""
    return tokens.gather(1, indices.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
