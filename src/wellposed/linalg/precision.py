"""Keeping the digits of a product: out of autocast's reach, without TF32, within the range of the dtype."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from wellposed.linalg.execution import is_traced

_USUAL = 2.0**20
"""Squares of numbers between its inverse and this, and the small ones beside them, are normal in float32."""


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


def unit_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers (B,) to divide matrices (B, n, d) by, so that ``dtype`` and that of x hold their squares.

    1 for those of usual size, for zeros and for what is not finite. Else the largest entry, within bounds
    that leave it and its inverse normal numbers, so subnormal tokens keep their digits.
    """
    wide = torch.promote_types(x.dtype, dtype)
    bound = 2.0**100 if wide == torch.float32 else 2.0**900
    largest = torch.maximum(x.amax((-2, -1)), -x.amin((-2, -1))).to(wide)
    is_usual = (largest > 1 / _USUAL) & (largest < _USUAL)
    needs_none = is_usual | (largest <= 0) | ~largest.isfinite()
    return torch.where(needs_none, 1, largest).clamp(1 / bound, bound)


def scaled(x: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    """X / unit, rounded to ``dtype`` after."""
    # To look would make a GPU wait.
    if unit.device.type == "cpu" and not is_traced() and (unit == 1).all():
        return x.to(dtype)
    return (x.to(unit.dtype) / unit[:, None, None]).to(dtype)
