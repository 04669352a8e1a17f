"""Gradients of a trained run under each kernel of attention that torch has: are they finite, and right?

    python benchmarks/attention_kernels.py RUN... [--weights last] [--batches 20] [--out FILE.csv]

The same weights and test images, in bf16 as in training, go through each kernel. The reference is the plain
formula in float32; ``error`` is the relative error of the whole gradient, the median over the batches with a
finite one.
"""

import argparse
import csv
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from wellposed.train.runs import TrainedRun, open_run

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def gradient(model: nn.Module, images: Tensor, labels: Tensor, precision: torch.dtype) -> Tensor:
    """Of the loss, all parameters in one vector."""
    is_half = precision != torch.float32
    with torch.autocast(images.device.type, precision, enabled=is_half):
        loss = cross_entropy(model(images), labels)
    parts = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return torch.cat([part.double().flatten() for part in parts])


def rows(run: TrainedRun, weights: str, batch_size: int) -> Iterator[dict[str, Any]]:
    model = run.model(weights)  # type: ignore[arg-type]
    labels = run.labels.to(run.device)
    batches = list(zip(torch.split(run.images, batch_size), torch.split(labels, batch_size), strict=True))
    with sdpa_kernel(SDPBackend.MATH):
        exact = [gradient(model, *batch, torch.float32) for batch in batches]
    for name, kernel in KERNELS.items():
        found: list[Tensor] = []
        status = "ok"
        with sdpa_kernel(kernel):
            try:
                found = [gradient(model, *batch, torch.bfloat16) for batch in batches]
            except RuntimeError as error:  # torch says that the kernel cannot be used here
                status = str(error).splitlines()[0][:80]
        pairs = [(got, right) for got, right in zip(found, exact, strict=False) if got.isfinite().all()]
        errors = [float((got - right).norm() / right.norm()) for got, right in pairs]
        yield {
            "run": run.folder.name,
            "removed skips": run.recipe.remove_skips or "none",
            "kernel": name,
            "batches": len(found),
            "not finite": len(found) - len(pairs),
            "error": f"{statistics.median(errors):.3g}" if errors else "",
            "status": status,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--weights", choices=("initial", "last", "best"), default="last")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--out", type=Path, help="CSV file to write")
    args = parser.parse_args()
    table = [
        row
        for folder in args.runs
        for row in rows(open_run(folder, args.batches * args.batch_size), args.weights, args.batch_size)
    ]
    for row in table:
        print("  ".join(f"{name}: {value}" for name, value in row.items()), flush=True)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
