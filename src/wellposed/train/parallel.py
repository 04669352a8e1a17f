"""One model on one or many processes, compiled or not."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from wellposed import anatomy
from wellposed.compiling import many_programs, mend_inductor
from wellposed.train.checkpoint.processes import several
from wellposed.train.recipe import Recipe


def distribute(module: nn.Module, trunk: nn.Module, recipe: Recipe, device: torch.device) -> nn.Module:
    """Replicate or shard a module that is on its device, after its blocks were compiled if they are to be."""
    if has_compiled_blocks(recipe):
        # The decoder of a masked autoencoder has some too.
        for block in anatomy.blocks(module):
            block.module.compile()
    if not several():
        return module
    if recipe.parallel == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in anatomy.blocks(trunk):
        fully_shard(block.module, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def has_compiled_blocks(recipe: Recipe) -> bool:
    """Whether the blocks are compiled rather than the whole; a sharded model gathers weights between them."""
    is_sharded = several() and recipe.parallel == "fsdp2"
    return bool(recipe.compile) and (recipe.compile_blocks or is_sharded)


def room_for_programs(recipe: Recipe, trunk: nn.Module) -> AbstractContextManager[None]:
    """For compiled blocks, which share their class: in training and tests, with and without gradients."""
    if not has_compiled_blocks(recipe):
        return nullcontext()
    return many_programs(4 * len(anatomy.blocks(trunk)))


def compiled(module: nn.Module, recipe: Recipe, device: torch.device) -> Any:
    """The module's forward, compiled if the recipe says so and its blocks are not compiled already.

    On one GPU the passes are recorded as CUDA graphs, because small models are otherwise bound by how fast
    Python launches kernels; unless something in them cannot be recorded.
    """
    if recipe.compile and device.type == "cuda":
        mend_inductor()  # blocks and augmentation too are compiled when they first run, later than here
    if not recipe.compile or has_compiled_blocks(recipe):
        return module
    return torch.compile(module, mode="reduce-overhead" if _can_record(recipe, device) else None)


def is_recorded_here(recipe: Recipe, device: torch.device) -> bool:
    """Whether the passes are recorded by the trainer (``recording.py``): blocks compiled one by one."""
    return has_compiled_blocks(recipe) and _can_record(recipe, device)


def _can_record(recipe: Recipe, device: torch.device) -> bool:
    # An SVD waits for the host; of the factorisation that a target for kappa needs it is not sure.
    is_unfit = recipe.graying == "svd" or recipe.target_kappa is not None
    # Gradients that are accumulated live in the memory that the next pass writes to.
    is_accumulating = recipe.accumulate > 1
    return device.type == "cuda" and not (several() or is_unfit or is_accumulating)


@contextmanager
def accumulating(module: nn.Module, is_last: bool) -> Iterator[None]:
    """Gradients travel between the processes in the last pass of an update only."""
    if isinstance(module, DistributedDataParallel) and not is_last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last)
    yield
