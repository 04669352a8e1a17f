"""torch's DataLoader as it is used here."""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch.utils.data import DataLoader

from wellposed.errors import WorkerDiedError
from wellposed.train.batches.items import Item, Items, Key, together

T = TypeVar("T")

PREFETCH = 4
"""Batches that each worker makes ahead."""


def loader(
    items: Items, keys: Iterable[list[Key]], workers: int, device: torch.device, *, persistent: bool
) -> DataLoader[Item]:
    """Batches of items by their keys.

    Args:
        keys: of each batch; iterated over anew for every iteration.
        workers: processes; 0 makes the items in this one.
        device: for CUDA the batches are pinned.
        persistent: the workers stay from one iteration to the next.
    """
    return DataLoader(
        items,
        batch_sampler=keys,  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=together,
        pin_memory=device.type == "cuda",
        worker_init_fn=_leave_signals_to_the_trainer,
        prefetch_factor=PREFETCH if workers else None,
        persistent_workers=persistent and workers > 0,
        # Of its own: DataLoader would otherwise draw from the global one.
        generator=torch.Generator().manual_seed(0),
    )


def read_by(batches: Iterable[T]) -> Iterator[T]:
    """What workers read; one that died is an error that says what to do."""
    try:
        yield from batches
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise WorkerDiedError(
            f"a process that reads images died ({str(error).splitlines()[0]}), as they do when the memory is "
            "full; the same command resumes from the last checkpoint. Fewer workers= need less memory."
        ) from error


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Answer no signals but the training process's own.

    Ctrl-C and a scheduler's SIGTERM go to all processes of a job. The training process answers them by a
    checkpoint; a worker that dies meanwhile would break that off.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS, where only Ctrl-C is left to it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_the_trainer_says, daemon=True).start()


def _end_when_the_trainer_says() -> None:
    """Only here, where it waits for them, does a process learn who sent a signal."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
