"""How soon a run trains, and how fast then: compiled as a whole, and block by block.

    python benchmarks/time_to_start.py --data packed:cifar10.npz [--batch-size 256] [--out FILE.csv]

ViT-Tiny with patches of 4 on 32-pixel images, each run in a process of its own, in turns. "cold" has an empty
cache of torch's compiler; "warm" finds what the run before it compiled.
"""

import argparse
import csv
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from wellposed.train.report import read_run

FIRST = 10
"""Updates after which a run counts as started: by then all is compiled and recorded."""


def measure(options: argparse.Namespace, flags: list[str], cache: Path, folder: Path) -> tuple[float, float]:
    """Seconds from the start of the process to its tenth update, and an update's seconds after that."""
    command = [sys.executable, "-m", "wellposed", "train", "--data", options.data, "--out", str(folder)]
    command += ["--model", options.model, "--image-size", "32", "--patch-size", "4", "--compile", *flags]
    command += ["--model-option", "class_token=false", "--model-option", "global_pool=avg"]
    command += [
        "--batch-size",
        str(options.batch_size),
        "--epochs",
        str(options.epochs),
        "--precision",
        "bf16",
    ]
    command += ["--log-every", str(FIRST), "--monitor-every", "0", "--eval-every", str(options.epochs)]
    before = time.time()
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    subprocess.run(command, check=True, capture_output=True, env=os.environ | caches)
    times = [
        datetime.fromisoformat(line["time"]).timestamp()
        for line in read_run(folder)
        if line["event"] == "train"
    ]
    steps = [(after - at) / FIRST for at, after in itertools.pairwise(times)]
    return times[0] - before, statistics.median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            for what, flags in (("whole", []), ("blocks", ["--compile-blocks"])):
                for state in ("cold", "warm"):
                    folder = Path(name) / f"{what}-{state}-{number}"
                    ready, step = measure(options, flags, Path(name) / f"cache-{what}-{number}", folder)
                    rows.append(
                        {
                            "compiled": what,
                            "cache": state,
                            "round": number,
                            "seconds to update 10": round(ready, 1),
                            "ms an update": round(1e3 * step, 2),
                            "model": options.model,
                            "batch_size": options.batch_size,
                            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
                            "torch": torch.__version__,
                        }
                    )
                    print(rows[-1], flush=True)
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
