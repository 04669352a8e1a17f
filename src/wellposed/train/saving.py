"""Checkpoints of a run, and its best weights.

The best weights are kept in memory until the next checkpoint and written before it: a run that goes on from
a checkpoint never finds them too old, and small models do not spend their time on writing files.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.surgery import Edits
from wellposed.surgery import edits as edits_of
from wellposed.train.agree import wait_for_all
from wellposed.train.checkpoint import Checkpoint, Store, gather, restore
from wellposed.train.checkpoint.processes import from_first, is_first
from wellposed.train.checkpoint.training_state import gather_weights, restore_weights
from wellposed.train.evaluate import Tested
from wellposed.train.tasks import Task

LEAST_SECONDS = 60.0
"""Between two checkpoints, where the recipe says nothing: small models finish an epoch in a second."""


@dataclass
class Progress:
    """What a checkpoint remembers beside tensors."""

    update: int = 0
    best: float | None = None
    rollbacks: int = 0
    monitor_every: int | None = None
    tested: int = 0
    """The last epoch whose end is dealt with: its test, or that it has none."""
    collapsed: int = 0
    """Tests in a row, up to the last one, with less than half of the best accuracy."""
    measured: int = -1
    """The last update after which the monitor has measured."""
    sums: tuple[float, float, float, int] = (0.0, 0.0, 0.0, 0)
    """Of the updates since the last line of the log, over all processes, and the images of one."""


@dataclass(frozen=True)
class Weights:
    """Of timm's model, for people."""

    state: dict[str, Tensor]
    accuracy: float | None
    update: int
    note: str
    edits: Edits
    """As they were with these weights: the power of a graying may change during training."""


Exporter = Callable[[str, Weights], None]
"""Writes weights into the folder of that name."""


class Saver:
    """Saves and restores what a run has learned. Every process calls its methods; the first has the files.

    Args:
        store: of checkpoints.
        exporter: of weights.
        task, module, optimizer, ema: what is saved.
        every: updates between two checkpoints; None is at the end of an epoch, at most one a minute.
        device: of this process.
    """

    def __init__(
        self,
        store: Store,
        exporter: Exporter,
        task: Task,
        module: nn.Module,
        optimizer: Optimizer,
        ema: ModelEmaV3 | None,
        every: int | None,
        device: torch.device,
    ) -> None:
        self.store, self.exporter, self.task = store, exporter, task
        self.module, self.optimizer, self.ema = module, optimizer, ema
        self.every, self.device = every, device
        self._best: Weights | None = None
        self._saved_at = time.monotonic()

    def is_due(self, done: int, is_epoch: bool) -> bool:
        """Whether to save after so many updates; the same on all processes."""
        if self.every is not None:
            return done % self.every == 0
        if not is_epoch:
            return False
        return from_first(lambda: time.monotonic() - self._saved_at > LEAST_SECONDS, self.device)

    def save(self, progress: Progress) -> str:
        """Save all; returns where, in words for the log."""
        if self._best is not None:
            if is_first():
                self.exporter("best", self._best)
            self._best = None
        files, state = gather(self.module, self.optimizer)
        if self.ema is not None:
            files["ema"] = gather_weights(self.ema.module)
        place = ""
        if is_first():
            path = self.store.save(progress.update, files, {**state, "progress": vars(progress)})
            place = str(Path(path.parent.name) / path.name)
        wait_for_all()
        self._saved_at = time.monotonic()
        return place

    def load(self, checkpoint: Checkpoint | None) -> Progress:
        """Restore a checkpoint, which the first process has."""
        state: dict[str, Any] = restore(self.module, self.optimizer, checkpoint)
        if self.ema is not None:
            restore_weights(self.ema.module, checkpoint, "ema")
        self._best = None
        return Progress(**state["progress"])

    def load_newest(self) -> Progress:
        """Restore the newest whole checkpoint; there must be one."""
        checkpoint = self.store.newest() if is_first() else None
        if not from_first(lambda: checkpoint is not None, self.device):
            raise RuntimeError(
                f"no whole checkpoint in {self.store.folder} to roll back to: "
                f"{' '.join(self.store.passed_over) or 'there is none'}"
            )
        return self.load(checkpoint)

    def consider(self, tested: Tested, averaged: Tested | None, progress: Progress) -> bool:
        """Keep the weights if this test is the best; the averaged ones if theirs is better still."""
        is_average = averaged is not None and score(averaged) > score(tested)
        chosen = averaged if averaged is not None and is_average else tested
        if progress.best is not None and score(chosen) <= progress.best:
            return False
        progress.best = score(chosen)
        note = "They are those of the best test of the run, so a test on other images may be a little worse."
        if is_average:
            note = f"They are an exponential moving average of the weights. {note}"
        self._best = self.weights(chosen, progress.update, is_average=is_average, note=note)
        return True

    def weights(
        self, tested: Tested | None, update: int, *, is_average: bool = False, note: str = ""
    ) -> Weights:
        """Those of now, for people; every process must call it."""
        source = self.ema.module if self.ema is not None and is_average else self.module
        state = self.task.export_state(gather_weights(source))
        accuracy = None if tested is None else tested.accuracy
        return Weights(state, accuracy, update, note, edits_of(self.task.trunk))


def score(tested: Tested) -> float:
    """More is better."""
    return -tested.loss if tested.accuracy is None else tested.accuracy
