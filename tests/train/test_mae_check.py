"""Models and sizes that a masked autoencoder does not take, refused with the reason."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from mae_models import TINY, build, encoder, inputs
from wellposed.train.mae import MaskedAutoencoder, check_mae, decoder_size


def _swin() -> nn.Module:
    return timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        embed_dim=16,
        depths=(1, 1),
        num_heads=(2, 2),
        window_size=4,
    )


def _convmixer() -> nn.Module:
    from timm.models.convmixer import ConvMixer

    return ConvMixer(dim=16, depth=1, kernel_size=3, patch_size=8)


def _pvt() -> nn.Module:
    return timm.create_model(
        "pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 8, 8, 8), num_heads=(1, 1, 1, 1)
    )


def _hybrid() -> nn.Module:
    from timm.layers import HybridEmbed

    def embed(dynamic_img_pad: bool, **options: Any) -> HybridEmbed:
        return HybridEmbed(nn.Conv2d(3, 8, 3, 4, 1), **options)

    return timm.create_model("vit_tiny_patch16_224", **{**TINY, "patch_size": 1}, embed_layer=embed)


def _compiled() -> nn.Module:
    model = encoder()
    model.compile()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_swin, "got SwinTransformer: its windows need the whole grid"),
        (_convmixer, "got ConvMixer: its convolutions need"),
        (_pvt, "got PyramidVisionTransformerV2: it shrinks the grid"),
        (
            lambda: timm.create_model("cait_xxs24_224", depth=1, embed_dim=32, num_heads=2),
            "got Cait: its class",
        ),
        (
            lambda: timm.create_model("eva02_tiny_patch14_224", depth=1),
            "got Eva: its attention gets",
        ),
        (lambda: nn.Linear(2, 2), "got Linear: it is not a VisionTransformer of timm; use a ViT of timm"),
        (_hybrid, "embedded one by one, got VisionTransformer: "),
        (lambda: encoder(patch_drop_rate=0.5), "leave patch_drop_rate out"),
        (lambda: encoder(img_size=18), "multiple of the patch size 4 x 4, got 18 x 18"),
        (_compiled, "expected a plain model, but the model is compiled"),
    ],
)
def test_models_that_do_not_fit(make, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        check_mae(model)


def test_a_forward_of_its_own_does_not_fit():
    class Own(timm.models.vision_transformer.VisionTransformer):
        def forward_features(self, x: Tensor) -> Tensor:
            return super().forward_features(x.flip(-1))

    with pytest.raises(ValueError, match="Own has a forward_features of its own"):
        check_mae(Own(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=1))


def test_sizes_that_do_not_fit():
    mae = build(norm_pixels=True)
    images, noise = inputs(mae, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"images must be \(B, 3, 16, 16\), got \(2, 3, 16, 8\)"):
        mae(images[..., :8], noise)
    with pytest.raises(ValueError, match=r"noise must be \(2, 16\), one number a patch, got \(2, 9\)"):
        mae(images, noise[:, :9])
    with pytest.raises(ValueError, match="leaves 0 visible"):
        build(mask_ratio=0.99)
    with pytest.raises(ValueError, match=r"decoder_width must be a multiple of 4.*got 30"):
        build(decoder_width=30)
    one = encoder(img_size=4, patch_size=1, in_chans=1)
    with pytest.raises(ValueError, match="a patch of one value cannot be standardised"):
        MaskedAutoencoder(one, mask_ratio=0.5)
    MaskedAutoencoder(one, mask_ratio=0.5, norm_pixels=False)


@pytest.mark.parametrize(
    ("width", "heads", "wanted", "size"),
    [
        (768, 12, None, (384, 6)),
        (192, 3, None, (128, 2)),
        (18, 6, None, (12, 4)),
        (192, 3, 96, (96, 1)),
        (768, 12, 196, (196, 2)),
    ],
)
def test_decoder_sizes(width, heads, wanted, size):
    assert decoder_size(width, heads, wanted) == size
