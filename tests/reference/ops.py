"""The arithmetic that the reference blocks share, written out.

B images, N tokens, D channels, H heads, C channels a head. Weights go by their names in the block.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
TokenMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Edits:
    """What was done to a block.

    ``keep_attention_skip`` stands for the skip around token mixing where there is no attention.
    ``broadcast`` names the positions of Context Broadcasting, ``scale`` makes it CB_S.
    """

    keep_attention_skip: bool = True
    keep_ffn_skip: bool = True
    broadcast: tuple[str, ...] = ()
    scale: Tensor | None = None

    def at(self, position: str, x: Tensor) -> Tensor:
        """(x_i + mean)/2, or (1 - scale) x_i + scale mean, where the position is broadcast; else x."""
        if position not in self.broadcast:
            return x
        mean = x.sum(1, keepdim=True) / x.shape[1]
        if self.scale is None:
            return (x + mean) / 2
        return (1 - self.scale) * x + self.scale * mean

    def add_attention(self, x: Tensor, branch: Tensor) -> Tensor:
        """Add the attention branch to x, or return it alone."""
        return x + branch if self.keep_attention_skip else branch

    def add_ffn(self, x: Tensor, branch: Tensor) -> Tensor:
        """Add the MLP branch to x, or return it alone."""
        return x + branch if self.keep_ffn_skip else branch


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b."""
    return x @ weight.T if bias is None else x @ weight.T + bias


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    """Return x W^T + b with the weights of a layer, which may have no bias."""
    return affine(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def layer_norm(x: Tensor, w: Weights, name: str, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over channels."""
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(x: Tensor) -> Tensor:
    """Return x Phi(x), with Phi the normal distribution function."""
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x))."""
    return x / (1 + torch.exp(-x))


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return x.clamp(min=0)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, N, D) to (B, H, N, C)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, N, C) to (B, N, D)."""
    return x.transpose(1, 2).flatten(-2)


def packed_qkv(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values (B, H, N, C) of one weight that stacks the three."""
    return tuple(split_heads(part, heads) for part in affine(x, weight, bias).chunk(3, dim=-1))


def logits(q: Tensor, k: Tensor) -> Tensor:
    """Return q k^T / sqrt(C)."""
    return q @ k.mT / math.sqrt(q.shape[-1])


def attend(scores: Tensor, v: Tensor) -> Tensor:
    """softmax(scores) v, heads merged."""
    return merge_heads(torch.softmax(scores, dim=-1) @ v)


def mlp(
    x: Tensor,
    w: Weights,
    edits: Edits,
    *,
    first: str = "mlp.fc1",
    last: str = "mlp.fc2",
    hidden: TokenMap = gelu,
) -> Tensor:
    """W2 hidden(W1 x + b1) + b2, with the three places of broadcasting in it."""
    x = edits.at("mlp.start", x)
    x = edits.at("mlp.middle", hidden(linear(x, w, first)))
    return edits.at("mlp.end", linear(x, w, last))


def pre_norm(
    x: Tensor,
    w: Weights,
    edits: Edits,
    mix: TokenMap,
    feed: TokenMap,
    *,
    eps: float,
    norms: tuple[str, str] = ("norm1", "norm2"),
    scales: tuple[Tensor | float, Tensor | float] = (1.0, 1.0),
) -> Tensor:
    """Pre-norm: x + s1 mix(norm1(x)), and of this x + s2 feed(norm2(x))."""
    mixed = edits.at("attention.end", mix(layer_norm(x, w, norms[0], eps)))
    x = edits.add_attention(x, scales[0] * mixed)
    return edits.add_ffn(x, scales[1] * feed(layer_norm(x, w, norms[1], eps)))


def branch_norm(x: Tensor, w: Weights, edits: Edits, mix: TokenMap, feed: TokenMap, *, eps: float) -> Tensor:
    """Norm at the end of each branch: x + norm1(mix(x)), and of this x + norm2(feed(x))."""
    mixed = edits.at("attention.end", mix(x))
    x = edits.add_attention(x, layer_norm(mixed, w, "norm1", eps))
    return edits.add_ffn(x, layer_norm(feed(x), w, "norm2", eps))


def sum_norm(x: Tensor, w: Weights, edits: Edits, mix: TokenMap, feed: TokenMap, *, eps: float) -> Tensor:
    """Post-norm: norm1(x + mix(x)), and of this norm2(x + feed(x))."""
    mixed = edits.at("attention.end", mix(x))
    x = layer_norm(edits.add_attention(x, mixed), w, "norm1", eps)
    return layer_norm(edits.add_ffn(x, feed(x)), w, "norm2", eps)
