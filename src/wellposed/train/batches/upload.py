"""From the host to the device without waiting for either."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PINNED_LIMIT = 64 * 2**20
"""Bytes; a whole set of images should not be locked in the host's memory."""


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device; on CUDA the copy of a small one is queued and the host goes on."""
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    if device.type == "cuda" and tensor.nbytes <= PINNED_LIMIT:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Uploads:
    """Copies of pinned batches; on CUDA beside the computation that is still going on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        if self._stream is None:
            return [tensor.to(self.device) for tensor in tensors]
        with torch.cuda.stream(self._stream):
            copies = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for copy in copies:
            # Made on one stream, used on another: its memory must not be given away before that use.
            copy.record_stream(current)
        return copies
