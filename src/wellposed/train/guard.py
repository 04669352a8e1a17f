"""A loss or gradient that is not finite never reaches the weights, on any process.

On a GPU waiting for each update's numbers would leave it idle. There the check stays on the device: torch's
fused optimizers take a flag and leave the weights alone where it is set. The flag stays set, so the weights
are still those before the first bad update when the host reads it, some updates later.

What was going on when a loss or a gradient stopped being finite.

The weights are still those before the bad update and its batch can be made again, so the pass is run once
more, watched: which module's output was the first that is not finite, the norm of every module's output, of
every parameter and of its gradient, and kappa and density of the model.

Which kernels of attention a training run may use.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from wellposed.files import write_json
from wellposed.probes.nonfinite import is_finite, norm_of, watching_norms
from wellposed.probes.observe import eagerly
from wellposed.records import AT_LEAST, named_text
from wellposed.text import aligned
from wellposed.train import durable
from wellposed.train.batches import Batch
from wellposed.train.distributed import largest, read


class Guard:
    """Makes the optimizer's steps, except bad ones.

    Args:
        module: whose running statistics a bad batch must not reach either.
        optimizer: of its parameters.
        device: where the loss is.
        goes_on: a bad update is left out and training goes on, else all later ones are left out too.
        on_host: read the flag at every update.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, device: torch.device, *, goes_on: bool, on_host: bool
    ) -> None:
        self.optimizer, self.goes_on, self.on_host = optimizer, goes_on, on_host
        self.statistics = [
            buffer
            for part in module.modules()
            if isinstance(part, _BatchNorm)
            for buffer in (part.running_mean, part.running_var, part.num_batches_tracked)
            if buffer is not None
        ]
        self._before: list[Tensor] = []
        self.left_out_last = False
        """Whether the last update was left out; known on the host only with ``on_host``."""
        # bad now or before, updates left out, the first bad one
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
        self._flag.copy_(is_bad if self.goes_on else torch.maximum(self._flag, is_bad))
        first = torch.where((is_bad > 0) & (self._state[2] < 0), float(update), self._state[2])
        flag = self._flag.double()
        self._state.copy_(torch.stack([torch.maximum(self._state[0], flag), self._state[1] + flag, first]))
        self.left_out_last = self.on_host and bool(self._flag)
        if not self.left_out_last:
            self.optimizer.step()
        for buffer, before in zip(self.statistics, self._before, strict=True):
            buffer.copy_(torch.where(self._flag > 0, before, buffer))

    def put_back(self) -> None:
        """The running statistics as they were at :meth:`begin`."""
        for buffer, before in zip(self.statistics, self._before, strict=True):
            buffer.copy_(before)

    def read(self) -> tuple[int, int | None]:
        """How many updates were left out so far, and the first of them; waits for the device."""
        bad, left_out, first = read(self._state)
        return int(left_out), int(first) if bad else None

    def reset(self) -> None:
        """Forget what was; after a rollback."""
        self._flag.zero_()
        self._state.copy_(torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64))


def takes_flag(optimizer: Optimizer) -> bool:
    """Whether an optimizer leaves out steps on the device."""
    return all(group.get("fused") for group in optimizer.param_groups)


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

    Args:
        folder: for the files: report.json and report.txt of the first process, every process's batch.
        update: the bad one.
        passes: its batches.
        run_pass: makes one forward pass, eagerly, and returns the loss; gradients are cleared by the caller.
        module: what is trained.
        measured: of the monitor, at the weights before the update.
        rank: of this process.
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
    durable.write_tensors(
        folder / f"batch-{rank}.safetensors",
        {
            f"{name}_{number}": getattr(batch, name).cpu()
            for number, batch in enumerate(passes)
            for name in ("images", "labels")
        },
    )
    if rank == 0:
        write_json(folder / "report.json", report)
        durable.write_bytes(folder / "report.txt", _text(report).encode())
    return _sentence(report)


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


def _text(report: dict[str, Any]) -> str:
    outputs = [
        ("output of", "norm"),
        *((name, f"{norm:.4g}") for name, norm in report["output_norms"].items()),
    ]
    parameters = [
        ("parameter", "norm", "gradient"),
        *(
            (name, f"{norms['weight']:.4g}", "-" if norms["gradient"] is None else f"{norms['gradient']:.4g}")
            for name, norms in report["parameters"].items()
        ),
    ]
    numbers = report["measured"]
    measured = [
        ("measured", "value"),
        *((key, named_text(numbers, key)) for key in numbers if not key.endswith(AT_LEAST)),
    ]
    sections = [_sentence(report), aligned(outputs), aligned(parameters), aligned(measured)]
    return "\n\n".join(sections) + "\n"


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Leave attention to torch's other kernels, and the caller's choice as it was.

    On Hopper GPUs torch prefers cuDNN's, whose backward pass can return NaN for finite inputs, where all
    scores of a query are far below zero (pytorch/pytorch issue 196678). An ablation that drives scores there
    would be blamed for it.
    """
    was_enabled = bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)
