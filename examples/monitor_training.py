"""Kappa and entropy along the training of a ViT without attention skips, and of one with them.

    python examples/monitor_training.py --epochs 10

Writes TensorBoard's files to runs/monitor: tensorboard --logdir runs/monitor
"""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

import wellposed as wp
from wellposed.digits import build_model, load_digits
from wellposed.probes import Monitor


def main(epochs: int) -> None:
    data = load_digits(seed=0)
    for name in ("with", "without"):
        model = build_model(seed=0)
        if name == "without":
            wp.remove_skips(model, "attention")
        loader = DataLoader(TensorDataset(data.train_x, data.train_y), batch_size=64, shuffle=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        monitor = Monitor(model, data.test_x[:8], every=len(loader))  # images it does not train on
        step = 0
        with SummaryWriter(f"runs/monitor/{name}") as writer:
            for _ in range(epochs):
                for images, labels in loader:
                    seen = monitor(step)
                    for key, value in seen.items():
                        writer.add_scalar(key, value, step)
                    if seen:
                        kappa = monitor.text(seen, "kappa/attention.branch/worst")
                        entropy = seen["entropy/mean"]
                        print(f"{name} skips, step {step}: worst kappa {kappa}, entropy {entropy:.3f}")
                    loss = cross_entropy(model(images), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    step += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    main(**vars(parser.parse_args()))
