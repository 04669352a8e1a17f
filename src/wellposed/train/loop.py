"""The loop: updates, tests, measurements, checkpoints, and what to do when something goes wrong.

Nothing here waits for the device at every update. The host reads numbers every ``log_every`` updates and asks
the guard every few.
"""

import contextlib
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wellposed import anatomy, surgery
from wellposed.errors import UnknownModelError
from wellposed.probes import Monitor
from wellposed.train.batches import Batch, EvalBatches, TrainBatches
from wellposed.train.checkpoint import Checkpoint, Store
from wellposed.train.model import Task, Tested, evaluate
from wellposed.train.optimizer import (
    EpsSchedule,
    Guard,
    explain,
    gradient_norm,
    make_optimizer,
    make_schedule,
    takes_flag,
)
from wellposed.train.order import seed_update
from wellposed.train.parallel import (
    CudaRecorder,
    Outcome,
    RecordedPass,
    accumulating,
    compiled,
    from_first,
    is_first,
    is_recorded_here,
    largest,
    rank,
    read,
    several,
    total,
    wait_for_all,
    world,
)
from wellposed.train.recipe import Recipe
from wellposed.train.reporter import Reporter
from wellposed.train.training_state import gather, gather_weights, restore, restore_weights

if TYPE_CHECKING:
    from accelerate import Accelerator

Status = Literal["finished", "terminated", "nonfinite"]
Weights = tuple[dict[str, Tensor], dict[str, Any]]
"""A state dict of timm's model, and what there is to say of it: the last fields of :class:`Exported`."""
Exporter = Callable[[str, Weights], None]
"""Writes weights into the folder of that name."""

LOOK_EVERY = 10
"""Updates between two looks at the guard and at requests to stop, where looking waits for the device."""
LEAST_SECONDS = 60.0
"""Between two checkpoints, where the recipe says nothing: small models finish an epoch in a second."""
USUAL = 100
"""Updates between two measurements where nothing else is said."""
SHARE = 0.01
"""Of the time that training takes, which measuring may take at most."""
IMAGES = 4
"""Test images that the monitor looks at."""


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE = 90.0
"""Seconds that an update may still take after a request; a compilation whose workers got the signal too may
never end. Checkpoints are whole at any moment, so leaving is safe."""


class StopRequest:
    """Within ``with``, SIGTERM and the first Ctrl-C only set ``requested``; a second Ctrl-C interrupts.

    Who sees the request calls :meth:`honour` and may then take the time that saving needs. If nobody does so
    within :data:`GRACE` seconds, the process ends. Outside the main thread Python cannot take signals, and
    then nothing is changed.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.honour()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def honour(self) -> None:
        """The request was seen."""
        if self._timer is not None:
            self._timer.cancel()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested is None:
            self._timer = threading.Timer(GRACE, self._leave)
            self._timer.daemon = True
            self._timer.start()
        self.requested = signal.Signals(number)

    def _leave(self) -> None:
        print(
            f"no update ended within {GRACE:.0f} s of the signal; leaves without saving, "
            "the same command resumes from the last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(128 + int(self.requested or signal.SIGTERM))


class PacedMonitor:
    """Measures every ``every`` updates.

    None starts with every :data:`USUAL` updates. The second measurement and the updates before it show what
    measuring costs; if it is more than :data:`SHARE` of the time, the interval grows to a multiple that keeps
    it, for the rest of the run.
    """

    def __init__(self, monitor: Monitor, every: int | None) -> None:
        self.monitor = monitor
        self.every = every
        self._last: tuple[int, float] | None = None

    def is_due(self, update: int) -> bool:
        return update % (self.every or USUAL) == 0

    def measure(self, update: int) -> dict[str, float]:
        before = time.monotonic()
        numbers = self.monitor.measure(update)
        after = time.monotonic()
        if self.every is None and self._last is not None:
            first, since = self._last
            if update > first:
                self.every = paced(after - before, (before - since) / (update - first))
        self._last = update, after
        return numbers


def paced(cost: float, update: float) -> int:
    """Updates between two measurements, from the seconds that a measurement and an update take.

    >>> paced(0.05, 0.07), paced(0.05, 0.016)
    (100, 400)
    """
    return USUAL * max(1, math.ceil(cost / (SHARE * update * USUAL)))


@dataclass
class Progress:
    """What a checkpoint remembers besides tensors."""

    update: int = 0
    best: float | None = None
    monitor_every: int | None = None
    tested: int = 0
    """The last epoch whose end is dealt with: its test, or that it has none."""
    collapsed: int = 0
    """Tests in a row, up to the last one, with less than half of the best accuracy."""
    measured: int = -1
    """The last update after which the monitor has measured."""
    sums: tuple[float, float, float, int] = (0.0, 0.0, 0.0, 0)
    """Of the updates since the last line of the log, over all processes, and the images of one."""


@dataclass
class Sums:
    """Of the updates since the last line of the log."""

    values: Tensor
    """On the device: losses, images classified right, updates."""
    images: int = 0
    earlier: int = 0
    """Images of before this start, which the values count too."""

    @classmethod
    def empty(cls, device: torch.device) -> "Sums":
        return cls(torch.zeros(3, dtype=torch.float64, device=device))

    @classmethod
    def resumed(cls, progress: Progress, device: torch.device) -> "Sums":
        """Those of a checkpoint: the first process has what all had."""
        *values, images = progress.sums
        saved = torch.tensor(values, dtype=torch.float64, device=device)
        return cls(saved if is_first() else torch.zeros_like(saved), earlier=images)

    def saved(self) -> tuple[float, float, float, int]:
        """For a checkpoint; every process must call it."""
        loss, correct, updates = read(total(self.values.clone()))
        return loss, correct, updates, self.earlier + self.images


class Loop:
    """One run on this process. :meth:`run` does it; the rest are its steps.

    The recipe is resolved, the task's module is on the device, and ``module`` is the same, replicated or
    sharded. ``export`` writes weights for people.
    """

    reporter: Reporter

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        module: nn.Module,
        train: TrainBatches,
        test: EvalBatches,
        accelerator: "Accelerator",
        store: Store,
        export: Exporter,
    ) -> None:
        self.recipe, self.task, self.module = recipe, task, module
        self.train, self.test, self.accelerator = train, test, accelerator
        self.store, self.export = store, export
        self.device: torch.device = accelerator.device
        self.rank, self.world = rank(), world()
        self.forward = compiled(module, recipe, self.device)
        self.parameters = [parameter for parameter in task.module.parameters() if parameter.requires_grad]
        self.recorded: RecordedPass | None = None
        if is_recorded_here(recipe, self.device):
            cuda = CudaRecorder(self.device)
            self.recorded = RecordedPass(self._recordable, self.parameters, cuda.launch, cuda.record)
        self.optimizer = make_optimizer(task.module, recipe)
        self.schedule = make_schedule(self.optimizer, recipe, train.updates_per_epoch)
        self.updates = recipe.epochs * train.updates_per_epoch
        self.ema = None if recipe.ema is None else ModelEmaV3(task.module, decay=recipe.ema, use_warmup=True)
        averaged = [] if self.ema is None else [self.ema.module]
        self.eps = EpsSchedule([task.module, *averaged], self.updates)
        waits = self.device.type == "cpu" or not takes_flag(self.optimizer) or self.ema is not None
        skips = recipe.on_nonfinite == "skip"
        self.guard = Guard(task.module, self.optimizer, self.device, continues=skips, on_host=waits)
        self.progress = Progress()
        self.sums = Sums.empty(self.device)
        self.last_test: Tested | None = None
        self.monitor: PacedMonitor | None = None
        if recipe.monitor_every != 0:
            self.monitor = PacedMonitor(self._new_monitor(), recipe.monitor_every)
        self._skipped = 0
        # The best weights stay in memory until the next checkpoint and are written before it: a run that
        # resumes never finds them too old, and small models do not spend their time on writing files.
        self._best: Weights | None = None
        self._saved_at = time.monotonic()

    def run(self, reporter: Reporter, stop: StopRequest) -> Status:
        """All updates that are left."""
        self.reporter = reporter
        batches = self.train.iterate(self.progress.update, self.updates)
        self.task.train_mode()
        self._measure_of_before()
        self._end_epoch_of_before()
        try:
            for update, passes in batches:
                if 0 < self.recipe.collapse_patience <= self.progress.collapsed:
                    self._report_collapse()
                    break
                norm = self.update(update, passes, self.sums)
                done = self.progress.update = update + 1
                self.reporter.advance(done)
                is_epoch, is_last = done % self.train.updates_per_epoch == 0, done == self.updates
                if done % self.recipe.log_every == 0 or is_last:
                    self._log(self.sums, norm)
                    self.sums = Sums.empty(self.device)
                saves = self._is_save_due(done, is_epoch)
                looks = self.guard.on_host or done % LOOK_EVERY == 0 or is_epoch or saves
                if looks and (status := self._look(stop, update)) is not None:
                    return status
                if self.monitor is not None and self.monitor.is_due(done) and not is_last:
                    self._measure()
                if is_epoch:
                    self._end_epoch(done // self.train.updates_per_epoch)
                if saves and not is_last:
                    self.save()
        finally:
            batches.close()  # type: ignore[attr-defined]
        self._measure()
        self.save()
        return "finished"

    # One update.

    def update(self, update: int, passes: list[Batch], sums: Sums) -> Tensor:
        """One update; returns the norm of its gradient."""
        seed_update(self.recipe.seed, update, self.rank)
        self.schedule.step_update(update)
        self.eps.set(update)
        self.guard.begin()
        loss_total = torch.zeros((), device=self.device)
        for number, batch in enumerate(passes):
            with accumulating(self.module, number == len(passes) - 1):
                if self.recorded is not None:
                    loss, correct = self.recorded(self.task.inputs(batch, update, number), batch)
                else:
                    loss, correct = self._forward(self.forward, update, number, batch)
                    torch.autograd.backward(loss / len(passes))
                    loss = loss.detach()
            loss_total = loss_total + loss / len(passes)
            if correct is not None:
                sums.values[1] += correct
            sums.images += len(batch.images)
        norm = gradient_norm(self.parameters, self.recipe.clip_grad)
        self.guard.step(update, loss_total, norm)
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None and not self.guard.skipped_last:
            self.ema.update(self.task.module, step=update)
        sums.values[0] += loss_total
        sums.values[2] += 1
        return norm

    def _forward(self, forward: Any, update: int, number: int, batch: Batch) -> Outcome:
        return self._loss(forward, self.task.inputs(batch, update, number), batch)

    def _recordable(self, inputs: tuple[Tensor, ...], batch: Batch) -> Outcome:
        """Forward and backward pass; it must not wait for the device."""
        loss, correct = self._loss(self.forward, inputs, batch)
        torch.autograd.backward(loss)
        return loss.detach(), correct

    def _loss(self, forward: Any, inputs: tuple[Tensor, ...], batch: Batch) -> Outcome:
        with self.accelerator.autocast():
            output = forward(*inputs)
        return self.task.loss(output, batch)

    def _log(self, sums: Sums, norm: Tensor) -> None:
        loss, correct, updates = read(total(sums.values.clone()))
        images = (sums.earlier + sums.images) * self.world
        self.reporter.train(
            self.progress.update,
            loss=loss / updates,
            accuracy=None if self.recipe.task == "mae" else correct / images,
            lr=max(group["lr"] for group in self.optimizer.param_groups),  # with layer_decay they differ
            grad_norm=float(norm.full_tensor() if isinstance(norm, DTensor) else norm),
            images=images,
            timed=sums.images * self.world,
        )

    # Signals, and numbers that are not finite.

    def _look(self, stop: StopRequest, update: int) -> Status | None:
        """What the guard and the operating system have to say, the same on all processes."""
        skipped, first_bad = self.guard.read()
        if first_bad is not None and self.recipe.on_nonfinite != "skip":
            return self._nonfinite(first_bad)
        if skipped > self._skipped:
            self.reporter.event("nonfinite", update=update, left_out=skipped)
            self.reporter.warn(
                f"{skipped - self._skipped} updates up to {update} were not finite and were skipped."
            )
            self._skipped = skipped
        if several() and not self.guard.on_host and update % LOOK_EVERY != LOOK_EVERY - 1:
            return None
        wanted = torch.tensor(0 if stop.requested is None else int(stop.requested), device=self.device)
        if number := int(largest(wanted)):
            stop.honour()
            self.save()
            self.reporter.event("terminated", signal=number)
            self.reporter.say(
                f"stopped by signal {number} after update {self.progress.update} of {self.updates}; "
                "all is saved, the same command resumes."
            )
            return "terminated"
        return None

    def _nonfinite(self, update: int) -> Status:
        """Explain a bad update, which the weights have not seen, and stop."""
        self.progress.update = update
        folder = self._explain(update)
        self.guard.reset()
        self.save()
        self.reporter.say(
            f"stopped before update {update}; a checkpoint has the weights before it, {folder} explains it. "
            "on_nonfinite=skip continues without the update."
        )
        return "nonfinite"

    def _explain(self, update: int) -> str:
        folder = self.store.folder.parent / f"nonfinite-{update:08d}"
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier start, at the same update
        wait_for_all()
        measured: dict[str, float] = {}
        with contextlib.suppress(UnknownModelError):  # a model without known blocks has no kappa
            monitor = self._new_monitor() if self.monitor is None else self.monitor.monitor
            measured = monitor.measure()
        self.task.train_mode()
        self.optimizer.zero_grad(set_to_none=True)
        seed_update(self.recipe.seed, update, self.rank)
        self.eps.set(update)
        self.guard.begin()
        sentence = explain(
            folder,
            update=update,
            passes=self.train.at(update),
            run_pass=lambda number, batch: self._forward(self.module, update, number, batch)[0],
            module=self.task.module,
            measured=measured,
            rank=self.rank,
        )
        self.guard.put_back()
        self.optimizer.zero_grad(set_to_none=True)
        self.reporter.event("nonfinite", update=update, text=sentence, folder=folder.name)
        self.reporter.warn(sentence)
        wait_for_all()
        return folder.name

    # Measurements.

    def _new_monitor(self) -> Monitor:
        """It looks at the first test images, the same on every start of a run."""
        # In a masked autoencoder the encoder's blocks are looked at, not the decoder's.
        is_mae = self.recipe.task == "mae"
        blocks = slice(0, len(anatomy.blocks(self.task.trunk))) if is_mae else None
        return Monitor(self.task.watched(), next(iter(self.test)).images[:IMAGES], blocks=blocks)

    def _measure_of_before(self) -> None:
        """Measure at the start, and what a run was stopped before."""
        update = self.progress.update
        is_due = self.monitor is not None and self.monitor.is_due(update) and update < self.updates
        if is_due and self.progress.measured != update:
            self._measure()

    def _measure(self) -> None:
        monitor = self.monitor
        if monitor is None:
            return
        numbers = monitor.measure(self.progress.update)
        self.progress.measured = self.progress.update
        # The processes must agree when to measure next, and their clocks do not.
        monitor.every = self.progress.monitor_every = from_first(lambda: monitor.every, self.device)
        self.reporter.measured(self.progress.update, numbers, monitor.monitor.raised)

    # Tests.

    def _end_epoch_of_before(self) -> None:
        """Test what a run was stopped before: a signal at the last update of an epoch, or after the last."""
        epoch, rest = divmod(self.progress.update, self.train.updates_per_epoch)
        is_unreported = self.progress.update == self.updates and self.last_test is None
        if rest == 0 and epoch > 0 and (self.progress.tested < epoch or is_unreported):
            self._end_epoch(epoch)

    def _end_epoch(self, epoch: int) -> None:
        self.progress.tested = epoch
        if epoch % self.recipe.eval_every and epoch != self.recipe.epochs:
            return
        tested = self.last_test = self._test(self.forward, self.task.module)
        averaged = None if self.ema is None else self._test(self.ema.module, self.ema.module)
        self.task.train_mode()
        if tested.nonfinite:
            self.reporter.warn(
                f"the scores of {tested.nonfinite} of {tested.images} test images are not finite; they count "
                "as wrong, so the accuracy is not the model's. With compile=false it may be."
            )
        self.reporter.tested(
            self.progress.update,
            epoch=epoch,
            loss=tested.loss,
            accuracy=tested.accuracy,
            ema_accuracy=None if averaged is None else averaged.accuracy,
            best=self._keep_if_best(tested, averaged),
            **{"nonfinite": tested.nonfinite} if tested.nonfinite else {},
        )
        is_low = tested.accuracy is not None and 2 * tested.accuracy < (self.progress.best or 0.0)
        self.progress.collapsed = self.progress.collapsed + 1 if is_low else 0

    def _test(self, forward: Any, module: nn.Module) -> Tested:
        with self.accelerator.autocast():
            return evaluate(
                forward, module, self.task, self.test, self.device, rank=self.rank, world=self.world
            )

    def _keep_if_best(self, tested: Tested, averaged: Tested | None) -> bool:
        """Keep the weights if this test is the best; the averaged ones if theirs is better still."""
        is_average = averaged is not None and score(averaged) > score(tested)
        chosen = averaged if averaged is not None and is_average else tested
        if self.progress.best is not None and score(chosen) <= self.progress.best:
            return False
        self.progress.best = score(chosen)
        note = "They are those of the best test of the run, so a test on other images may be a little worse."
        if is_average:
            note = f"They are an exponential moving average of the weights. {note}"
        source = self.ema.module if self.ema is not None and is_average else self.module
        self._best = self._weights(source, chosen, note)
        return True

    def _report_collapse(self) -> None:
        update, tests, best = self.progress.update, self.progress.collapsed, self.progress.best
        self.reporter.event("collapsed", update=update)
        self.reporter.warn(
            f"ended after update {update} of {self.updates}: the last {tests} tests were below half of the "
            f"best accuracy, {best:.1%}."
        )

    # Checkpoints and weights. Every process calls these; the first has the files.

    def _is_save_due(self, done: int, is_epoch: bool) -> bool:
        """Whether to save after so many updates; the same on all processes."""
        if self.recipe.checkpoint_every is not None:
            return done % self.recipe.checkpoint_every == 0
        return is_epoch and from_first(lambda: time.monotonic() - self._saved_at > LEAST_SECONDS, self.device)

    def save(self) -> None:
        """A checkpoint of now, after the best weights."""
        self.progress.sums = self.sums.saved()
        if self._best is not None:
            if is_first():
                self.export("best", self._best)
            self._best = None
        files, state = gather(self.module, self.optimizer)
        if self.ema is not None:
            files["ema"] = gather_weights(self.ema.module)
        place = ""
        if is_first():
            path = self.store.save(self.progress.update, files, {**state, "progress": vars(self.progress)})
            place = str(Path(path.parent.name) / path.name)
        wait_for_all()
        self._saved_at = time.monotonic()
        self.reporter.event("checkpoint", update=self.progress.update, path=place)

    def resume(self, checkpoint: Checkpoint | None) -> None:
        """Continue from a checkpoint, which the first process has."""
        state = restore(self.module, self.optimizer, checkpoint)
        if self.ema is not None:
            restore_weights(self.ema.module, checkpoint, "ema")
        self._best = None
        saved = dict(state["progress"])
        if saved.pop("rollbacks", 0):
            raise ValueError(
                "an earlier version rolled the run back, and visits the images in another order since; "
                "resume it with that version, or start again with --overwrite."
            )
        progress = self.progress = Progress(**saved)
        self.sums = Sums.resumed(progress, self.device)
        if progress.update > 0:
            self.eps.set(progress.update - 1)  # of the weights, which may be tested before the next update
        self.guard.reset()
        if self.monitor is not None and self.recipe.monitor_every is None:
            self.monitor.every = progress.monitor_every

    def last_weights(self) -> Weights:
        return self._weights(self.module, self.last_test)

    def _weights(self, source: nn.Module, tested: Tested | None, note: str = "") -> Weights:
        """The edits are read now: the power of a graying may change during training."""
        state = self.task.export_state(gather_weights(source))
        accuracy, edits = None if tested is None else tested.accuracy, surgery.edits(self.task.trunk)
        return state, {"accuracy": accuracy, "update": self.progress.update, "edits": edits, "note": note}


def score(tested: Tested) -> float:
    """More is better."""
    return -tested.loss if tested.accuracy is None else tested.accuracy
