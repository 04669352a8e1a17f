"""A plain PyTorch loop on handwritten digits, with one line added: Token Graying.

python examples/plain_loop.py --epochs 10
"""

import argparse

import timm
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import wellposed as wp
from wellposed.digits import load_digits


def main(epochs: int, depth: int) -> None:
    torch.manual_seed(0)
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

    print(wp.gray_tokens(model, eps=0.7))  # the added line, before the optimizer is made

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        model.train()
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.inference_mode():
            accuracy = (model(data.test_x).argmax(-1) == data.test_y).double().mean().item()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--depth", type=int, default=6, help="blocks of the model")
    main(**vars(parser.parse_args()))
