"""Parts of models that no library has, and the same written out in float64, from their weights alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import wellposed as wp

WIDTH, HEADS, TOKENS, TOLERANCE = 8, 2, 5, 1e-11


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        weights = (q @ k.mT * (WIDTH // HEADS) ** -0.5).softmax(dim=-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x).relu())


def made(build: Callable[[], nn.Module]) -> Any:
    """A model whose numbers hide nothing: no scale is one, no bias zero."""
    torch.manual_seed(0)
    model = build().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5).add_(0.3 * (parameter.ndim < 2))
    return model


INPUT = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Taken before an edit, so that the reference shares nothing with it."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def attend(x: Tensor, w: dict[str, Tensor], qkv: str, out: str) -> Tensor:
    q, k, v = (x @ w[f"{qkv}.weight"].T).split(WIDTH, dim=-1)
    size = WIDTH // HEADS
    heads = []
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        logits = q[..., part] @ k[..., part].mT / size**0.5
        p = logits.exp() / logits.exp().sum(-1, keepdim=True)
        heads.append(p @ v[..., part])
    return torch.cat(heads, -1) @ w[f"{out}.weight"].T + w[f"{out}.bias"]


def feed(x: Tensor, w: dict[str, Tensor], inner: str, out: str) -> Tensor:
    hidden = (x @ w[f"{inner}.weight"].T + w[f"{inner}.bias"]).clamp(min=0)
    return hidden @ w[f"{out}.weight"].T + w[f"{out}.bias"]


def with_context(x: Tensor) -> Tensor:
    return (x + x.sum(1, keepdim=True) / x.shape[1]) / 2


EDITS: dict[str, Callable[..., Any]] = {
    "attention": lambda model: wp.remove_skips(model, "attention", example=INPUT),
    "ffn": lambda model: wp.remove_skips(model, "ffn", example=INPUT),
    "all": lambda model: wp.remove_skips(model, "all", example=INPUT),
    "attention.end": lambda model: wp.broadcast_context(model, "attention.end", example=INPUT),
    "mlp.end": lambda model: wp.broadcast_context(model, "mlp.end", example=INPUT),
}


def by_hand(
    w: dict[str, Tensor], names: list[tuple[str, ...]], edit: str, *, start: float = 1.5, head: str = "head"
) -> Tensor:
    """A pre-norm transformer with an edit.

    Args:
        names: for each layer those of norm1, qkv, out, norm2, inner, out.
    """
    x = INPUT * start
    for norm1, qkv, to_out, norm2, inner, out in names:
        branch = attend(norm(x, w, norm1), w, qkv, to_out)
        branch = with_context(branch) if edit == "attention.end" else branch
        x = branch if edit in ("attention", "all") else x + branch
        branch = feed(norm(x, w, norm2), w, inner, out)
        branch = with_context(branch) if edit == "mlp.end" else branch
        x = branch if edit in ("ffn", "all") else x + branch
    return norm(x, w, head) if head else x


def check(model: nn.Module, edit: str, reference: Callable[[str], Tensor]) -> None:
    plain = model(INPUT.clone())
    torch.testing.assert_close(plain, reference("nothing"), rtol=TOLERANCE, atol=TOLERANCE)
    EDITS[edit](model)
    edited = model(INPUT.clone())
    torch.testing.assert_close(edited, reference(edit), rtol=TOLERANCE, atol=TOLERANCE)
    assert (edited - plain).abs().max() > 1e-3
    wp.restore(model)
    assert torch.equal(model(INPUT.clone()), plain)
