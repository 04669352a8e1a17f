"""What was going on when a loss or a gradient stopped being finite.

The weights are still those before the bad update and its batch can be made again, so the pass is run once
more, watched: which module's output was the first that is not finite, the norm of every module's output, of
every parameter and of its gradient, and kappa and density of the model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.files import write_json
from wellposed.probes.nonfinite import is_finite, norm_of, watching_norms
from wellposed.probes.observe import eagerly
from wellposed.records import AT_LEAST, named_text
from wellposed.text import aligned
from wellposed.train import checkpoint
from wellposed.train.batches import Batch


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
    checkpoint.write_tensors(
        folder / f"batch-{rank}.safetensors",
        {
            f"{name}_{number}": getattr(batch, name).cpu()
            for number, batch in enumerate(passes)
            for name in ("images", "labels")
        },
    )
    if rank == 0:
        write_json(folder / "report.json", report)
        checkpoint.write_bytes(folder / "report.txt", _text(report).encode())
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
