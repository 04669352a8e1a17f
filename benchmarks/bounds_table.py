"""Do the bounds of Always Skip Attention hold in a trained model, and by what margin?

    python benchmarks/bounds_table.py --out results/bounds-digits

Trains a small ViT (17 tokens of 48 channels, 3 heads, 6 blocks) on the embedded digits, and puts the
measured kappa of 16 test images beside the bounds, before and after training.
"""

import argparse
from pathlib import Path

import torch
from digit_training import train

from wellposed.digits import build_model, load_digits
from wellposed.probes import bounds
from wellposed.probes.tables import as_text, bounds_table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/bounds-digits"))
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    data = load_digits(0)
    model = build_model(0)
    images = data.test_x[:16]
    text = [f"torch {torch.__version__}, CPU, seed 0, one run, 16 test images, 6 blocks, 3 heads"]
    text += ["", "before training", as_text(bounds_table(bounds(model, images, images_limit=16)))]
    for _ in train(model, data, arguments.epochs, seed=0):
        pass
    text += ["", f"after {arguments.epochs} epochs"]
    text += [as_text(bounds_table(bounds(model, images, images_limit=16)))]
    arguments.out.with_suffix(".txt").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
