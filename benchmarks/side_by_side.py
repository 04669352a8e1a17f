"""Throughput of several runs beside each other on one GPU, over that of one run alone.

    python benchmarks/side_by_side.py --data packed:cifar10.npz [--batch-size 128] [--jobs 6] [--out FILE.csv]

Trains ViT-Tiny with patches of 4 on 32-pixel images, once alone and then as many times as ``--jobs`` says at
once, by ``wellposed sweep``. Images per second are counted while all of them train: from the moment the last
one has started until the first one ends.
"""

import argparse
import csv
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from wellposed.train.log import read_run
from wellposed.train.recipe import Recipe
from wellposed.train.recipe_file import write_recipe
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    recipe = Recipe(
        data=options.data,
        model=options.model,
        image_size=32,
        patch_size=4,
        batch_size=options.batch_size,
        epochs=options.epochs,
        precision="bf16",
        trackers=(),
        monitor_every=0,
        log_every=10,
        eval_every=options.epochs,
    )
    alone, together = measure(recipe, 1), measure(recipe, options.jobs)
    row: dict[str, Any] = {
        "model": options.model,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "batch_size": options.batch_size,
        "runs": options.jobs,
        "alone_images_per_second": round(alone),
        "together_images_per_second": round(together),
        "ratio": round(together / alone, 3),
    }
    print(row)
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, row, lineterminator="\n")
            writer.writeheader()
            writer.writerow(row)


if __name__ == "__main__":
    main()
