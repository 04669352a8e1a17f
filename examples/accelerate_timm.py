"""A timm model with Context Broadcasting, trained with Accelerate on one device or many.

python examples/accelerate_timm.py --epochs 10
accelerate launch examples/accelerate_timm.py --epochs 10
"""

import argparse

import timm
import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import wellposed as wp
from wellposed.digits import load_digits
from wellposed.probes import Monitor


def main(epochs: int, depth: int) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator()
    data = load_digits(seed=0)
    loader = DataLoader(TensorDataset(data.train_x, data.train_y), batch_size=64, shuffle=True)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        depth=depth,
        embed_dim=48,
    )
    wp.broadcast_context(model)  # edit first, then optimizer and prepare
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    monitor = Monitor(model, data.test_x[:8], every=len(loader))

    step = 0
    for epoch in range(epochs):
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            if accelerator.is_main_process and (seen := monitor(step)):
                worst, entropy = monitor.text(seen, "kappa/attention.branch/worst"), seen["entropy/mean"]
                print(f"step {step}: worst kappa of attention {worst}, mean entropy {entropy:.3f}")
            step += 1
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--depth", type=int, default=6, help="blocks of the model")
    main(**vars(parser.parse_args()))
