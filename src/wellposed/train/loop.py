"""The loop: updates, tests, measurements, checkpoints, and what to do when something goes wrong.

Nothing here waits for the device at every update. The host reads numbers every ``log_every`` updates and asks
the guard every few.
"""

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from wellposed.probes import Monitor
from wellposed.train.agree import largest, total, wait_for_all
from wellposed.train.batches import Batch, EvalBatches, TrainBatches
from wellposed.train.checkpoint import Checkpoint, Store, gather, restore
from wellposed.train.checkpoint.processes import from_first, several
from wellposed.train.checkpoint.training_state import gather_weights, restore_weights
from wellposed.train.eps import EpsSchedule
from wellposed.train.evaluate import Tested, evaluate
from wellposed.train.explain import explain
from wellposed.train.guard import Guard, takes_flag
from wellposed.train.monitoring import PacedMonitor
from wellposed.train.optimize import gradient_norm, make_optimizer, make_schedule
from wellposed.train.parallel import accumulating, compiled
from wellposed.train.recipe import Recipe
from wellposed.train.report import Reporter
from wellposed.train.seeding import seed_update
from wellposed.train.signals import StopRequest
from wellposed.train.tasks import Task

Status = Literal["finished", "terminated", "nonfinite"]

LOOK_EVERY = 10
"""Updates between two looks at the guard and at requests to stop, where looking waits for the device."""
LEAST_SECONDS = 60.0
"""Between two checkpoints, where the recipe says nothing: small models finish an epoch in a second."""
MOST_ROLLBACKS = 3


@dataclass
class Progress:
    """What a checkpoint remembers beside tensors."""

    update: int = 0
    best: float | None = None
    best_update: int = 0
    rollbacks: int = 0
    monitor_every: int | None = None


@dataclass
class BestWeights:
    """Those of the best test, kept until the next checkpoint writes them."""

    state: dict[str, Tensor]
    accuracy: float | None
    update: int
    note: str


@dataclass
class Sums:
    """Of the updates since the last line of the log, on the device."""

    values: Tensor
    images: int = 0
    since: float = field(default_factory=time.monotonic)


class Loop:
    """One run on this process. :meth:`run` does it; the rest are its steps.

    Args:
        recipe: resolved.
        task: its module is on the device.
        module: the task's module, replicated or sharded.
        train, test: batches.
        accelerator: of this process.
        reporter: told everything.
        store: of checkpoints.
        exporter: writes weights for people, as ``exporter(name, BestWeights)``.
        monitor_images: for the monitor; None for no monitor.
    """

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        module: nn.Module,
        train: TrainBatches,
        test: EvalBatches,
        accelerator: Accelerator,
        store: Store,
        exporter: Any,
        monitor_images: Tensor | None,
    ) -> None:
        self.recipe, self.task, self.module = recipe, task, module
        self.train, self.test = train, test
        self.accelerator, self.store, self.exporter = accelerator, store, exporter
        self.device: torch.device = accelerator.device
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.forward = compiled(module, recipe, self.device)
        self.parameters = [parameter for parameter in task.module.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(task.module, recipe)
        self.schedule = make_schedule(self.optimizer, recipe, train.updates_per_epoch)
        self.updates = recipe.epochs * train.updates_per_epoch
        self.eps = EpsSchedule(task.trunk, recipe, self.updates)
        self.ema = None if recipe.ema is None else ModelEmaV3(task.module, decay=recipe.ema, use_warmup=True)
        waits = self.device.type == "cpu" or not takes_flag(self.optimizer) or self.ema is not None
        self.guard = Guard(
            task.module,
            self.optimizer,
            self.device,
            goes_on=recipe.on_nonfinite == "skip",
            on_host=waits or (several() and recipe.parallel == "fsdp2"),
        )
        self.progress = Progress()
        self.best: BestWeights | None = None
        self.monitor: PacedMonitor | None = None
        if monitor_images is not None:
            watched = Monitor(task.watched(), monitor_images, blocks=self._trunk_blocks())
            self.monitor = PacedMonitor(watched, recipe.monitor_every)
        self._saved_at = time.monotonic()
        self._left_out = 0

    def resume(self, checkpoint: Checkpoint | None, found: bool) -> None:
        """Go on from a checkpoint, which the first process has; ``found`` is the same on all."""
        if not found:
            return
        state = restore(self.module, self.optimizer, checkpoint)
        if self.ema is not None:
            restore_weights(self.ema.module, checkpoint, "ema")
        self.progress = Progress(**state["progress"])
        self.train.reorder(self.progress.rollbacks)
        self.guard.reset()
        self.best = None
        if self.monitor is not None:
            self.monitor.every = self.progress.monitor_every

    def run(self, reporter: Reporter, stop: StopRequest) -> Status:
        """All updates that are left."""
        self.reporter = reporter
        if self.recipe.on_nonfinite == "rollback" and self.progress.update == 0:
            self.save()
        while True:
            status = self._run_through(stop)
            if status != "rollback":
                return status

    def _run_through(self, stop: StopRequest) -> Status | Literal["rollback"]:
        batches = self.train.iterate(self.progress.update, self.updates)
        sums = Sums(torch.zeros(3, dtype=torch.float64, device=self.device))
        self.task.train_mode()
        if self.progress.update == 0:
            self._measure()
        try:
            for update, passes in batches:
                norm = self.update(update, passes, sums)
                done = self.progress.update = update + 1
                self.reporter.advance(done)
                is_epoch = done % self.train.updates_per_epoch == 0
                if done % self.recipe.log_every == 0 or done == self.updates:
                    self._log(sums, norm)
                    sums = Sums(torch.zeros(3, dtype=torch.float64, device=self.device))
                saves = self._saves(done, is_epoch)
                looks = self.guard.on_host or done % LOOK_EVERY == 0
                if (looks or is_epoch or saves) and (status := self._look(stop, update)) is not None:
                    return status
                if self.monitor is not None and self.monitor.is_due(done) and done < self.updates:
                    self._measure()
                if is_epoch:
                    self._end_epoch(done // self.train.updates_per_epoch)
                if saves and done < self.updates:
                    self.save()
        finally:
            batches.close()  # type: ignore[attr-defined]
        self._measure(at_end=True)
        self.save()
        return "finished"

    def update(self, update: int, passes: list[Batch], sums: Sums) -> Tensor:
        """One update; returns the norm of its gradient."""
        seed_update(self.recipe.seed, update, self.rank)
        self.schedule.step_update(update)
        self.eps.set(update)
        self.guard.begin()
        loss_total = torch.zeros((), device=self.device)
        for number, batch in enumerate(passes):
            with accumulating(self.module, number == len(passes) - 1):
                loss, correct = self._forward(self.forward, update, number, batch)
                torch.autograd.backward(loss / len(passes))
            loss_total = loss_total + loss.detach() / len(passes)
            if correct is not None:
                sums.values[1] += correct
            sums.images += len(batch.images)
        norm = gradient_norm(self.parameters, self.recipe.clip_grad)
        self.guard.step(update, loss_total, norm)
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None and not self.guard.left_out_last:
            self.ema.update(self.task.module, step=update)
        sums.values[0] += loss_total
        sums.values[2] += 1
        return norm

    def _forward(self, forward: Any, update: int, number: int, batch: Batch) -> tuple[Tensor, Tensor | None]:
        with self.accelerator.autocast():
            output = forward(*self.task.inputs(batch, update, number))
        return self.task.loss(output, batch)

    def _log(self, sums: Sums, norm: Tensor) -> None:
        loss, correct, updates = total(sums.values.clone()).tolist()
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        images = sums.images * self.world
        has_classes = self.recipe.task != "mae"
        self.reporter.train(
            self.progress.update,
            loss=loss / updates,
            accuracy=correct / images if has_classes else None,
            lr=self.optimizer.param_groups[0]["lr"],
            grad_norm=float(whole),
            images=images,
        )

    def _look(self, stop: StopRequest, update: int) -> Status | Literal["rollback"] | None:
        """What the guard and the operating system have to say, the same on all processes."""
        left_out, first_bad = self.guard.read()
        if left_out > self._left_out and self.recipe.on_nonfinite == "skip":
            self.reporter.event("nonfinite", update=update, left_out=left_out)
            self.reporter.warn(
                f"{left_out - self._left_out} updates up to {update} were not finite and were left out."
            )
            self._left_out = left_out
        elif first_bad is not None and self.recipe.on_nonfinite != "skip":
            return self._nonfinite(first_bad)
        wanted = torch.tensor(0 if stop.requested is None else int(stop.requested), device=self.device)
        if several() and (self.guard.on_host or update % LOOK_EVERY == LOOK_EVERY - 1):
            wanted = largest(wanted)
        elif several():
            return None
        if number := int(wanted):
            self.save()
            self.reporter.event("terminated", signal=number)
            self.reporter.say(
                f"stopped by signal {number} after update {self.progress.update} of {self.updates}; "
                "all is saved, the same command goes on."
            )
            return "terminated"
        return None

    def _nonfinite(self, update: int) -> Status | Literal["rollback"]:
        """The weights are still those before ``update``."""
        self.progress.update = update
        self.optimizer.zero_grad(set_to_none=True)
        seed_update(self.recipe.seed, update, self.rank)
        self.eps.set(update)
        measured = self._numbers()
        self.task.train_mode()
        self.guard.begin()
        tries = f"-{self.progress.rollbacks}" if self.progress.rollbacks else ""
        folder = self.store.folder.parent / f"nonfinite-{update:08d}{tries}"
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier start, at the same update
        wait_for_all()
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
        self.reporter.warn(f"{sentence} The batch, norms and kappa are in {folder}.")
        wait_for_all()
        if self.recipe.on_nonfinite == "rollback" and self.progress.rollbacks < MOST_ROLLBACKS:
            self._roll_back()
            return "rollback"
        self.guard.reset()
        self.save()
        self.reporter.say(
            f"stopped before update {update}; a checkpoint has the weights before it. "
            "on_nonfinite=skip or rollback goes on by itself."
        )
        return "nonfinite"

    def _roll_back(self) -> None:
        rollbacks = self.progress.rollbacks + 1
        checkpoint = self.store.newest() if self.rank == 0 else None
        found = from_first(lambda: checkpoint is not None, self.device)
        if not found:
            raise RuntimeError(
                f"no whole checkpoint in {self.store.folder} to roll back to: "
                f"{' '.join(self.store.passed_over) or 'there is none'}"
            )
        self.resume(checkpoint, found)
        self.progress.rollbacks = rollbacks
        self.train.reorder(rollbacks)
        self.reporter.event("rollback", update=self.progress.update, rollbacks=rollbacks)
        self.reporter.say(
            f"rolled back to update {self.progress.update}, with another order of the images "
            f"({rollbacks} of at most {MOST_ROLLBACKS})."
        )

    def _measure(self, at_end: bool = False) -> None:
        if self.monitor is None or not (at_end or self.monitor.is_due(self.progress.update)):
            return
        numbers = self.monitor.measure(self.progress.update)
        self.progress.monitor_every = from_first(lambda: self.monitor_every(), self.device)
        self.monitor.every = self.progress.monitor_every
        self.reporter.measured(self.progress.update, numbers)

    def monitor_every(self) -> int | None:
        return None if self.monitor is None else self.monitor.every

    def _numbers(self) -> dict[str, float]:
        return {} if self.monitor is None else self.monitor.monitor.measure()

    def _end_epoch(self, epoch: int) -> None:
        if epoch % self.recipe.eval_every and epoch != self.recipe.epochs:
            return
        tested = self._test(self.forward, self.task.module)
        averaged = None if self.ema is None else self._test(self.ema.module, self.ema.module)
        self.task.train_mode()
        is_average = averaged is not None and _score(averaged) > _score(tested)
        chosen = averaged if averaged is not None and is_average else tested
        is_best = self.progress.best is None or _score(chosen) > self.progress.best
        if is_best:
            self.progress.best, self.progress.best_update = _score(chosen), self.progress.update
            self.best = self._weights(chosen, is_average)
        self.reporter.tested(
            self.progress.update,
            epoch=epoch,
            loss=tested.loss,
            accuracy=tested.accuracy,
            ema_accuracy=None if averaged is None else averaged.accuracy,
            best=is_best,
        )

    def _test(self, forward: Any, module: nn.Module) -> Tested:
        with self.accelerator.autocast():
            return evaluate(
                forward, module, self.task, self.test, self.device, rank=self.rank, world=self.world
            )

    def _weights(self, tested: Tested | None, is_average: bool) -> BestWeights:
        source = self.ema.module if self.ema is not None and is_average else self.module
        note = "The weights are an exponential moving average." if is_average else ""
        accuracy = None if tested is None else tested.accuracy
        state = self.task.export_state(gather_weights(source))
        return BestWeights(state, accuracy, self.progress.update, note)

    def _saves(self, done: int, is_epoch: bool) -> bool:
        if self.recipe.checkpoint_every is not None:
            return done % self.recipe.checkpoint_every == 0
        if not is_epoch:
            return False
        return from_first(lambda: time.monotonic() - self._saved_at > LEAST_SECONDS, self.device)

    def save(self) -> None:
        """A checkpoint, after the best weights so far: a resumed run never finds these too old."""
        if self.best is not None:
            if self.rank == 0:
                self.exporter("best", self.best)
            self.best = None
        files, state = gather(self.module, self.optimizer)
        if self.ema is not None:
            files["ema"] = gather_weights(self.ema.module)
        if self.rank == 0:
            path = self.store.save(self.progress.update, files, {**state, "progress": vars(self.progress)})
            self.reporter.event("checkpoint", path=str(Path(path.parent.name) / path.name))
        wait_for_all()
        self._saved_at = time.monotonic()

    def last_weights(self, tested: Tested | None) -> BestWeights:
        return self._weights(tested, False)

    def _trunk_blocks(self) -> Any:
        """In a masked autoencoder the monitor looks at the encoder's blocks, not at the decoder's."""
        from wellposed import anatomy

        return slice(0, len(anatomy.blocks(self.task.trunk))) if self.recipe.task == "mae" else None


def _score(tested: Tested) -> float:
    """More is better."""
    return -tested.loss if tested.accuracy is None else tested.accuracy
