"""What the processes of a run agree on. With one process each of these is the identity."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from wellposed.train.checkpoint.processes import several, world


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


def of_all(sentences: list[str]) -> list[str]:
    """Those of all processes, each once; all have them in the same order."""
    if not several():
        return sentences
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, sentences)
    return list(dict.fromkeys(sentence for part in found for sentence in part))


def wait_for_all() -> None:
    if several():
        dist.barrier()
