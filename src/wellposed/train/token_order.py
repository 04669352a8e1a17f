"""Tokens one after another in memory.

A patch convolution writes channel by channel, and timm's embedding is a transposed view of that. Additions
keep the order of what they add to, so in a model that joins no class token every block gets tokens whose
numbers lie far apart: each of its norms gathers them, and compiled ones need a loop over what a GPU could
read at once.
"""

from typing import Any

from timm.layers import PatchEmbed
from torch import Tensor, nn


def order_tokens(model: nn.Module) -> None:
    """Let patch embeddings return (B, N, D) tokens that lie in this order; values stay the same."""
    for module in model.modules():
        if isinstance(module, PatchEmbed):
            # Before edits that stand after the embedding: they read the tokens too.
            module.register_forward_hook(in_order, prepend=True)


def in_order(module: nn.Module, args: tuple[Any, ...], tokens: Tensor) -> Tensor:
    """Forward hook."""
    return tokens.contiguous() if tokens.dim() == 3 else tokens
