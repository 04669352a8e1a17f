"""The picture of the README: spectra under graying, and kappa block by block with and without skips.

    python benchmarks/picture.py --out results/kappa-digits

Trains a small ViT on the embedded digits three times (all skips, none around the FFN, none around
attention), draws the picture and writes the numbers beside it.
"""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from digit_training import PROBE_IMAGES, train
from torch import Tensor, nn

import wellposed as wp
from wellposed.digits import Digits, build_model, load_digits
from wellposed.records import Record

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EPS = (1.0, 0.9, 0.7, 0.5)
VARIANTS: dict[str, Callable[[nn.Module], object]] = {
    "as it is": lambda model: None,
    "no FFN skips": lambda model: wp.remove_skips(model, "ffn"),
    "no attention skips": lambda model: wp.remove_skips(model, "attention"),
}


def spectra(images: Tensor) -> dict[float, Tensor]:
    """Mean singular values of the first block's tokens, relative to the largest, over eps."""
    model = build_model(0).eval()
    caught: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda block, args: caught.append(args[0]))
    with torch.inference_mode():
        model(images)
    tokens = caught[0].double()
    values = {}
    for eps in EPS:
        s = torch.linalg.svdvals(wp.nn.functional.gray(tokens, eps, "svd"))
        values[eps] = (s / s[..., :1]).log().mean(0).exp()
    return values


def kappa_by_block(name: str, data: Digits, epochs: int) -> dict[str, list[Record]]:
    """Median kappa of the attention and FFN branch of each block after training."""
    model = build_model(0)
    VARIANTS[name](model)
    for _ in train(model, data, epochs, seed=0):
        pass
    diagnosis = wp.diagnose(model, data.test_x[:PROBE_IMAGES], what="conditioning")
    return {role: diagnosis.select("kappa", position=f"{role}.branch") for role in ("attention", "ffn")}


def draw(by_eps: dict[float, Tensor], by_block: dict[str, dict[str, list[Record]]], path: Path) -> None:
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for eps, s in by_eps.items():
        left.semilogy(range(1, len(s) + 1), s, label=f"eps {eps:g}, kappa {s[0] / s[-1]:,.0f}")
    left.set(
        title="Token Graying flattens the spectrum", xlabel="singular value", ylabel="relative to the largest"
    )
    left.legend(frameon=False)
    colours = ("tab:blue", "tab:green", "tab:red")
    for colour, (name, kappas) in zip(colours, by_block.items(), strict=True):
        for role, style in (("attention", "-o"), ("ffn", "--s")):
            label = f"{name}: {'attention' if role == 'attention' else 'FFN'}"
            values = [record.value for record in kappas[role]]
            right.semilogy(values, style, color=colour, label=label, markersize=4)
            bounds = [record.block for record in kappas[role] if record.status == "at least"]
            right.semilogy(bounds, [values[block] for block in bounds], "^", color=colour, markersize=9)
    right.set(title="What a branch adds, without its skip", xlabel="block", ylabel="condition number")
    right.annotate("triangles: at least", (0.02, 0.95), xycoords="axes fraction", color="grey", fontsize=8)
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path.with_suffix(".png"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/kappa-digits"))
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    data = load_digits(0)
    by_eps = spectra(data.test_x[:PROBE_IMAGES])
    by_block = {name: kappa_by_block(name, data, arguments.epochs) for name in VARIANTS}
    draw(by_eps, by_block, arguments.out)
    with arguments.out.with_suffix(".csv").open("w", newline="") as file:
        file.write(
            f"# torch {torch.__version__}, CPU, {arguments.epochs} epochs, seed 0, one run; median over "
            f"{PROBE_IMAGES} test images, float64 SVD of float32 tokens\n"
        )
        writer = csv.writer(file)
        writer.writerow(["model", "branch", "block", "kappa", "status"])
        for name, kappas in by_block.items():
            for role, records in kappas.items():
                writer.writerows([name, role, r.block, f"{r.value:.4g}", r.status] for r in records)


if __name__ == "__main__":
    main()
