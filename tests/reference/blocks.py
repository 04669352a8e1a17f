"""One block of each family in float64, from its weights and edits, without the modules' forward.

Every function takes the tokens that go into a block, the block's weights by name, and the edits.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from reference.ops import (
    Edits,
    Weights,
    attend,
    branch_norm,
    gelu,
    layer_norm,
    linear,
    logits,
    mlp,
    packed_qkv,
    pre_norm,
    relu,
    silu,
    split_heads,
    sum_norm,
)
from reference.windows import (
    class_token_bias,
    cosine_window_attention,
    side_of,
    window_attention,
    window_bias,
)

HEADS = 2
WINDOW = 4

# Attention


def packed_attention(x: Tensor, w: Weights) -> Tensor:
    """softmax(q k^T / sqrt(C)) v, then the projection."""
    q, k, v = packed_qkv(x, w["attn.qkv.weight"], w.get("attn.qkv.bias"), HEADS)
    return linear(attend(logits(q, k), v), w, "attn.proj")


def separate_attention(x: Tensor, w: Weights, name: str = "attention", bias: Tensor | float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(C) + bias) v with a weight for each of q, k and v, as in transformers."""
    q, k, v = (split_heads(linear(x, w, f"{name}.{letter}_proj"), HEADS) for letter in "qkv")
    return linear(attend(logits(q, k) + bias, v), w, f"{name}.o_proj")


def torch_attention(x: Tensor, w: Weights, name: str) -> Tensor:
    """softmax(q k^T / sqrt(C)) v with the weights of nn.MultiheadAttention."""
    q, k, v = packed_qkv(x, w[f"{name}.in_proj_weight"], w[f"{name}.in_proj_bias"], HEADS)
    return linear(attend(logits(q, k), v), w, f"{name}.out_proj")


def keyless_bias(w: Weights) -> Tensor | None:
    """(b_q, 0, b_v): keys have no bias in BEiT, EVA and Swin V2; None where nothing has."""
    if "attn.q_bias" not in w:
        return None
    return torch.cat([w["attn.q_bias"], torch.zeros_like(w["attn.q_bias"]), w["attn.v_bias"]])


def rotate(x: Tensor, rope: Tensor, *, halves: bool) -> Tensor:
    """Turn channel pairs (a, b) of the patches to (a cos - b sin, b cos + a sin); prefix tokens stay.

    A pair is channels i and i + C/2 with ``halves``, else 2i and 2i + 1.
    """
    prefix, patches = x.split([x.shape[2] - rope.shape[0], rope.shape[0]], dim=2)
    sin, cos = rope.to(x.dtype).chunk(2, dim=-1)
    if halves:
        a, b = patches.chunk(2, dim=-1)
        turned = torch.cat([-b, a], dim=-1)
    else:
        a, b = patches.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-b, a], dim=-1).flatten(-2)
    return torch.cat([prefix, patches * cos + turned * sin], dim=2)


def rope_attention(x: Tensor, w: Weights, rope: Tensor, *, halves: bool) -> Tensor:
    """softmax(R q (R k)^T / sqrt(C)) v with R the rotation of each patch."""
    q, k, v = packed_qkv(x, w["attn.qkv.weight"], keyless_bias(w), HEADS)
    q, k = rotate(q, rope, halves=halves), rotate(k, rope, halves=halves)
    return linear(attend(logits(q, k), v), w, "attn.proj")


def beit_attention(x: Tensor, w: Weights) -> Tensor:
    """softmax(q k^T / sqrt(C) + bias of the offset) v."""
    bias = class_token_bias(w["attn.relative_position_bias_table"], x.shape[1])
    q, k, v = packed_qkv(x, w["attn.qkv.weight"], keyless_bias(w), HEADS)
    return linear(attend(logits(q, k) + bias, v), w, "attn.proj")


def talking_heads_attention(x: Tensor, w: Weights) -> Tensor:
    """W softmax(L q k^T / sqrt(C)) v, where L and W mix the heads."""
    q, k, v = packed_qkv(x, w["attn.qkv.weight"], w["attn.qkv.bias"], HEADS)

    def mix_heads(scores: Tensor, name: str) -> Tensor:
        mixed = torch.einsum("gh,bhnm->bgnm", w[f"attn.{name}.weight"], scores)
        return mixed + w[f"attn.{name}.bias"][:, None, None]

    attention = mix_heads(torch.softmax(mix_heads(logits(q, k), "proj_l"), dim=-1), "proj_w")
    return linear((attention @ v).transpose(1, 2).flatten(-2), w, "attn.proj")


def reduced_attention(x: Tensor, w: Weights, *, heads: int) -> Tensor:
    """softmax(q k^T / sqrt(C)) v, keys and values from an image that a strided convolution made smaller."""
    source = x
    if "attn.sr.weight" in w:
        kernel = w["attn.sr.weight"]
        small = functional.conv2d(as_image(x), kernel, w["attn.sr.bias"], stride=kernel.shape[-1])
        source = layer_norm(small.flatten(2).mT, w, "attn.norm", 1e-5)
    q = split_heads(linear(x, w, "attn.q"), heads)
    k, v = (split_heads(part, heads) for part in linear(source, w, "attn.kv").chunk(2, dim=-1))
    return linear(attend(logits(q, k), v), w, "attn.proj")


# MLPs


def as_image(x: Tensor) -> Tensor:
    """(B, N, D) to (B, D, side, side)."""
    side = side_of(x.shape[1])
    return x.mT.unflatten(-1, (side, side))


def gated(x: Tensor) -> Tensor:
    """silu(g) u of (g, u) = x."""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


def separately_gated_mlp(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """D(silu(G x) * U x), with the three places of broadcasting in it."""
    x = edits.at("mlp.start", x)
    hidden = silu(linear(x, w, "mlp.gate_proj")) * linear(x, w, "mlp.up_proj")
    return edits.at("mlp.end", linear(edits.at("mlp.middle", hidden), w, "mlp.down_proj"))


def depthwise_then_gelu(x: Tensor, w: Weights) -> Tensor:
    """gelu(depthwise 3 x 3 convolution of x as an image)."""
    kernel = w["mlp.dwconv.weight"]
    image = functional.conv2d(as_image(x), kernel, w["mlp.dwconv.bias"], padding=1, groups=len(kernel))
    return gelu(image.flatten(2).mT)


# Blocks of timm


def timm_vit(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """Pre-norm: x + attention(norm(x)), x + mlp(norm(x))."""
    return pre_norm(x, w, edits, lambda t: packed_attention(t, w), lambda t: mlp(t, w, edits), eps=1e-6)


def timm_deit3(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """Pre-norm: x + g1 attention(norm(x)), x + g2 mlp(norm(x)), with a scale g for each channel."""
    scales = w["ls1.gamma"], w["ls2.gamma"]
    attention, feed = lambda t: packed_attention(t, w), lambda t: mlp(t, w, edits)
    return pre_norm(x, w, edits, attention, feed, eps=1e-6, scales=scales)


def timm_dinov2_giant(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """As DeiT-3, with the MLP W2 (silu(g) u), (g, u) = W1 x."""
    scales = w["ls1.gamma"], w["ls2.gamma"]
    attention, feed = lambda t: packed_attention(t, w), lambda t: mlp(t, w, edits, hidden=gated)
    return pre_norm(x, w, edits, attention, feed, eps=1e-6, scales=scales)


def timm_vit_post_norm(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """Norm in the branch: x + norm(attention(x)), x + norm(mlp(x))."""
    return branch_norm(x, w, edits, lambda t: packed_attention(t, w), lambda t: mlp(t, w, edits), eps=1e-6)


def timm_dinov3(x: Tensor, w: Weights, edits: Edits, *, rope: Tensor) -> Tensor:
    """As DeiT-3, with rotated queries and keys, which have no biases."""
    scales = w["gamma_1"], w["gamma_2"]
    attention, feed = lambda t: rope_attention(t, w, rope, halves=True), lambda t: mlp(t, w, edits)
    return pre_norm(x, w, edits, attention, feed, eps=1e-5, scales=scales)


def timm_eva(x: Tensor, w: Weights, edits: Edits, *, rope: Tensor) -> Tensor:
    """Pre-norm: x + attention(norm(x)) with rotated queries and keys, x + gated mlp(norm(x))."""
    attention = partial(rope_attention, w=w, rope=rope, halves=False)
    return pre_norm(x, w, edits, attention, lambda t: mlp(t, w, edits, hidden=gated), eps=1e-6)


def timm_beit(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """As DeiT-3, with a bias of the offset in the attention."""
    scales = w["gamma_1"], w["gamma_2"]
    attention, feed = lambda t: beit_attention(t, w), lambda t: mlp(t, w, edits)
    return pre_norm(x, w, edits, attention, feed, eps=1e-6, scales=scales)


def timm_swin(x: Tensor, w: Weights, edits: Edits, *, shift: int) -> Tensor:
    """Pre-norm: x + window attention(norm(x)), x + mlp(norm(x)), of (B, side, side, D)."""
    attention = partial(window_attention, w=w, name="attn", heads=HEADS, window=WINDOW, shift=shift)
    tokens = pre_norm(x.flatten(1, 2), w, edits, attention, lambda t: mlp(t, w, edits), eps=1e-5)
    return tokens.reshape(x.shape)


def timm_swinv2(x: Tensor, w: Weights, edits: Edits, *, shift: int) -> Tensor:
    """Norm in the branch: x + norm(cosine window attention(x)), x + norm(mlp(x)), of (B, side, side, D)."""
    bias = keyless_bias(w)
    attention = partial(
        cosine_window_attention, w=w, name="attn", qkv_bias=bias, heads=HEADS, window=WINDOW, shift=shift
    )
    tokens = branch_norm(x.flatten(1, 2), w, edits, attention, lambda t: mlp(t, w, edits), eps=1e-5)
    return tokens.reshape(x.shape)


def timm_cait(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """Pre-norm: x + g1 talking-heads attention(norm(x)), x + g2 mlp(norm(x))."""
    scales = w["gamma_1"], w["gamma_2"]
    attention, feed = lambda t: talking_heads_attention(t, w), lambda t: mlp(t, w, edits)
    return pre_norm(x, w, edits, attention, feed, eps=1e-6, scales=scales)


def timm_pvt_v2(x: Tensor, w: Weights, edits: Edits, *, heads: int) -> Tensor:
    """Pre-norm: x + reduced attention(norm(x)), x + W2 gelu(depthwise convolution(W1 norm(x)))."""
    attention = partial(reduced_attention, w=w, heads=heads)
    hidden = partial(depthwise_then_gelu, w=w)
    return pre_norm(x, w, edits, attention, lambda t: mlp(t, w, edits, hidden=hidden), eps=1e-6)


def timm_mixer(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """Pre-norm: x + (mlp over tokens of norm(x)), x + mlp over channels of norm(x)."""

    def over_tokens(t: Tensor) -> Tensor:
        return linear(gelu(linear(t.mT, w, "mlp_tokens.fc1")), w, "mlp_tokens.fc2").mT

    over_channels = partial(mlp, w=w, edits=edits, first="mlp_channels.fc1", last="mlp_channels.fc2")
    return pre_norm(x, w, edits, over_tokens, over_channels, eps=1e-6)


# Blocks of transformers

_HF_NORMS = ("layernorm_before", "layernorm_after")


def hf_vit(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """Pre-norm: x + attention(norm(x)), x + mlp(norm(x))."""
    attention, feed = lambda t: separate_attention(t, w), lambda t: mlp(t, w, edits)
    return pre_norm(x, w, edits, attention, feed, eps=1e-12, norms=_HF_NORMS)


def hf_dinov2(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """Pre-norm: x + g1 attention(norm(x)), x + g2 mlp(norm(x))."""
    scales = w["layer_scale1.lambda1"], w["layer_scale2.lambda1"]
    attention, feed = lambda t: separate_attention(t, w), lambda t: mlp(t, w, edits)
    return pre_norm(x, w, edits, attention, feed, eps=1e-6, scales=scales)


def hf_dinov2_swiglu(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """Pre-norm: x + g1 attention(norm(x)), x + g2 gated mlp(norm(x))."""
    scales = w["layer_scale1.lambda1"], w["layer_scale2.lambda1"]
    attention, feed = lambda t: separate_attention(t, w), lambda t: separately_gated_mlp(t, w, edits)
    return pre_norm(x, w, edits, attention, feed, eps=1e-6, scales=scales)


def hf_beit(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """Pre-norm: x + g1 attention(norm(x)) with a bias of the offset, x + g2 mlp(norm(x))."""
    bias = class_token_bias(w["relative_position_bias.relative_position_bias_table"], x.shape[1])
    attention, feed = lambda t: separate_attention(t, w, bias=bias), lambda t: mlp(t, w, edits)
    scales = w["lambda_1"], w["lambda_2"]
    return pre_norm(x, w, edits, attention, feed, eps=1e-12, norms=_HF_NORMS, scales=scales)


def hf_swin(x: Tensor, w: Weights, edits: Edits, *, shift: int) -> Tensor:
    """Pre-norm: x + window attention(norm(x)), x + mlp(norm(x)), of (B, N, D)."""
    table = w["attention.relative_position_bias.relative_position_bias_table"]
    bias = window_bias(table, side_of(x.shape[1]), WINDOW, shift)
    attention, feed = lambda t: separate_attention(t, w, bias=bias), lambda t: mlp(t, w, edits)
    return pre_norm(x, w, edits, attention, feed, eps=1e-5, norms=_HF_NORMS)


# Blocks of torchvision and torch

_TORCHVISION_MLP = {"first": "mlp.0", "last": "mlp.3"}


def torchvision_vit(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """Pre-norm: x + attention(norm(x)), x + mlp(norm(x))."""
    attention = partial(torch_attention, w=w, name="self_attention")
    feed = partial(mlp, w=w, edits=edits, **_TORCHVISION_MLP)
    return pre_norm(x, w, edits, attention, feed, eps=1e-6, norms=("ln_1", "ln_2"))


def torchvision_swin(x: Tensor, w: Weights, edits: Edits, *, shift: int) -> Tensor:
    """Pre-norm: x + window attention(norm(x)), x + mlp(norm(x)), of (B, side, side, D)."""
    attention = partial(window_attention, w=w, name="attn", heads=HEADS, window=WINDOW, shift=shift)
    feed = partial(mlp, w=w, edits=edits, **_TORCHVISION_MLP)
    return pre_norm(x.flatten(1, 2), w, edits, attention, feed, eps=1e-5).reshape(x.shape)


def torchvision_swin_v2(x: Tensor, w: Weights, edits: Edits, *, shift: int) -> Tensor:
    """Norm in the branch: x + norm(cosine window attention(x)), x + norm(mlp(x)), of (B, side, side, D)."""
    q_bias, _, v_bias = w["attn.qkv.bias"].chunk(3)
    bias = torch.cat([q_bias, torch.zeros_like(q_bias), v_bias])
    attention = partial(
        cosine_window_attention, w=w, name="attn", qkv_bias=bias, heads=HEADS, window=WINDOW, shift=shift
    )
    feed = partial(mlp, w=w, edits=edits, **_TORCHVISION_MLP)
    return branch_norm(x.flatten(1, 2), w, edits, attention, feed, eps=1e-5).reshape(x.shape)


def torch_encoder(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """Post-norm: norm(x + attention(x)), norm(x + mlp(x)), with relu."""
    attention = partial(torch_attention, w=w, name="self_attn")
    feed = partial(mlp, w=w, edits=edits, first="linear1", last="linear2", hidden=relu)
    return sum_norm(x, w, edits, attention, feed, eps=1e-5)


def torch_encoder_pre_norm(x: Tensor, w: Weights, edits: Edits) -> Tensor:
    """Pre-norm: x + attention(norm(x)), x + mlp(norm(x)), with relu, of (N, B, D)."""
    attention = partial(torch_attention, w=w, name="self_attn")
    feed = partial(mlp, w=w, edits=edits, first="linear1", last="linear2", hidden=relu)
    return pre_norm(x.transpose(0, 1), w, edits, attention, feed, eps=1e-5).transpose(0, 1)
