"""One process of a run that torchrun starts: python distributed_run.py FOLDER PARALLEL [KILL_AT].

With KILL_AT the second process kills itself after so many updates, once.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from short_runs import recipe
from wellposed.train import fit
from wellposed.train.report import Reporter

FIELDS = {"mixup": 0.3, "erase": 0.3, "broadcast": "cb_s", "graying": "svd", "checkpoint_every": 2}


def die_once(folder: Path, update: int) -> None:
    mark = folder.parent / f"{folder.name}-died"
    advance = Reporter.advance

    def advancing(self: Reporter, done: int) -> None:
        advance(self, done)
        if done == update and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Reporter.advance = advancing  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, parallel, *kill = sys.argv[1:]
    if kill:
        die_once(Path(folder), int(kill[0]))
    result = fit(recipe(**FIELDS, parallel=parallel, monitor_every=6), out=folder, quiet=True)
    assert result.status == "finished", result.status
    torch.distributed.destroy_process_group()
