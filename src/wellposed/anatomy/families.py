"""The table: what a run of a model cannot tell, and the patch embeddings of models that need no run.

PyTorch's encoder layer has a fused kernel in evaluation that does both adds inside, where no run sees them.
The embeddings name the places of known families; those of others are found by
:mod:`wellposed.anatomy.find_embedding`.
"""

from typing import cast

from torch import nn

from wellposed.anatomy.rows import Add, BlockRow, EmbeddingRow, Layout, after, before, taps

_X_TWICE = (Add("attention"), Add("ffn"))


def _encoder_layer_layout(block: nn.Module) -> Layout:
    return "NLC" if cast(nn.MultiheadAttention, block.self_attn).batch_first else "LNC"


def _timm_patch_layout(embed: nn.Module) -> Layout:
    # timm flattens unless it was asked for another format (Swin, dynamic image size).
    return "NLC" if embed.flatten else cast(Layout, getattr(embed.output_fmt, "value", embed.output_fmt))


BLOCKS: dict[str, BlockRow] = {
    "torch.nn.modules.transformer.TransformerEncoderLayer": BlockRow(
        "torch.nn.TransformerEncoderLayer",
        _X_TWICE * 2,
        taps(
            attention=after("self_attn"),
            mlp=(before("linear1"), after("linear2")),
            last_linear="linear2",
        ),
        layout=_encoder_layer_layout,
        # The fused kernel of evaluation does both adds inside.
        substitutions=(("torch.backends.mha.get_fastpath_enabled()", "False"),),
    ),
}

_OVERLAPPING = "its stem is a stack of overlapping convolutions, there is no pixel-patch matrix"

EMBEDDINGS: dict[str, EmbeddingRow] = {
    "timm.layers.patch_embed.PatchEmbed": EmbeddingRow("timm", layout=_timm_patch_layout),
    # Its later stages use the same embedding class again, so the row goes by the model.
    "timm.models.pvt_v2.PyramidVisionTransformerV2": EmbeddingRow(
        "timm PVT v2", after("patch_embed"), None, _OVERLAPPING, layout="NHWC"
    ),
    "timm.models.xcit.ConvPatchEmbed": EmbeddingRow(
        "timm XCiT", patch_convolution=None, no_pixels=_OVERLAPPING
    ),
    "timm.models.convmixer.ConvMixer": EmbeddingRow(
        "timm ConvMixer", after("stem.2"), "stem.0", layout="NCHW"
    ),
    **{
        f"transformers.models.{module}.modeling_{module}.{name}PatchEmbeddings": EmbeddingRow(
            f"transformers {name}", patch_convolution="projection"
        )
        for module, name in (
            ("vit", "ViT"),
            ("deit", "DeiT"),
            ("vit_mae", "ViTMAE"),
            ("dinov2", "Dinov2"),
            ("beit", "Beit"),
            ("swin", "Swin"),
        )
    },
    "transformers.models.dinov3_vit.modeling_dinov3_vit.DINOv3ViTEmbeddings": EmbeddingRow(
        "transformers DINOv3", after("patch_embeddings"), "patch_embeddings", layout="NCHW"
    ),
    "torchvision.models.vision_transformer.VisionTransformer": EmbeddingRow(
        "torchvision ViT", after("conv_proj"), "conv_proj", layout="NCHW"
    ),
    "torchvision.models.swin_transformer.SwinTransformer": EmbeddingRow(
        "torchvision Swin", after("features.0.2"), "features.0.0", layout="NHWC"
    ),
}
