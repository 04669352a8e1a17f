"""What an opened seam costs while every skip is kept and nothing is inserted.

Times a model and its seamed copy in turns, in one process, and reports the ratio of each pair:

    python benchmarks/unused_edits.py --out results/unused-edits.csv
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from timing import compare, quartiles, seconds, write
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

    for _ in range(3):
        once()
    return lambda: seconds(lambda: [once() for _ in range(repeats)])


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
    rows: list[list[object]] = []
    for name, mode, batch, repeats in settings:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = timm.create_model(name).to(device)
        x = torch.randn(batch, 3, 224, 224, device=device)
        steps = [stepper(each, x, mode, repeats) for each in (model, model, seamed(model))]
        # The model against itself shows what the measurement can tell.
        for against, other in (("itself", steps[1]), ("seamed", steps[2])):
            pairs = compare(steps[0], other, arguments.rounds)
            low, middle, high = quartiles([b / a for a, b in pairs])
            rows.append([name, mode, batch, against, f"{middle:.4f}", f"{low:.4f}", f"{high:.4f}"])
            print(*rows[-1], sep="  ", flush=True)
    if arguments.out:
        titles = ["model", "mode", "batch", "against", "ratio median", "quartile 1", "quartile 3"]
        write(arguments.out, f"{arguments.rounds} rounds, alternating", titles, rows)


if __name__ == "__main__":
    main()
