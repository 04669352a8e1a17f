"""Images for a probe, from whatever a user has, as batches that the model takes."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class ImageBatches:
    """Batches on the model's device and in its dtype; iterating again starts over."""

    def __init__(self, images: Tensor, model: nn.Module, batch_size: int) -> None:
        self.images, self.batch_size = images, batch_size
        self.notes: list[str] = []
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.images.split(self.batch_size):
            yield batch.to(self.device, self.dtype)


def image_batches(
    images: object, model: nn.Module, *, batch_size: int = 16, limit: int | None = None
) -> ImageBatches:
    """See :class:`ImageBatches`."""
    assert isinstance(images, Tensor)
    return ImageBatches(images[:limit], model, batch_size)


def first_images(images: object, model: nn.Module, count: int) -> Tensor:
    """The first ``count`` images as one batch."""
    return torch.cat(list(image_batches(images, model, batch_size=count, limit=count)))[:count]
