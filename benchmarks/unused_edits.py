"""What an opened seam costs while every skip is kept and nothing is inserted.

Times a model and its seamed copy in turns, in one process, and reports the ratio of each pair:

    python benchmarks/unused_edits.py --out results/unused-edits.csv
"""

import argparse
import copy
import csv
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch import nn

from wellposed.anatomy import blocks
from wellposed.anatomy.seam import open_seam


def seamed(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for block in blocks(model):
        open_seam(block.module, block.row)
    return model


def stepper(model: nn.Module, x: torch.Tensor, mode: str, repeats: int) -> Callable[[], float]:
    """A function that runs the model ``repeats`` times and returns the seconds."""
    compiled = torch.compile(model, fullgraph=True) if "compiled" in mode else model
    autocast = torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda)

    def once() -> None:
        if "train" in mode:
            with autocast:
                loss = compiled(x).float().square().mean()
            loss.backward()
        else:
            with torch.inference_mode(), autocast:
                compiled(x)

    def timed() -> float:
        synchronize(x)
        start = time.perf_counter()
        for _ in range(repeats):
            once()
        synchronize(x)
        return time.perf_counter() - start

    for _ in range(3):
        once()
    return timed


def synchronize(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def compare(plain: Callable[[], float], other: Callable[[], float], rounds: int) -> list[float]:
    """Ratio other / plain of each round; who goes first changes from round to round."""
    ratios = []
    for index in range(rounds):
        if index % 2:
            b, a = other(), plain()
        else:
            a, b = plain(), other()
        ratios.append(b / a)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = (
        [
            ("vit_base_patch16_224", "train compiled", 256, 1),
            ("vit_base_patch16_224", "train eager", 256, 1),
            ("vit_base_patch16_224", "forward eager", 64, 4),
            ("vit_tiny_patch16_224", "forward eager", 1, 20),
        ]
        if device == "cuda"
        else [
            ("vit_tiny_patch16_224", "forward eager", 1, 5),
            ("vit_tiny_patch16_224", "forward eager", 8, 1),
            ("vit_tiny_patch16_224", "train eager", 8, 1),
        ]
    )
    environment = f"{torch.cuda.get_device_name() if device == 'cuda' else platform.machine() + ' CPU'}, "
    environment += f"torch {torch.__version__}, timm {timm.__version__}"
    rows = []
    for name, mode, batch, repeats in settings:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = timm.create_model(name).to(device)
        x = torch.randn(batch, 3, 224, 224, device=device)
        steps = [stepper(each, x, mode, repeats) for each in (model, model, seamed(model))]
        # The model against itself shows what the measurement can tell.
        for against, other in (("itself", steps[1]), ("seamed", steps[2])):
            ratios = compare(steps[0], other, arguments.rounds)
            low, middle, high = statistics.quantiles(ratios, n=4)
            rows.append([name, mode, batch, against, f"{middle:.4f}", f"{low:.4f}", f"{high:.4f}"])
            print(*rows[-1], sep="  ", flush=True)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("w", newline="") as file:
            file.write(f"# {environment}; {arguments.rounds} rounds, alternating\n")
            writer = csv.writer(file)
            writer.writerow(["model", "mode", "batch", "against", "ratio median", "quartile 1", "quartile 3"])
            writer.writerows(rows)


if __name__ == "__main__":
    main()
