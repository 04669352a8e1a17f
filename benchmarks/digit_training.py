"""A plain training loop on the embedded digits, for the pictures that need trained weights in memory."""

from collections.abc import Iterator

import torch
from torch import nn

from wellposed.digits import Digits

PROBE_IMAGES = 128


def train(model: nn.Module, data: Digits, epochs: int, seed: int) -> Iterator[float]:
    """AdamW with a one-cycle schedule; yields the mean loss of each epoch."""
    generator = torch.Generator().manual_seed(seed)
    batch = 64
    steps = len(data.train_x) // batch
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=epochs * steps)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(data.train_x), generator=generator)
        total = 0.0
        for indices in order[: steps * batch].reshape(steps, batch):
            loss = nn.functional.cross_entropy(model(data.train_x[indices]), data.train_y[indices])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            total += loss.item()
        yield total / steps
