"""The attention classes whose query the library can reach, and why others have none to reach.

An edit of the query decides the attention weights only where nothing else is on the logits. A class that is
not here is refused, not guessed at.
"""

from typing import Any

from torch import nn

from wellposed.anatomy.rows import AttentionRow

_INSTEAD = 'broadcast_context(model, "attention.end") mixes in the mean of all tokens instead'
_BIAS = (
    "its attention adds a relative position bias to the logits, so that a query of zeros does not weigh all "
    f"tokens alike; {_INSTEAD}"
)
_BEIT = (
    "its query is made by a call that no module sees, and most BEiTs add a relative position bias to the "
    f"logits; {_INSTEAD}"
)
_TALKING = f"its heads are mixed before the softmax, so that none has logits of its own; {_INSTEAD}"
_DIFFERENCE = f"its weights are the difference of two softmaxes; {_INSTEAD}"
_CLASS = "the class token alone attends there, the edit is of attention among all tokens"

# timm has an Identity here where there is no norm; rotation comes after it, and keeps zeros.
_TIMM = AttentionRow(("q_norm",), "axis 1")


def _beit_bias(attention: nn.Module) -> str:
    config: Any = attention.config
    names = ("use_relative_position_bias", "use_shared_relative_position_bias")
    return _BIAS if any(getattr(config, name, True) for name in names) else ""


def _transformers(heads: str = "num_attention_heads") -> AttentionRow:
    # The second path is how earlier versions nest it.
    return AttentionRow(("q_proj", "attention.query"), heads=heads)


ATTENTIONS: dict[str, AttentionRow | str] = {
    "timm.layers.attention.Attention": _TIMM,
    "timm.layers.attention.AttentionRope": _TIMM,
    "timm.models.eva.EvaAttention": _TIMM,
    "timm.models.pvt_v2.Attention": AttentionRow(("q",)),
    "timm.layers.diff_attention.DiffAttention": _DIFFERENCE,
    "timm.models.beit.Attention": _BEIT,
    "timm.models.swin_transformer.WindowAttention": _BIAS,
    "timm.models.swin_transformer_v2.WindowAttention": _BIAS,
    "timm.models.cait.TalkingHeadAttn": _TALKING,
    "timm.models.cait.ClassAttn": _CLASS,
    **{
        f"transformers.models.{module}.modeling_{module}.{name}Attention": _transformers()
        for module, name in (("vit", "ViT"), ("deit", "DeiT"), ("vit_mae", "ViTMAE"), ("dinov2", "Dinov2"))
    },
    "transformers.models.dinov3_vit.modeling_dinov3_vit.DINOv3ViTAttention": _transformers("num_heads"),
    "transformers.models.beit.modeling_beit.BeitAttention": AttentionRow(
        ("q_proj",), heads="num_attention_heads", refuses=_beit_bias
    ),
    "transformers.models.swin.modeling_swin.SwinAttention": _BIAS,
    "torchvision.models.swin_transformer.ShiftedWindowAttention": _BIAS,
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": _BIAS,
}
