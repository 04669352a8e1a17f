"""Keeping products out of autocast's reach."""

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast does not lower operations on x's device."""
    # Meta tensors know no autocast.
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
