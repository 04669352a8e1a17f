"""Position biases and shifted windows, as one bias over all pairs of tokens of a square image.

Windows are not cut out here: tokens of different windows get -inf between them. That is the same
attention by another road than the models take.
"""

import math

import torch
from torch import Tensor

from reference.ops import Weights, attend, linear, logits, packed_qkv, relu

ACROSS_THE_EDGE = -100.0  # what Swin adds between tokens that only the cyclic shift made neighbours


def side_of(tokens: int) -> int:
    """The side of a square image with so many tokens."""
    side = math.isqrt(tokens)
    assert side * side == tokens
    return side


def window_bias(table: Tensor, side: int, window: int, shift: int = 0) -> Tensor:
    """(H, N, N): table[offset] within a window, -100 across the image's edge, -inf between windows.

    A row of the ``table`` belongs to an offset (dy, dx) in a window, each from -(window - 1) up.
    """
    shifted = (torch.arange(side) - shift) % side
    position = torch.cartesian_prod(shifted, shifted)  # (N, 2): y and x after the cyclic shift
    wrapped = position >= side - shift

    def pairs(of_token: Tensor) -> tuple[Tensor, Tensor]:
        return of_token[:, None], of_token[None, :]

    query, key = pairs(position)
    together = (query // window == key // window).all(-1)
    query_wrapped, key_wrapped = pairs(wrapped)
    across = (query_wrapped != key_wrapped).any(-1)

    dy, dx = (query - key + window - 1).unbind(-1)
    row = (dy * (2 * window - 1) + dx).where(together, 0)
    bias = table[row].permute(2, 0, 1) + ACROSS_THE_EDGE * across
    return bias.masked_fill(~together, -math.inf)


def class_token_bias(table: Tensor, tokens: int) -> Tensor:
    """(H, N, N) of BEiT: offsets between patches; three last rows for pairs with the class token."""
    side = side_of(tokens - 1)
    class_to_patch, patch_to_class, class_to_class = table[-3:]
    bias = table.new_empty(table.shape[1], tokens, tokens)
    bias[:, 1:, 1:] = window_bias(table[:-3], side, side)
    bias[:, 0, 1:] = class_to_patch[:, None]
    bias[:, 1:, 0] = patch_to_class[:, None]
    bias[:, 0, 0] = class_to_class
    return bias


def window_attention(x: Tensor, w: Weights, name: str, *, heads: int, window: int, shift: int) -> Tensor:
    """softmax(q k^T / sqrt(C) + bias) v within windows, of Swin."""
    bias = window_bias(w[f"{name}.relative_position_bias_table"], side_of(x.shape[1]), window, shift)
    q, k, v = packed_qkv(x, w[f"{name}.qkv.weight"], w[f"{name}.qkv.bias"], heads)
    return linear(attend(logits(q, k) + bias, v), w, f"{name}.proj")


def cosine_window_attention(
    x: Tensor, w: Weights, name: str, *, qkv_bias: Tensor, heads: int, window: int, shift: int
) -> Tensor:
    """softmax(cos(q, k) scale + bias) v within windows, bias = 16 sigmoid(W2 relu(W1 offset)), of Swin V2."""
    # The logarithmic offsets are taken as they are, because the models keep them rounded to float32.
    offsets = w[f"{name}.relative_coords_table"].flatten(0, 2)
    table = 16 * torch.sigmoid(linear(relu(linear(offsets, w, f"{name}.cpb_mlp.0")), w, f"{name}.cpb_mlp.2"))
    bias = window_bias(table, side_of(x.shape[1]), window, shift)

    q, k, v = packed_qkv(x, w[f"{name}.qkv.weight"], qkv_bias, heads)
    cosine = unit(q) @ unit(k).mT
    scale = torch.exp(w[f"{name}.logit_scale"].clamp(max=math.log(100)))
    return linear(attend(cosine * scale + bias, v), w, f"{name}.proj")


def unit(x: Tensor) -> Tensor:
    """Return x / |x|."""
    return x / x.square().sum(-1, keepdim=True).sqrt()
