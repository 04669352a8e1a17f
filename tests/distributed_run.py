"""One process of a run that torchrun starts: python distributed_run.py FOLDER PARALLEL kill|nan UPDATE.

``kill``: the second process kills itself after so many updates, once. ``nan``: its loss in that update is not
finite, though its gradient is.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from short_runs import recipe
from wellposed.train import fit
from wellposed.train.batches import Batch
from wellposed.train.loop import Loop
from wellposed.train.reporter import Reporter

FIELDS = {"mixup": 0.3, "erase": 0.3, "broadcast": "cb_s", "graying": "spectral", "checkpoint_every": 2}


def die_once(folder: Path, update: int) -> None:
    mark = folder.parent / f"{folder.name}-died"
    advance = Reporter.advance

    def advancing(self: Reporter, done: int) -> None:
        advance(self, done)
        if done == update and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Reporter.advance = advancing  # type: ignore[method-assign]


def fail_at(update: int) -> None:
    forward = Loop._forward

    def failing(self: Loop, module: Any, at: int, number: int, batch: Batch) -> Any:
        loss, correct = forward(self, module, at, number, batch)
        is_bad = at == update and self.rank == 1
        return (loss + float("nan") if is_bad else loss), correct

    Loop._forward = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, parallel, what, update = sys.argv[1:]
    if what == "kill":
        die_once(Path(folder), int(update))
    else:
        fail_at(int(update))
    result = fit(recipe(**FIELDS, parallel=parallel, monitor_every=6), out=folder, quiet=True)
    assert result.status == {"kill": "finished", "nan": "nonfinite"}[what], result.status
    torch.distributed.destroy_process_group()
    # On a busy machine a thread of torch's may outlive its owner at the end, which aborts the process.
    os._exit(0)
