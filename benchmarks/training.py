"""Trainings on one GPU: several at once, how soon one trains, and its gradients under each attention kernel.

python -m benchmarks side-by-side --data packed:cifar10.npz [--batch-size 128] [--jobs 6] [--out FILE.csv]
python -m benchmarks time-to-start --data packed:cifar10.npz [--batch-size 256] [--out FILE.csv]
python -m benchmarks attention-kernels RUN... [--weights last] [--batches 20] [--out FILE.csv]
"""

import csv
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from benchmarks.timing import write
from wellposed.run_records import read_run
from wellposed.train.recipe import Recipe, write_recipe
from wellposed.train.runs import TrainedRun, open_run
from wellposed.train.sweep import run as sweep


def trained(folder: Path) -> list[tuple[float, int]]:
    """(time, images since the line before) of a run's log."""
    return [
        (datetime.fromisoformat(line["time"]).timestamp(), line["images"])
        for line in read_run(folder)
        if line["event"] == "train"
    ]


def throughput(folders: list[Path]) -> float:
    """Images per second of all runs together, while all of them train."""
    logs = [trained(folder) for folder in folders]
    # The first line of a run has the time of compiling in it.
    start, end = max(log[0][0] for log in logs), min(log[-1][0] for log in logs)
    if end <= start:
        raise RuntimeError("the runs did not train at the same time; use more epochs.")
    return sum(images for log in logs for at, images in log if start < at <= end) / (end - start)


def measure(recipe: Recipe, jobs: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_recipe(recipe, folder / "run.toml")
        outcome = sweep([folder / "run.toml"], out=folder / "out", jobs=jobs, seeds=range(jobs))
        if outcome.exit_code:
            raise RuntimeError(f"the sweep of {jobs} runs ended with exit code {outcome.exit_code}.")
        return throughput([path.parent for path in sorted((folder / "out").glob("*/run.jsonl"))])


def side_by_side(
    data: Annotated[str, typer.Option()],
    model: str = "vit_tiny_patch16_224",
    batch_size: int = 128,
    epochs: int = 4,
    jobs: int = 6,
    out: Path | None = None,
) -> None:
    """Throughput of several runs at once on one GPU, over that of one run alone.

    Trains ViT-Tiny with patches of 4 on 32-pixel images, once alone and then as many times as ``--jobs``
    says at once, by ``wellposed sweep``. Images per second are counted while all of them train: from the
    moment the last one has started until the first one ends.
    """
    recipe = Recipe(
        data=data,
        model=model,
        image_size=32,
        patch_size=4,
        batch_size=batch_size,
        epochs=epochs,
        precision="bf16",
        trackers=(),
        monitor_every=0,
        log_every=10,
        eval_every=epochs,
    )
    alone, together = measure(recipe, 1), measure(recipe, jobs)
    row: dict[str, Any] = {
        "model": model,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "batch_size": batch_size,
        "runs": jobs,
        "alone_images_per_second": round(alone),
        "together_images_per_second": round(together),
        "ratio": round(together / alone, 3),
    }
    print(row)
    if out is not None:
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, row, lineterminator="\n")
            writer.writeheader()
            writer.writerow(row)


FIRST = 10
"""Updates after which a run counts as started: by then all is compiled and recorded."""
TITLES = ["compiled", "cache", "round", "seconds to update 10", "ms an update", "model", "batch_size"]


def time_of_run(recipe: Recipe, cache: Path, folder: Path) -> tuple[float, float]:
    """Seconds from the start of the process to its tenth update, and those of an update after that."""
    write_recipe(recipe, folder.with_suffix(".toml"))
    command = [sys.executable, "-m", "wellposed", "train", str(folder.with_suffix(".toml"))]
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    before = time.time()
    subprocess.run([*command, "--out", str(folder)], check=True, capture_output=True, env=os.environ | caches)
    log = trained(folder)
    steps = [
        (after - at) * recipe.batch_size / images for (at, _), (after, images) in itertools.pairwise(log)
    ]
    return log[0][0] - before, statistics.median(steps)


def time_to_start(
    data: Annotated[str, typer.Option()],
    model: str = "vit_tiny_patch16_224",
    batch_size: int = 256,
    epochs: int = 2,
    rounds: int = 2,
    out: Path | None = None,
) -> None:
    """How soon a run trains, and how fast then: compiled as a whole, and block by block.

    ViT-Tiny with patches of 4 on 32-pixel images, each run in a process of its own, in turns. "cold" has an
    empty cache of torch's compiler; "warm" finds what the run before it compiled.
    """
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as name:
        for number, what, state in itertools.product(range(rounds), ("whole", "blocks"), ("cold", "warm")):
            recipe = Recipe(
                data=data,
                model=model,
                model_options={"class_token": False, "global_pool": "avg"},
                image_size=32,
                patch_size=4,
                batch_size=batch_size,
                epochs=epochs,
                eval_every=epochs,
                precision="bf16",
                compile=True,
                compile_blocks=what == "blocks",
                monitor_every=0,
                log_every=FIRST,
                trackers=(),
            )
            cache, folder = Path(name) / f"cache-{what}-{number}", Path(name) / f"{what}-{state}-{number}"
            ready, step = time_of_run(recipe, cache, folder)
            row = [what, state, number, round(ready, 1), round(1e3 * step, 2)]
            rows.append([*row, model, batch_size])
            print(dict(zip(TITLES, rows[-1], strict=True)), flush=True)
    if out is not None:
        write(out, "a run is ready when its tenth update is done", TITLES, rows)


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
            "removed skips": ", ".join(c["which"] for c in run.recipe.edits if c["edit"] == "remove_skips")
            or "none",
            "kernel": name,
            "batches": len(found),
            "not finite": len(found) - len(pairs),
            "error": f"{statistics.median(errors):.3g}" if errors else "",
            "status": status,
        }


def attention_kernels(
    runs: Annotated[list[Path], typer.Argument()],
    weights: Literal["initial", "last", "best"] = "last",
    batches: int = 20,
    batch_size: int = 256,
    out: Annotated[Path | None, typer.Option(help="CSV file to write")] = None,
) -> None:
    """Gradients of trained runs under each kernel of attention that torch has: are they finite, and right?

    The same weights and test images, in bf16 as in training, go through each kernel. The reference is the
    plain formula in float32; ``error`` is the relative error of the whole gradient, the median over the
    batches with a finite one.
    """
    table = [
        row for folder in runs for row in rows(open_run(folder, batches * batch_size), weights, batch_size)
    ]
    for row in table:
        print("  ".join(f"{name}: {value}" for name, value in row.items()), flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)
