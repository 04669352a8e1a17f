"""Joining the other processes that a launcher started.

Accelerate does this by itself, except after a restart: ``torchrun`` starts the processes again beside the
store in which the dead ones left their addresses, and the new ones may try to reach those. Here every attempt
has its own corner of the store.
"""

import os

import torch
import torch.distributed as dist
from accelerate.utils import get_int_from_env
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""What launchers of MPI set, which Accelerate joins too."""


def started_processes() -> int:
    """How many processes the launcher says that it has started; 1 without a launcher."""
    return int(get_int_from_env(["WORLD_SIZE", *_MPI], 1))


def join_processes(device: str | None) -> None:
    """Make the process group of a restart; does nothing where there is one, or one process."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is None or dist.is_initialized() or started_processes() < 2:
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, world = next(rendezvous("env://"))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=PrefixStore(f"attempt-{attempt}", store),
        rank=rank,
        world_size=world,
    )


def leave_processes() -> None:
    """End the process group, if there is one; at the end of a program."""
    if dist.is_initialized():
        dist.destroy_process_group()
