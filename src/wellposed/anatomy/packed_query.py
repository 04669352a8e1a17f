"""The query of ``nn.MultiheadAttention``, which no submodule makes.

It hands one packed weight (3 D, D) and bias (3 D,) to a function, queries first. An opened one is of a
subclass whose forward pass hands them through its child ``inserted_query``, an operation on the last axis.
The parameters stay as they are, so they load, save and learn as before.
"""

from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from wellposed.anatomy.marked import set_class, unmarked_class


class PackedQueryAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` whose packed projection goes through ``inserted_query``."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested:
            raise TypeError(
                "expected a plain tensor of tokens, got a nested one; make the nn.TransformerEncoder with "
                "enable_nested_tensor=False."
            )
        through = cast(Any, self.inserted_query)
        tokens_first = self.batch_first and query.ndim == 3
        if tokens_first:
            # The function multiplies once where query, key and value are one tensor.
            q = query.transpose(0, 1)
            k = q if key is query else key.transpose(0, 1)
            v = q if value is query else k if value is key else value.transpose(0, 1)
            query, key, value = q, k, v
        out, weights = functional.multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            through(self.in_proj_weight.mT).mT,
            None if self.in_proj_bias is None else through(self.in_proj_bias),
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            self.out_proj.weight,
            self.out_proj.bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        return out.transpose(0, 1) if tokens_first else out, weights


def no_packed_query(attention: nn.MultiheadAttention) -> str:
    """Why its queries alone do not decide its weights, or cannot be reached; empty where they do and can."""
    if unmarked_class(attention) not in (nn.MultiheadAttention, PackedQueryAttention):
        return f"{type(attention).__name__} is a subclass of nn.MultiheadAttention, and may compute otherwise"
    if attention.in_proj_weight is None:
        return "its keys or values have another width than its queries (kdim, vdim)"
    if attention.bias_k is not None or attention.add_zero_attn:
        return "it attends to one token more than there are (add_bias_kv, add_zero_attn)"
    return ""


def open_packed_query(attention: nn.Module) -> None:
    """The child ``inserted_query`` must be there already."""
    set_class(attention, PackedQueryAttention)
    attention.register_forward_pre_hook(stay_unfused)


def close_packed_query(module: nn.Module) -> None:
    """Undo :func:`open_packed_query`; leaves other modules alone."""
    if unmarked_class(module) is PackedQueryAttention:
        set_class(module, nn.MultiheadAttention)
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is stay_unfused]:
            del module._forward_pre_hooks[key]


def stay_unfused(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook that does nothing: ``nn.TransformerEncoderLayer`` fuses attention without hooks."""
