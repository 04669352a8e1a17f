"""From pixels to a batch: what resident and streamed images have in common."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from wellposed.train.batches.augment import augmented
from wellposed.train.batches.batch import Batch
from wellposed.train.batches.draws import Purpose, generator
from wellposed.train.batches.mixing import Mixing
from wellposed.train.batches.order import Order
from wellposed.train.batches.plan import NOISE_STARTS, Augmentation, draw
from wellposed.train.batches.upload import upload


class Preparation:
    """Augments, normalises and mixes the passes of an update, on the device.

    Args:
        augmentation: what is done here.
        mixing: mixup, CutMix and smoothing.
        order: of the run; tells which rows of an update's plan are this process's.
        mean, std: of the channels, for pixels from 0 to 1.
        size: side of the images.
        device: where they are.
        compile: compile the augmentation.
    """

    def __init__(
        self,
        augmentation: Augmentation,
        mixing: Mixing,
        order: Order,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        size: int,
        device: torch.device,
        compile: bool,
    ) -> None:
        self.augmentation, self.mixing, self.order = augmentation, mixing, order
        self.size, self.device = size, device
        self.mean, self.std = scale(mean, device), scale(std, device)
        self._noise: Tensor | None = None
        if augmentation.erase:
            count = NOISE_STARTS + len(mean) * size * size
            values = generator(order.seed, Purpose.NOISE).standard_normal(count, dtype=np.float32)
            self._noise = upload(values, device)
        self._augmented: Callable[..., Tensor] = augmented
        if compile:
            self._augmented = torch.compile(augmented, dynamic=False)

    def plans(self, update: int) -> list[Tensor | None]:
        """For each pass of this process what is done to its images."""
        if self.augmentation.is_nothing:
            return [None] * len(self.order.positions)
        order = self.order
        whole = draw(self.augmentation, order.seed, update, order.batch_size, self.size)
        return list(upload(whole[order.positions], self.device).unbind(0))

    def batch(
        self, update: int, plan: Tensor | None, pixels: Tensor, indices: Tensor | None, labels: Tensor
    ) -> Batch:
        """One pass: the images at ``indices`` of ``pixels``, with their labels (b,)."""
        images = self._augmented(pixels, indices, plan, self.mean, self.std, self._noise, self.augmentation)
        return Batch(*self.mixing(update, images, labels))


def scale(values: Sequence[float], device: torch.device) -> Tensor:
    """A mean or deviation of the channels, for pixels from 0 to 255, as (C, 1, 1)."""
    return (torch.tensor(values, dtype=torch.float32) * 255).view(-1, 1, 1).to(device)
