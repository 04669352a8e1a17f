"""What the processes of a run agree on. With one process each of these is the identity."""

import torch.distributed as dist
from torch import Tensor

from wellposed.train.checkpoint.processes import several


def largest(values: Tensor) -> Tensor:
    """The elementwise largest over all processes, in place."""
    if several():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def total(values: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if several():
        dist.all_reduce(values)
    return values


def wait_for_all() -> None:
    if several():
        dist.barrier()
