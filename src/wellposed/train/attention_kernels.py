"""Which kernels of attention a training run may use."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Leave attention to torch's other kernels, and the caller's choice as it was.

    On Hopper GPUs torch prefers cuDNN's, whose backward pass can return NaN for finite inputs, where all
    scores of a query are far below zero (pytorch/pytorch issue 196678). An ablation that drives scores there
    would be blamed for it.
    """
    was_enabled = bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)
