"""How soon a run trains, and how fast then: compiled as a whole, and block by block.

    python benchmarks/time_to_start.py --data packed:cifar10.npz [--batch-size 256] [--out FILE.csv]

ViT-Tiny with patches of 4 on 32-pixel images, each run in a process of its own, in turns. "cold" has an empty
cache of torch's compiler; "warm" finds what the run before it compiled.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from side_by_side import trained
from timing import write

from wellposed.train.recipe import Recipe
from wellposed.train.recipe_file import write_recipe

FIRST = 10
"""Updates after which a run counts as started: by then all is compiled and recorded."""
TITLES = ["compiled", "cache", "round", "seconds to update 10", "ms an update", "model", "batch_size"]


def measure(recipe: Recipe, cache: Path, folder: Path) -> tuple[float, float]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as name:
        for number, what, state in itertools.product(
            range(options.rounds), ("whole", "blocks"), ("cold", "warm")
        ):
            recipe = Recipe(
                data=options.data,
                model=options.model,
                model_options={"class_token": False, "global_pool": "avg"},
                image_size=32,
                patch_size=4,
                batch_size=options.batch_size,
                epochs=options.epochs,
                eval_every=options.epochs,
                precision="bf16",
                compile=True,
                compile_blocks=what == "blocks",
                monitor_every=0,
                log_every=FIRST,
                trackers=(),
            )
            cache, folder = Path(name) / f"cache-{what}-{number}", Path(name) / f"{what}-{state}-{number}"
            ready, step = measure(recipe, cache, folder)
            row = [what, state, number, round(ready, 1), round(1e3 * step, 2)]
            rows.append([*row, options.model, options.batch_size])
            print(dict(zip(TITLES, rows[-1], strict=True)), flush=True)
    if options.out is not None:
        write(options.out, "a run is ready when its tenth update is done", TITLES, rows)


if __name__ == "__main__":
    main()
