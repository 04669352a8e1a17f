"""What changes the weights: timm's optimizer and schedule, eps over training, and the guard on its steps.

A loss or gradient that is not finite never reaches the weights, on any process. On a GPU waiting for each
update's numbers would leave it idle. There the check stays on the device: torch's fused optimizers take a
flag and leave the weights alone where it is set. The flag stays set, so the weights are still those before
the first bad update when the host reads it, some updates later.

>>> round(eps_at(0.5, 1.0, 0.25, "linear"), 3), round(eps_at(0.5, 1.0, 0.25, "cosine"), 3)
(0.625, 0.573)
"""

import inspect
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from wellposed.files import write_json
from wellposed.nn import TokenGraying
from wellposed.probes.nonfinite import is_finite, norm_of, watching_norms
from wellposed.probes.observe import eagerly
from wellposed.text import nearest
from wellposed.train import checkpoint
from wellposed.train.batches import Batch
from wellposed.train.edits import RecipeCall
from wellposed.train.parallel import largest, read, several
from wellposed.train.recipe import Recipe

SCHEDULES = ("cosine", "tanh", "poly", "step", "multistep")
POLY_POWER = 0.9
"""The usual one. timm takes it from ``decay_rate``, whose 0.1 would keep it high to the very end."""
STEP_FACTOR = 0.1
"""Of the learning rate at each step."""


def check_optimizer(recipe: Recipe) -> None:
    """Raises if timm does not have what the recipe names."""
    for name, value, known, all_of_them in (
        ("optimizer", recipe.optimizer, list_optimizers(), "timm.optim.list_optimizers() lists them"),
        ("schedule", recipe.schedule, SCHEDULES, f"they are {', '.join(SCHEDULES)}"),
    ):
        if value not in known:
            hint = nearest(value, known, 0.4)
            raise ValueError(f"{name} must be one of timm's ({all_of_them}), got {value!r}{hint}")
    if recipe.layer_decay is not None and recipe.task != "classify":
        raise ValueError(
            f"layer_decay is for fine-tuning a classifier, got task={recipe.task}; leave it out."
        )


def make_optimizer(module: nn.Module, recipe: Recipe) -> Optimizer:
    """For the parameters that require gradients; no weight decay for biases and norms."""
    sharded = several() and recipe.parallel == "fsdp2"
    kind: Any = get_optimizer_class(recipe.optimizer, bind_defaults=False)
    is_fused = "fused" in inspect.signature(kind).parameters and not sharded
    optimizer: Optimizer = create_optimizer_v2(
        module,
        opt=recipe.optimizer,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        layer_decay=recipe.layer_decay,
        **({"fused": True} if is_fused else {}),
    )
    return optimizer


def make_schedule(optimizer: Optimizer, recipe: Recipe, updates_per_epoch: int) -> Scheduler:
    """``schedule.step_update(update)`` sets the learning rate of an update, whatever was set before."""
    assert recipe.lr is not None
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched=recipe.schedule,
        num_epochs=recipe.epochs,
        decay_epochs=max(recipe.epochs // 3, 1),
        # Timm multiplies them with the updates of an epoch.
        decay_milestones=[recipe.epochs / 2, recipe.epochs * 3 / 4],  # type: ignore[list-item]
        decay_rate=POLY_POWER if recipe.schedule == "poly" else STEP_FACTOR,
        min_lr=recipe.min_lr,
        warmup_lr=recipe.lr / 1000,
        warmup_epochs=recipe.warmup_epochs or 0,
        warmup_prefix=False,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
    )
    if recipe.schedule in ("step", "multistep"):
        _keep_above(schedule, min(recipe.min_lr, recipe.lr))
    return schedule


def _keep_above(schedule: Any, least: float) -> None:
    """Timm's steps know no lowest learning rate; the warm-up starts below it in all schedules."""
    learning_rates = schedule._get_lr

    def kept(update: int) -> list[float]:
        values: list[float] = learning_rates(update)
        return values if update < schedule.warmup_t else [max(value, least) for value in values]

    schedule._get_lr = kept


def gradient_norm(parameters: list[nn.Parameter], limit: float | None) -> Tensor:
    """The norm of all gradients together; they are scaled down to ``limit`` if it is more."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if limit is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


class Guard:
    """Makes the optimizer's steps, except bad ones.

    Args:
        module, optimizer: a bad batch must not reach the module's running statistics either.
        device: where the loss is.
        continues: a bad update is skipped and training continues, else all later ones are skipped too.
        on_host: read the flag at every update.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, device: torch.device, *, continues: bool, on_host: bool
    ) -> None:
        self.optimizer, self.continues, self.on_host = optimizer, continues, on_host
        self.statistics = [
            buffer
            for part in module.modules()
            if isinstance(part, _BatchNorm)
            for buffer in (part.running_mean, part.running_var, part.num_batches_tracked)
            if buffer is not None
        ]
        self._before: list[Tensor] = []
        self.skipped_last = False
        """Whether the last update was skipped; known on the host only with ``on_host``."""
        # bad now or before, updates skipped, the first bad one
        self._state = torch.tensor([0.0, 0.0, -1.0], device=device, dtype=torch.float64)
        self._flag = torch.zeros((), device=device)
        if not on_host:
            optimizer.found_inf = self._flag  # type: ignore[attr-defined]

    def begin(self) -> None:
        """Before the forward pass."""
        self._before = [buffer.clone() for buffer in self.statistics]

    def step(self, update: int, loss: Tensor, norm: Tensor) -> None:
        """One step of the optimizer, if loss and gradient norm are finite on all processes."""
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        is_bad = largest((~(loss.isfinite() & whole.isfinite())).to(self._flag.dtype))
        self._flag.copy_(is_bad if self.continues else torch.maximum(self._flag, is_bad))
        first = torch.where((is_bad > 0) & (self._state[2] < 0), float(update), self._state[2])
        flag = self._flag.double()
        self._state.copy_(torch.stack([torch.maximum(self._state[0], flag), self._state[1] + flag, first]))
        self.skipped_last = self.on_host and bool(self._flag)
        if not self.skipped_last:
            self.optimizer.step()
        for buffer, before in zip(self.statistics, self._before, strict=True):
            buffer.copy_(torch.where(self._flag > 0, before, buffer))

    def put_back(self) -> None:
        """The running statistics as they were at :meth:`begin`."""
        for buffer, before in zip(self.statistics, self._before, strict=True):
            buffer.copy_(before)

    def read(self) -> tuple[int, int | None]:
        """How many updates were skipped so far, and the first of them; waits for the device."""
        bad, skipped, first = read(self._state)
        return int(skipped), int(first) if bad else None

    def reset(self) -> None:
        """Forget what was."""
        self._flag.zero_()
        self._state.copy_(torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64))


def takes_flag(optimizer: Optimizer) -> bool:
    """Whether an optimizer skips steps on the device."""
    return all(group.get("fused") for group in optimizer.param_groups)


def eps_at(start: float, end: float, done: float, schedule: str) -> float:
    """The power when the share ``done`` of training is over."""
    share = done if schedule == "linear" else (1 - math.cos(math.pi * done)) / 2
    return start + (end - start) * share


class EpsSchedule:
    """Sets the power of every graying whose edit says how it changes (``eps_end``), in some models.

    The power becomes a tensor that is written to, so that a compiled model is not compiled again. The models
    are on their device, edited by :func:`wellposed.train.edits.apply_edits`.
    """

    def __init__(self, models: Iterable[nn.Module], updates: int) -> None:
        self.updates = updates
        self.powers: list[tuple[Tensor, RecipeCall]] = []
        for model in models:
            device = next(parameter.device for parameter in model.parameters())
            for graying in model.modules():
                call: Any = getattr(graying, "recipe_call", None)
                if isinstance(graying, TokenGraying) and call is not None and call.eps_end is not None:
                    start = call.argument("eps")
                    graying.eps = torch.tensor(start, dtype=torch.float64, device=device)
                    self.powers.append((graying.eps, call))

    def set(self, update: int) -> None:
        """Set the powers of an update."""
        done = update / max(self.updates - 1, 1)
        for power, call in self.powers:
            assert call.eps_end is not None
            power.fill_(eps_at(call.argument("eps"), call.eps_end, done, call.eps_schedule))


def explain(
    folder: Path,
    *,
    update: int,
    passes: list[Batch],
    run_pass: Callable[[int, Batch], Tensor],
    module: nn.Module,
    measured: dict[str, float],
    rank: int,
) -> str:
    """Write what explains a bad update into ``folder`` and return a sentence.

    The weights are still those before the update and its batch can be made again, so the pass is run again,
    watched: which module's output was the first that is not finite, the norm of every module's output, of
    every parameter and of its gradient, and kappa and density of the model. The first process writes
    report.json, every process its batch.

    Args:
        update, passes: the bad one and its batches.
        run_pass: makes one forward pass, eagerly, and returns the loss; gradients are cleared by the caller.
        module: what is trained.
        measured: of the monitor, at the weights before the update.
    """
    outputs: dict[str, float] = {}
    losses = []
    for number, batch in enumerate(passes):
        with eagerly(), watching_norms(module) as norms:
            loss = run_pass(number, batch)
        outputs |= {
            name: norm for name, norm in norms.outputs.items() if name not in outputs or not is_finite(norm)
        }
        torch.autograd.backward(loss)
        losses.append(loss.item())
    parameters = {
        name: {"weight": norm_of(value), "gradient": None if value.grad is None else norm_of(value.grad)}
        for name, value in module.named_parameters()
    }
    images_finite = [bool(batch.images.isfinite().all()) for batch in passes]
    report = {
        "update": update,
        "loss": losses,
        "images_finite": all(images_finite),
        "first_bad_output": next((name for name, norm in outputs.items() if not is_finite(norm)), None),
        "first_bad_gradient": next(
            (name for name, norms in parameters.items() if not is_finite(norms["gradient"] or 0.0)), None
        ),
        "output_norms": outputs,
        "parameters": parameters,
        "measured": measured,
    }
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_tensors(
        folder / f"batch-{rank}.safetensors",
        {
            f"{name}_{number}": getattr(batch, name).cpu()
            for number, batch in enumerate(passes)
            for name in ("images", "labels")
        },
    )
    sentence = _sentence(report)
    if rank == 0:
        write_json(folder / "report.json", {"text": sentence, **report})
    return sentence


def _sentence(report: dict[str, Any]) -> str:
    parts = [f"loss {', '.join(f'{loss:.4g}' for loss in report['loss'])}"]
    if not report["images_finite"]:
        parts.append("the images themselves are not finite")
    if report["first_bad_output"] is not None:
        parts.append(f"the first output that is not finite is of {report['first_bad_output']}")
    elif report["first_bad_gradient"] is not None:
        parts.append(f"all outputs are finite, the gradient of {report['first_bad_gradient']} is not")
    else:
        parts.append("run again alone it was finite: another process's part of the batch was not")
    return f"update {report['update']} is not finite: {'; '.join(parts)}."
