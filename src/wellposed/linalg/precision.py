"""Keeping the digits of a product: out of autocast's reach, and without TF32."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast does not lower operations on x's device."""
    # Meta tensors know no autocast.
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Inside, float32 products and convolutions keep all digits of float32.

    Convolutions on a GPU round to TF32 unless told otherwise, and products where a user asked for it.
    """
    backends: Any = torch.backends
    settings = [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv]
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def in_float64(x: Tensor) -> Tensor:
    """X in float64, without its gradient; MPS knows none, its tensors go to the CPU."""
    return (x.cpu() if x.device.type == "mps" else x).detach().double()
