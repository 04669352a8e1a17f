"""The table: every block class and patch embedding that the library knows.

Read off timm 1.0.20 to 1.0.30, transformers 5.10 to 5.22, torchvision 0.26 to 0.29 and torch 2.11 to
2.15. A class whose source differs is refused, not guessed at (see :mod:`wellposed.anatomy.seam`).
"""

from typing import cast

from torch import nn

from wellposed.anatomy.rows import Add, BlockRow, EmbeddingRow, Layout, after, before, no_taps, taps

_NO_ATTENTION = "it mixes tokens without attention"
_ONE_TOKEN = "it updates the class token alone, and the mean of one token is that token"

_X_TWICE = (Add("attention"), Add("ffn"))
_RESIDUAL_TWICE = (Add("attention", "residual"), Add("ffn", "residual"))
_PLAIN = taps(attention=after("attn"))
_HF_PLAIN = taps(attention=after("attention"))
_TORCHVISION_MLP = (before("mlp.0"), after("mlp.4"))


def _encoder_layer_layout(block: nn.Module) -> Layout:
    return "NLC" if cast(nn.MultiheadAttention, block.self_attn).batch_first else "LNC"


def _timm_patch_layout(embed: nn.Module) -> Layout:
    # timm flattens unless it was asked for another format (Swin, dynamic image size).
    return "NLC" if embed.flatten else cast(Layout, getattr(embed.output_fmt, "value", embed.output_fmt))


BLOCKS: dict[str, BlockRow] = {
    "timm.models.vision_transformer.Block": BlockRow("timm ViT, DeiT, DeiT-3, DINOv2", _X_TWICE, _PLAIN),
    "timm.models.vision_transformer.ResPostBlock": BlockRow("timm ViT, post-norm", _X_TWICE, _PLAIN),
    "timm.models.eva.EvaBlock": BlockRow("timm EVA, DINOv3", _X_TWICE, _PLAIN, older_adds=_X_TWICE * 2),
    "timm.models.eva.EvaBlockPostNorm": BlockRow("timm EVA, post-norm", _X_TWICE, _PLAIN),
    "timm.models.beit.Block": BlockRow("timm BEiT", _X_TWICE * 2, _PLAIN),
    # The attention module sees windows; the first module that sees the whole image again comes after.
    "timm.models.swin_transformer.SwinTransformerBlock": BlockRow(
        "timm Swin",
        _X_TWICE,
        taps(attention=before("drop_path1", layout="NHWC"), start=before("", layout="NHWC")),
    ),
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": BlockRow(
        "timm Swin V2",
        _X_TWICE,
        taps(attention=before("norm1", layout="NHWC"), start=before("", layout="NHWC")),
    ),
    "timm.models.cait.LayerScaleBlock": BlockRow("timm CaiT", _X_TWICE, _PLAIN),
    "timm.models.cait.LayerScaleBlockClassAttn": BlockRow(
        "timm CaiT, class attention",
        (Add("attention", "x_cls"), Add("ffn", "x_cls")),
        no_taps(_ONE_TOKEN),
        stream=1,
    ),
    "timm.models.pvt_v2.Block": BlockRow("timm PVT v2", _X_TWICE, _PLAIN),
    "timm.models.xcit.XCABlock": BlockRow(
        "timm XCiT",
        (Add("attention"), Add("local"), Add("ffn")),
        _PLAIN,
        no_token_attention="its attention is over channels, not tokens",
    ),
    "timm.models.xcit.ClassAttentionBlock": BlockRow(
        "timm XCiT, class attention",
        (Add("attention"), Add("ffn", "x_res")),
        no_taps(_ONE_TOKEN),
        unchained=("ffn",),
    ),
    "timm.models.mlp_mixer.MixerBlock": BlockRow(
        "timm MLP-Mixer",
        (Add("mixer"), Add("ffn")),
        taps(attention=_NO_ATTENTION, mlp="mlp_channels", last_linear="mlp_channels.fc2"),
    ),
    "timm.models.mlp_mixer.ResBlock": BlockRow(
        "timm ResMLP",
        (Add("mixer"), Add("ffn")),
        taps(attention=_NO_ATTENTION, mlp="mlp_channels", last_linear="mlp_channels.fc2"),
    ),
    "timm.models.convmixer.Residual": BlockRow(
        "timm ConvMixer",
        (Add("mixer"),),
        (("block.start", before("")), *no_taps("it mixes tokens by convolution and has no MLP")[1:]),
        layout="NCHW",
    ),
    "transformers.models.vit.modeling_vit.ViTLayer": BlockRow("transformers ViT", _RESIDUAL_TWICE, _HF_PLAIN),
    "transformers.models.deit.modeling_deit.DeiTLayer": BlockRow(
        "transformers DeiT", _RESIDUAL_TWICE, _HF_PLAIN
    ),
    "transformers.models.vit_mae.modeling_vit_mae.ViTMAELayer": BlockRow(
        "transformers ViTMAE", _RESIDUAL_TWICE, _HF_PLAIN
    ),
    "transformers.models.dinov2.modeling_dinov2.Dinov2Layer": BlockRow(
        "transformers DINOv2",
        _RESIDUAL_TWICE,
        taps(attention=after("attention"), last_linear=("mlp.fc2", "mlp.down_proj", "mlp.weights_out")),
        older_adds=(Add("attention", "hidden_states"), Add("ffn", "hidden_states")),
    ),
    "transformers.models.dinov3_vit.modeling_dinov3_vit.DINOv3ViTLayer": BlockRow(
        "transformers DINOv3",
        _RESIDUAL_TWICE,
        taps(attention=after("attention"), last_linear="mlp.down_proj"),
    ),
    "transformers.models.beit.modeling_beit.BeitLayer": BlockRow(
        "transformers BEiT", _RESIDUAL_TWICE, _HF_PLAIN
    ),
    # drop_path serves the attention branch alone here, and it sees the windows put together again.
    "transformers.models.swin.modeling_swin.SwinLayer": BlockRow(
        "transformers Swin",
        (Add("attention", "shortcut"), Add("ffn", "residual")),
        taps(attention=before("drop_path")),
    ),
    "torchvision.models.vision_transformer.EncoderBlock": BlockRow(
        "torchvision ViT",
        (Add("attention", "input"), Add("ffn")),
        taps(attention=after("self_attention"), mlp=_TORCHVISION_MLP, last_linear="mlp.3"),
    ),
    "torchvision.models.swin_transformer.SwinTransformerBlock": BlockRow(
        "torchvision Swin",
        _X_TWICE,
        taps(attention=after("attn"), mlp=_TORCHVISION_MLP, last_linear="mlp.3"),
        layout="NHWC",
    ),
    "torchvision.models.swin_transformer.SwinTransformerBlockV2": BlockRow(
        "torchvision Swin V2",
        _X_TWICE,
        taps(attention=after("attn"), mlp=_TORCHVISION_MLP, last_linear="mlp.3"),
        layout="NHWC",
    ),
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
