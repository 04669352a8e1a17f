"""Gradients of single outputs of single images by plain autograd, and their Gram matrix."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from zoo import Case

SEED = 5


def outputs_of(model: nn.Module, image: Tensor) -> Tensor:
    torch.manual_seed(SEED)  # a masked autoencoder draws its mask
    out = model(image)
    return getattr(out, "logits", getattr(out, "last_hidden_state", out)).flatten()


def single_images(case: Case, x: Tensor) -> list[Tensor]:
    """One batch an image; PyTorch's encoder with batch_first=False has the images on the second axis."""
    return list(x.split(1, 1 if case.name == "torch encoder pre-norm" else 0))


def reference_rows(
    model: nn.Module, singles: list[Tensor], outputs: Iterable[int] | None
) -> dict[str, Tensor]:
    """The gradient of every row, by parameter (rows, entries), row after row by plain autograd."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: list[dict[str, Tensor]] = []
    for image in singles:
        values = outputs_of(model, image)
        wanted = [values.sum() / math.sqrt(len(values))] if outputs is None else [values[c] for c in outputs]
        for value in wanted:
            found = torch.autograd.grad(
                value, list(parameters.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            rows.append({name: g.flatten() for name, g in zip(parameters, found, strict=True)})
    return {name: torch.stack([row[name] for row in rows]) for name in parameters}


def gram(rows: dict[str, Tensor], names: Iterable[str] | None = None) -> Tensor:
    G = torch.cat([rows[name] for name in (rows if names is None else names)], 1)
    return G @ G.mT


def assert_kernel(got: Tensor, expected: Tensor, relative: float = 1e-12) -> None:
    """To so much of the largest expected entry."""
    torch.testing.assert_close(got, expected, rtol=0, atol=relative * expected.abs().max().item())
