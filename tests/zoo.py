"""One tiny model of every family, with random weights, and an input for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

SIDE = 32


@dataclass(frozen=True)
class Case:
    """How to build a family's model, and what is true of it."""

    name: str
    build: Callable[[], nn.Module]
    blocks: int
    roles: tuple[str, ...] = ("attention", "ffn")
    has_mlp: bool = True
    has_attention: bool = True
    has_embedding: bool = True
    has_pixels: bool = True
    side: int = SIDE
    tokens: tuple[int, int] | None = None  # for models that take tokens (L, C), not images

    @property
    def library(self) -> str:
        prefix = self.name.split()[0]
        return {"hf": "transformers"}.get(prefix, prefix)

    def model(self, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(seed)
        model = self.build()
        # Fresh models have near-uniform attention, tiny layer scales and zero heads, which would hide
        # what an edit does.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "bias" in name:
                    parameter.normal_(std=0.1)
                elif parameter.ndim < 2:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=1.5 * max(parameter[0].numel(), 1) ** -0.5)
        return model.to(dtype).eval()

    def input(self, batch: int = 2, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, *self.tokens) if self.tokens else (batch, 3, self.side, self.side)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def output(model: nn.Module, x: Tensor) -> Tensor:
    """The logits or last tokens of a model of any library."""
    out: Any = model(x, **_without_chance(model, x))
    for name in ("logits", "last_hidden_state"):
        if hasattr(out, name):
            return getattr(out, name)
    return out


def _without_chance(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """MAE masks the patches with the largest noise, and draws it at random unless it is given."""
    if "ViTMAE" not in type(model).__name__:
        return {}
    patches = (SIDE // 8) ** 2
    noise = torch.arange(patches, device=x.device, dtype=x.dtype) * 7 % patches
    return {"noise": noise.expand(x.shape[0], patches)}


def _timm(name: str, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=5, **kwargs)


_VIT = {"img_size": SIDE, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def _pvt() -> nn.Module:
    from timm.models.pvt_v2 import PyramidVisionTransformerV2

    return PyramidVisionTransformerV2(
        num_classes=5,
        depths=(1, 1, 1, 1),
        embed_dims=(16, 16, 32, 32),
        num_heads=(1, 1, 2, 2),
        sr_ratios=(4, 2, 1, 1),
        mlp_ratios=(2.0, 2.0, 2.0, 2.0),
    )


def _convmixer() -> nn.Module:
    from timm.models.convmixer import ConvMixer

    return ConvMixer(dim=16, depth=2, kernel_size=3, patch_size=8, num_classes=5)


def _hf(model: str, config: str, **kwargs: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        settings = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": SIDE,
            "patch_size": 8,
        }
        if model.startswith("Swin"):
            settings = {"image_size": SIDE}
        settings |= kwargs
        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


def _torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(SIDE, 8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5)


def _torchvision_swin(version: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from torchvision.models import swin_transformer as swin

        extra = (
            {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
            if version == 2
            else {}
        )
        return swin.SwinTransformer(
            [4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=5, stochastic_depth_prob=0.0, **extra
        )

    return build


def _encoder(norm_first: bool, batch_first: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            32, 2, 64, dropout=0.0, norm_first=norm_first, batch_first=batch_first
        )
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    return build


_SWIN = {"img_size": SIDE, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)}
_SWIN |= {"drop_path_rate": 0.0}


def _mixer(block: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from timm.models import mlp_mixer

        return mlp_mixer.MlpMixer(
            num_classes=5,
            img_size=SIDE,
            patch_size=8,
            num_blocks=2,
            embed_dim=32,
            mlp_ratio=(0.5, 4.0) if block == "MixerBlock" else 4.0,
            block_layer=getattr(mlp_mixer, block),
        )

    return build


CASES = (
    Case("timm vit", _timm("vit_tiny_patch16_224", **_VIT), 2),
    Case("timm deit", _timm("deit_tiny_distilled_patch16_224", **_VIT), 2),
    Case("timm deit3", _timm("deit3_small_patch16_224", **_VIT), 2),
    Case("timm dinov2", _timm("vit_small_patch14_reg4_dinov2", **_VIT), 2),
    Case("timm dinov2 giant", _timm("vit_giant_patch14_dinov2", **_VIT), 2),
    Case("timm vit post-norm", _timm("vit_base_patch16_rpn_224", **_VIT), 2),
    Case("timm dinov3", _timm("vit_small_patch16_dinov3", **_VIT), 2),
    Case("timm eva", _timm("eva02_tiny_patch14_224", **_VIT), 2),
    Case("timm eva post-norm", _timm("eva02_tiny_patch14_224", use_post_norm=True, **_VIT), 2),
    Case("timm beit", _timm("beit_base_patch16_224", **_VIT), 2),
    Case("timm swin", _timm("swin_tiny_patch4_window7_224", **_SWIN), 4),
    Case("timm swinv2", _timm("swinv2_tiny_window8_256", **_SWIN), 4),
    Case("timm cait", _timm("cait_xxs24_224", **_VIT), 4),
    Case("timm pvt_v2", _pvt, 4, has_pixels=False, side=64),
    Case(
        "timm xcit",
        _timm("xcit_nano_12_p16_224", **{**_VIT, "patch_size": 16}),
        4,
        roles=("attention", "local", "ffn"),
        has_pixels=False,
    ),
    Case(
        "timm mixer",
        _mixer("MixerBlock"),
        2,
        roles=("mixer", "ffn"),
        has_attention=False,
    ),
    Case(
        "timm resmlp",
        _mixer("ResBlock"),
        2,
        roles=("mixer", "ffn"),
        has_attention=False,
    ),
    Case("timm convmixer", _convmixer, 2, roles=("mixer",), has_mlp=False, has_attention=False),
    Case("hf vit", _hf("ViTForImageClassification", "ViTConfig"), 2),
    Case("hf deit", _hf("DeiTForImageClassification", "DeiTConfig"), 2),
    Case(
        "hf vitmae",
        _hf(
            "ViTMAEForPreTraining",
            "ViTMAEConfig",
            decoder_hidden_size=32,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=64,
        ),
        3,
    ),
    Case("hf dinov2", _hf("Dinov2ForImageClassification", "Dinov2Config", mlp_ratio=2), 2),
    Case(
        "hf dinov2 swiglu",
        _hf("Dinov2ForImageClassification", "Dinov2Config", mlp_ratio=2, use_swiglu_ffn=True),
        2,
    ),
    Case("hf dinov3", _hf("DINOv3ViTModel", "DINOv3ViTConfig"), 2),
    Case(
        "hf beit",
        _hf("BeitForImageClassification", "BeitConfig", use_relative_position_bias=True, drop_path_rate=0.0),
        2,
    ),
    Case(
        "hf swin",
        _hf(
            "SwinForImageClassification",
            "SwinConfig",
            patch_size=4,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 2],
            window_size=4,
            drop_path_rate=0.0,
        ),
        4,
    ),
    Case("torchvision vit", _torchvision_vit, 2),
    Case("torchvision swin", _torchvision_swin(1), 4),
    Case("torchvision swin_v2", _torchvision_swin(2), 4),
    Case("torch encoder", _encoder(False, True), 2, has_embedding=False, has_pixels=False, tokens=(9, 32)),
    Case(
        "torch encoder pre-norm",
        _encoder(True, False),
        2,
        has_embedding=False,
        has_pixels=False,
        tokens=(9, 32),
    ),
)

BY_NAME = {case.name: case for case in CASES}
WITH_EMBEDDING = tuple(case.name for case in CASES if case.has_embedding)
every_family = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

KINDS = {
    "timm vit": "queries, keys and values of one layer; tokens (B, N, C)",
    "timm eva": "rotary positions, which the block's call takes; SwiGLU",
    "timm beit": "fused attention with a position bias; layer scales",
    "timm swin": "windows that are shifted; tokens (B, H, W, C)",
    "timm cait": "class attention in blocks of its own; heads mixed before the softmax",
    "timm pvt_v2": "stages; keys of fewer tokens",
    "timm xcit": "attention over channels; a third skip",
    "timm resmlp": "no attention; tokens mixed by a linear layer",
    "timm convmixer": "no attention and no MLP; images (B, C, H, W)",
    "hf vit": "a layer of transformers, with a wrapped forward pass",
    "hf vitmae": "an encoder and a decoder, and positions that are left out",
    "hf beit": "fused attention of transformers with a position bias",
    "hf swin": "windows of transformers; a tuple comes out of a block",
    "torchvision vit": "nn.MultiheadAttention: packed parameters",
    "torch encoder pre-norm": "tokens (N, B, C), without an embedding",
}
"""Families that differ in what an edit or a probe meets. The rest are close to one of these."""


def some_families(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrise a test over the families, of which it runs on these; on all with ``--every-setting``."""
    return lambda test: pytest.mark.some_families(*names)(every_family(test))


each_kind = some_families(*KINDS)


def families(*names: str) -> pytest.MarkDecorator:
    """Parametrise a test over some of the families."""
    return pytest.mark.parametrize("case", [BY_NAME[name] for name in names], ids=lambda case: case.name)
