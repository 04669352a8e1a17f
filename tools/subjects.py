"""The models that coverage is measured on: one of each kind, small or shrunk, with random weights.

timm: a model of every module that has attention. torchvision: all its transformers. transformers:
vision encoders, and a few of text and sound, with tiny configurations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch
import torchvision
import transformers
from torch import nn
from torchvision.models.video import mvit

TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "beit": ("beit_base_patch16_224", {"img_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 3}),
    "byoanet": ("halonet_h1", {}),
    "cait": ("cait_xxs24_224", {"img_size": 64, "depth": 2}),
    "coat": ("coat_tiny", {}),
    "convit": ("convit_tiny", {}),
    "cpubone": ("cpubone_nano", {}),
    "crossvit": ("crossvit_tiny_240", {}),
    "csatv2": ("csatv2", {}),
    "davit": ("davit_tiny", {}),
    "deepseek_vit": ("deepseek_vit_412m", {"depth": 2}),
    "deit": ("deit_tiny_patch16_224", {"img_size": 64, "depth": 2}),
    "edgenext": ("edgenext_xx_small", {}),
    "efficientformer": ("efficientformer_l1", {}),
    "efficientformer_v2": ("efficientformerv2_s0", {}),
    "efficientvit_mit": ("efficientvit_b0", {}),
    "efficientvit_msra": ("efficientvit_m0", {}),
    "eva": ("eva02_tiny_patch14_224", {"img_size": 56, "depth": 2}),
    "fastvit": ("fastvit_sa12", {}),
    "gcvit": ("gcvit_xxtiny", {}),
    "gemma4_vit": ("gemma4_vit_167m", {"depth": 2}),
    "hiera": ("hiera_tiny_224", {}),
    "hieradet_sam2": ("sam2_hiera_tiny", {}),
    "iformer": ("iformer_t", {}),
    "levit": ("levit_128s", {}),
    "lowformer": ("lowformer_b0", {}),
    "maxxvit": ("maxvit_pico_rw_256", {}),
    "metaformer": ("caformer_s18", {}),
    "mobilenetv3": ("mobilenetv4_hybrid_medium", {}),
    "mobilenetv5": ("mobilenetv5_base", {}),
    "mobilevit": ("mobilevit_xxs", {}),
    "mvitv2": ("mvitv2_tiny", {}),
    "naflexvit": ("naflexvit_base_patch16_gap", {"depth": 2}),
    "nest": ("nest_tiny", {}),
    "nextvit": ("nextvit_small", {}),
    "pit": ("pit_ti_224", {}),
    "pvt_v2": ("pvt_v2_b0", {}),
    "qwen3_vit": ("qwen3_vit_88m", {"depth": 2}),
    "shvit": ("shvit_s1", {}),
    "swiftformer": ("swiftformer_xs", {}),
    "swin_transformer": ("swin_tiny_patch4_window7_224", {"depths": (2, 2, 2, 2), "embed_dim": 48}),
    "swin_transformer_v2": ("swinv2_tiny_window8_256", {"depths": (2, 2, 2, 2), "embed_dim": 48}),
    "swin_transformer_v2_cr": ("swinv2_cr_tiny_224", {"depths": (2, 2, 2, 2), "embed_dim": 48}),
    "tiny_vit": ("tiny_vit_5m_224", {}),
    "tnt": ("tnt_s_patch16_224", {"depth": 2}),
    "twins": ("twins_svt_small", {}),
    "visformer": ("visformer_tiny", {}),
    "vision_transformer": ("vit_tiny_patch16_224", {"img_size": 64, "depth": 2}),
    "vision_transformer_hybrid": ("vit_small_r26_s32_224", {"depth": 2}),
    "vision_transformer_relpos": ("vit_relpos_small_patch16_224", {"img_size": 64, "depth": 2}),
    "vision_transformer_sam": ("samvit_base_patch16_224", {"depth": 4, "img_size": 224}),
    "vitamin": ("vitamin_small_224", {}),
    "volo": ("volo_d1_224", {}),
    "xcit": ("xcit_nano_12_p16_224", {"depth": 2}),
}
"""A small model of every module of timm with attention among tokens (or channels), and what shrinks it."""

SIDES = {
    "deepseek_vit_412m": 252,
    "gemma4_vit_167m": 192,
    "mobilenetv4_hybrid_medium": 224,
    "mobilenetv5_base": 256,
    "qwen3_vit_88m": 256,
    "sam2_hiera_tiny": 224,
    "swin_t": 64,
    "swin_v2_t": 64,
}
"""Of the images for models whose own are larger, or take long."""


_SMALL_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
_SMALL_SWIN: dict[str, Any] = {"img_size": 64, "depths": (2, 2), "embed_dim": 16, "num_heads": (2, 2)}

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("vit_tiny_patch16_224", _SMALL_VIT | {"class_token": False, "global_pool": "avg"}),
    ("vit_tiny_patch16_224", _SMALL_VIT | {"global_pool": "map"}),
    ("vit_tiny_patch16_224", _SMALL_VIT | {"qk_norm": True}),
    ("vit_tiny_patch16_224", _SMALL_VIT | {"init_values": 1e-5}),
    ("vit_tiny_patch16_224", _SMALL_VIT | {"dynamic_img_size": True}),
    ("vit_base_patch16_clip_224", _SMALL_VIT),
    ("vit_base_patch16_siglip_224", _SMALL_VIT),
    ("vit_base_patch16_rpn_224", _SMALL_VIT),
    ("deit_tiny_distilled_patch16_224", _SMALL_VIT),
    ("deit3_small_patch16_224", _SMALL_VIT),
    ("vit_small_patch14_dinov2", _SMALL_VIT),
    ("vit_small_patch14_reg4_dinov2", _SMALL_VIT),
    ("vit_giant_patch14_dinov2", _SMALL_VIT),
    ("vit_small_patch16_dinov3", _SMALL_VIT),
    ("vit_small_plus_patch16_dinov3", _SMALL_VIT),
    ("eva02_tiny_patch14_224", _SMALL_VIT),
    ("eva02_tiny_patch14_224", _SMALL_VIT | {"use_post_norm": True}),
    ("eva02_base_patch14_224", _SMALL_VIT),
    ("eva_giant_patch14_224", _SMALL_VIT),
    ("beit_base_patch16_224", _SMALL_VIT),
    ("beitv2_base_patch16_224", _SMALL_VIT),
    ("swin_tiny_patch4_window7_224", _SMALL_SWIN | {"window_size": 4}),
    ("swinv2_tiny_window8_256", _SMALL_SWIN | {"window_size": 4}),
    ("cait_xxs24_224", _SMALL_VIT),
    ("xcit_nano_12_p16_224", _SMALL_VIT | {"patch_size": 16}),
    ("xcit_nano_12_p8_224", _SMALL_VIT | {"patch_size": 8}),
    ("mixer_s32_224", {"img_size": 64}),
    ("resmlp_12_224", {"img_size": 64}),
    ("gmixer_12_224", {"img_size": 64}),
)
"""Of timm, beside these: other settings of the same classes, whose proofs are shipped too."""


@dataclass(frozen=True)
class Subject:
    """One model: of which library and kind, what it is called there, and how to build it."""

    library: str
    kind: str
    name: str
    build: Callable[[], nn.Module]

    @property
    def example(self) -> torch.Tensor | None:
        """An image where the library's own choice takes long; None for the others."""
        side = SIDES.get(self.name)
        return None if side is None else torch.randn(1, 3, side, side)

    def model(self) -> nn.Module:
        """The model in evaluation mode.

        What is constant in a fresh one (zero heads, ones as scales) would hide what an edit does, and is
        drawn at random.
        """
        torch.manual_seed(0)
        model = self.build().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.numel() > 1 and parameter.min() == parameter.max():
                    if parameter.ndim > 1:
                        parameter.normal_(std=max(parameter[0].numel(), 1) ** -0.5)
                    elif "bias" in name:
                        parameter.normal_(std=0.1)
                    else:
                        parameter.uniform_(0.5, 1.5)
        return model


def subjects() -> Iterator[Subject]:
    yield from timm_subjects()
    yield from torchvision_subjects()
    yield from transformers_subjects()


def timm_subjects() -> Iterator[Subject]:
    for kind, (name, options) in TIMM.items():
        yield Subject("timm", kind, name, partial(timm.create_model, name, **options))


def torchvision_subjects() -> Iterator[Subject]:
    models = torchvision.models
    for kind, name in (
        ("vision_transformer", "vit_b_16"),
        ("swin_transformer", "swin_t"),
        ("swin_transformer", "swin_v2_t"),
        ("maxvit", "maxvit_t"),
        ("video.swin_transformer", "swin3d_t"),
        ("video.mvit", "mvit_v2_s"),
    ):
        options = {"image_size": 64} if name == "vit_b_16" else {}
        build = _small_mvit if name == "mvit_v2_s" else partial(models.get_model, name, **options)
        yield Subject("torchvision", kind, name, build)


def _small_mvit() -> nn.Module:
    """MViT v2 with a block of each kind of its small model, for small videos; as it is, a pass takes long."""
    widths, heads, strides_q, strides_kv = (96, 96, 192, 192, 384), (1, 2, 2, 4), (1, 2, 1, 2), (8, 4, 4, 2)
    settings = [
        mvit.MSBlockConfig(heads[i], widths[i], widths[i + 1], [3] * 3, [3] * 3, [1, q, q], [1, kv, kv])
        for i, (q, kv) in enumerate(zip(strides_q, strides_kv, strict=True))
    ]
    return mvit.MViT(
        (64, 64),
        4,
        settings,
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
    )


_TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_VISION = _TINY | {"image_size": 32, "patch_size": 8}
_TEXT = _TINY | {"vocab_size": 60, "max_position_embeddings": 64}
_DECODER = _TEXT | {"num_key_value_heads": 1, "head_dim": 16}
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2]}
_SWIN |= {"window_size": 4}
_FOUR_STAGES = {"image_size": 64, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
_FOUR_STAGES |= {"num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2]}
_ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
_IDS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}

VISION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "AST": (
        "ASTModel",
        "ASTConfig",
        _TINY | {"max_length": 64, "num_mel_bins": 32},
    ),
    "BEiT": ("BeitModel", "BeitConfig", _VISION),
    "CLIP": (
        "CLIPModel",
        "CLIPConfig",
        {"vision_config": _VISION, "text_config": _TEXT | _IDS, "projection_dim": 16},
    ),
    "CLIP, vision": ("CLIPVisionModel", "CLIPVisionConfig", _VISION),
    "CvT": ("CvtModel", "CvtConfig", {"embed_dim": [16, 16, 32], "depth": [1, 2, 3], "num_heads": [1, 1, 2]}),
    "Data2Vec vision": ("Data2VecVisionModel", "Data2VecVisionConfig", _VISION),
    "DeiT": ("DeiTModel", "DeiTConfig", _VISION),
    "DETR": (
        "DetrModel",
        "DetrConfig",
        _ENCODER_DECODER
        | {
            "use_timm_backbone": True,
            "use_pretrained_backbone": False,
            "backbone": "resnet18",
            "num_queries": 5,
        },
    ),
    "DINOv2": ("Dinov2Model", "Dinov2Config", _VISION | {"mlp_ratio": 2}),
    "DINOv2 with registers": (
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersConfig",
        _VISION | {"mlp_ratio": 2},
    ),
    "DINOv3": ("DINOv3ViTModel", "DINOv3ViTConfig", _VISION),
    "DPT": ("DPTModel", "DPTConfig", _VISION | {"is_hybrid": False, "backbone_out_indices": [0, 1, 1, 1]}),
    "Hiera": (
        "HieraModel",
        "HieraConfig",
        {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]},
    ),
    "I-JEPA": ("IJepaModel", "IJepaConfig", _VISION),
    "LeViT": (
        "LevitModel",
        "LevitConfig",
        {
            "image_size": 128,
            "hidden_sizes": [32, 32, 32],
            "num_attention_heads": [2, 2, 2],
            "key_dim": [8, 8, 8],
            "depths": [1, 1, 1],
            "initializer_range": 0.3,
        },
    ),
    "MobileViT": (
        "MobileViTModel",
        "MobileViTConfig",
        {
            "image_size": 128,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32],
            "initializer_range": 0.3,
        },
    ),
    "PVT v2": ("PvtV2Model", "PvtV2Config", _FOUR_STAGES),
    "SAM, vision": (
        "SamVisionModel",
        "SamVisionConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
            "output_channels": 16,
            "window_size": 3,
            "initializer_range": 0.02,
            "global_attn_indexes": [1],
            "mlp_dim": 64,
        },
    ),
    "Segformer": ("SegformerModel", "SegformerConfig", _FOUR_STAGES),
    "SigLIP, vision": ("SiglipVisionModel", "SiglipVisionConfig", _VISION),
    "SigLIP 2, vision": ("Siglip2VisionModel", "Siglip2VisionConfig", _VISION | {"num_patches": 16}),
    "Swin": ("SwinModel", "SwinConfig", _SWIN),
    "Swin V2": ("Swinv2Model", "Swinv2Config", _SWIN),
    "TimeSformer": ("TimesformerModel", "TimesformerConfig", _VISION | {"num_frames": 2}),
    "VideoMAE": ("VideoMAEModel", "VideoMAEConfig", _VISION | {"num_frames": 4}),
    "ViT": ("ViTModel", "ViTConfig", _VISION),
    "ViTMAE": (
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        _VISION
        | {
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 64,
        },
    ),
    "ViTMSN": ("ViTMSNModel", "ViTMSNConfig", _VISION),
    "ViViT": ("VivitModel", "VivitConfig", _VISION | {"num_frames": 4, "tubelet_size": [2, 8, 8]}),
    "YOLOS": ("YolosModel", "YolosConfig", _VISION | {"image_size": [32, 32], "num_detection_tokens": 3}),
}
"""Of transformers, by what people call it: the model, its configuration and its settings."""

TEXT_AND_SOUND: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ALBERT": ("AlbertModel", "AlbertConfig", _TEXT | {"embedding_size": 16}),
    "BERT": ("BertModel", "BertConfig", _TEXT),
    "DistilBERT": (
        "DistilBertModel",
        "DistilBertConfig",
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 60},
    ),
    "GPT-2": (
        "GPT2Model",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 60, "n_positions": 64},
    ),
    "GPT-J": (
        "GPTJModel",
        "GPTJConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 60, "n_positions": 64, "rotary_dim": 8},
    ),
    "GPT-NeoX": ("GPTNeoXModel", "GPTNeoXConfig", _TEXT),
    "Llama": ("LlamaModel", "LlamaConfig", _DECODER),
    "Qwen3": ("Qwen3Model", "Qwen3Config", _DECODER),
    "T5, encoder": (
        "T5EncoderModel",
        "T5Config",
        {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 60},
    ),
    "wav2vec 2.0": (
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        _TINY
        | {
            "conv_dim": [16] * 2,
            "conv_stride": [5, 2],
            "conv_kernel": [10, 3],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
    "Whisper": (
        "WhisperModel",
        "WhisperConfig",
        _ENCODER_DECODER
        | _IDS
        | {
            "vocab_size": 60,
            "max_source_positions": 20,
            "max_target_positions": 20,
            "num_mel_bins": 16,
            "decoder_start_token_id": 2,
        },
    ),
}


TRANSFORMERS_VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ViTForImageClassification", "ViTConfig", _VISION),
    ("DeiTForImageClassification", "DeiTConfig", _VISION),
    ("Dinov2ForImageClassification", "Dinov2Config", _VISION | {"mlp_ratio": 2}),
    ("Dinov2ForImageClassification", "Dinov2Config", _VISION | {"mlp_ratio": 2, "use_swiglu_ffn": True}),
    ("BeitForImageClassification", "BeitConfig", _VISION | {"use_relative_position_bias": True}),
    ("SwinForImageClassification", "SwinConfig", _SWIN),
    ("SwinForImageClassification", "SwinConfig", _SWIN | {"drop_path_rate": 0.0}),
)
"""Of transformers, beside those of coverage: their models with a head, and other settings."""


def transformers_subjects() -> Iterator[Subject]:
    for kind, named in (("vision", VISION), ("text and sound", TEXT_AND_SOUND)):
        for name, (model, config, settings) in named.items():
            yield Subject("transformers", kind, name, partial(_of_transformers, model, config, settings))


def _of_transformers(model: str, config: str, settings: dict[str, Any]) -> nn.Module:
    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return built


def variants() -> Iterator[Subject]:
    for name, options in VARIANTS:
        for rate in (0.0, 0.1):
            settings = options | {"drop_path_rate": rate}
            build = partial(timm.create_model, name, **settings)
            yield Subject("timm", "variant", f"{name} {settings}", build)
    for model, config, settings in TRANSFORMERS_VARIANTS:
        build = partial(_of_transformers, model, config, settings)
        yield Subject("transformers", "variant", f"{model} {settings}", build)
