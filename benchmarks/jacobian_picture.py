"""Singular values of an attention Jacobian under Token Graying (Figures 7 and 8 of Always Skip Attention).

    python benchmarks/jacobian_picture.py --out results/jacobian-digits

Trains a small ViT on the embedded digits and takes the whole spectrum of the Jacobian of the first
block's attention, without its skip, at the grayed tokens of one test image: 816 x 816, dense.
"""

import argparse
import csv
from pathlib import Path

import matplotlib
import torch
from digit_training import train

from wellposed.digits import build_model, load_digits
from wellposed.probes import JacobianSpectrum, graying_sweep

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EPS = (1.0, 0.9, 0.7, 0.5)
METHODS = ("svd", "dct")


def draw(sweeps: dict[str, dict[float, JacobianSpectrum]], path: Path) -> None:
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True, sharey=True)
    for axis, (method, sweep) in zip(axes, sweeps.items(), strict=True):
        for eps, spectrum in sweep.items():
            values = spectrum.relative(10**6)
            shown = values[values > 1e-8]  # LayerNorm makes the others zero
            axis.semilogy(
                range(1, len(shown) + 1), shown, label=f"eps {eps:g}, largest {values_max(spectrum)}"
            )
        axis.set(title=f"Attention Jacobian, tokens grayed by {method.upper()}", xlabel="singular value")
        axis.set_ylim(1e-6, 1.5)
        axis.legend(frameon=False, loc="lower left")
    axes[0].set_ylabel("relative to the largest")
    figure.savefig(path.with_suffix(".png"), dpi=120)


def values_max(spectrum: JacobianSpectrum) -> str:
    return f"{spectrum.sigma_max.value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/jacobian-digits"))
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    data = load_digits(0)
    model = build_model(0)
    for _ in train(model, data, arguments.epochs, seed=0):
        pass
    sweeps = {
        method: graying_sweep(model, data.test_x[:1], EPS, gray_method=method, where="blocks")
        for method in METHODS
    }
    draw(sweeps, arguments.out)
    with arguments.out.with_suffix(".csv").open("w", newline="") as file:
        file.write(
            f"# torch {torch.__version__}, CPU, {arguments.epochs} epochs, seed 0, one run, one test image; "
            "attention of block 0 without its skip, its input grayed, dense Jacobian in float64\n"
        )
        writer = csv.writer(file)
        writer.writerow(
            ["method", "eps", "sigma max", *(f"sigma {i} / max" for i in (100, 200, 400, 600, 750))]
        )
        for method, sweep in sweeps.items():
            for eps, spectrum in sweep.items():
                values = spectrum.relative(10**6)
                picked = [f"{values[i - 1].item():.3g}" for i in (100, 200, 400, 600, 750)]
                writer.writerow([method, eps, values_max(spectrum), *picked])


if __name__ == "__main__":
    main()
