"""What images a model takes: its size, its channels, and what becomes of a file, for every family."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from torch import Tensor, nn

from wellposed.probes.images import first_images, image_batches
from wellposed.probes.model_input import expected_channels, expected_size, model_transform
from zoo import BY_NAME, CASES, SIDE, Case, every_family, output

VIT = {"img_size": SIDE, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
HF = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": SIDE,
    "patch_size": 8,
}


def images(count: int, side: int = SIDE) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(3))


def picture(size: tuple[int, int] = (50, 40)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


# Preprocessing

# A flat grey picture is flat under every resizing, and tells the statistics.
GREY = Image.new("RGB", (60, 50), (128, 128, 128))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
NOT_IMAGENET = dict.fromkeys(("timm vit", "timm vit post-norm", "timm beit", "hf vit", "hf beit"), HALF)
NOT_IMAGENET |= dict.fromkeys(("timm eva", "timm eva post-norm"), CLIP)
WITHOUT_A_SIZE = ("timm pvt_v2", "timm convmixer", "torchvision swin", "torchvision swin_v2")

every_image_family = pytest.mark.parametrize(
    "case", [case for case in CASES if not case.tokens], ids=lambda case: case.name
)


def normalised(statistics: tuple[tuple[float, ...], tuple[float, ...]], side: int) -> Tensor:
    mean, std = (torch.tensor(values)[:, None, None] for values in statistics)
    return ((128 / 255 - mean) / std).expand(len(mean), side, side)


@every_image_family
def test_a_file_becomes_what_the_family_takes(case: Case):
    model = case.model()
    transform, sentence = model_transform(model)
    side = 224 if case.name in WITHOUT_A_SIZE else SIDE
    x = transform(GREY)
    torch.testing.assert_close(x, normalised(NOT_IMAGENET.get(case.name, IMAGENET), side))
    assert f"to {side} x {side} and normalised" in sentence
    assert expected_channels(model) == 3
    with torch.no_grad():
        output(model, x[None])


@pytest.mark.parametrize(
    ("case", "published"),
    [
        ("hf vit", "vit_base_patch16_224"),
        ("hf vitmae", "vit_base_patch16_224.mae"),
        ("hf deit", "deit_base_patch16_224"),
        ("hf beit", "beit_base_patch16_224"),
        ("hf dinov2", "vit_base_patch14_dinov2"),
        ("hf dinov3", "vit_base_patch16_dinov3"),
        ("hf swin", "swin_tiny_patch4_window7_224"),
    ],
)
def test_statistics_of_transformers_are_those_of_the_published_checkpoints(case, published):
    """As timm, which publishes the same checkpoints, says."""
    transform, _ = model_transform(BY_NAME[case].model())
    configuration = timm.get_pretrained_cfg(published)
    torch.testing.assert_close(transform(GREY), normalised((configuration.mean, configuration.std), SIDE))


def test_timm_resizes_as_its_configuration_says():
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    transform, sentence = model_transform(model)
    theirs = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    assert torch.equal(transform(picture((300, 260))), theirs(picture((300, 260))))
    assert "shorter side, bicubic, crop 0.9" in sentence


def test_grey_models(tmp_path: Path):
    picture().save(tmp_path / "colour.png")
    grey = torch.full((1, SIDE, SIDE), (128 / 255 - 0.5) / 0.5)
    for model in (
        timm.create_model("vit_tiny_patch16_224", in_chans=1, **VIT),
        timm.create_model("pvt_v2_b0", in_chans=1),
        transformers.ViTModel(transformers.ViTConfig(**{**HF, "num_channels": 1})),
    ):
        assert expected_channels(model) == 1
        x = first_images([tmp_path / "colour.png", GREY], model, 2)
        assert x.shape[1] == 1
        if x.shape[-1] == SIDE:
            torch.testing.assert_close(x[1], grey)
    with pytest.raises(ValueError, match="takes images of 1 channels, got 3"):
        image_batches(images(1), transformers.ViTModel(transformers.ViTConfig(**{**HF, "num_channels": 1})))


def test_a_model_of_many_channels_needs_a_transform():
    model = timm.create_model("vit_tiny_patch16_224", in_chans=5, **VIT)
    with pytest.raises(ValueError, match="1 or 3 channels for image files, got one of 5; pass transform="):
        first_images(GREY, model, 1)
    assert first_images(torch.zeros(1, 5, SIDE, SIDE), model, 1).shape[1] == 5


def test_a_saved_image_processor_is_used(tmp_path):
    transformers.ViTModel(transformers.ViTConfig(**HF)).save_pretrained(tmp_path)
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    size = {"height": SIDE, "width": SIDE}
    transformers.ViTImageProcessor(size=size, image_mean=mean, image_std=std).save_pretrained(tmp_path)
    model = transformers.ViTModel.from_pretrained(tmp_path)
    batches = image_batches([GREY], model)
    (batch,) = batches
    torch.testing.assert_close(batch[0], normalised((tuple(mean), tuple(std)), SIDE))
    assert batches.notes == [f"Files were preprocessed by the ViTImageProcessor saved in {tmp_path}."]


def test_a_model_of_ones_own_may_do_anything():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = timm.create_model("vit_tiny_patch16_224", **VIT)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(nn.functional.interpolate(x.expand(-1, 3, -1, -1), SIDE))

    own = Own()
    assert expected_size(own) is None
    assert first_images(images(2, 40)[:, :1], own, 2).shape == (2, 1, 40, 40)
    assert first_images(GREY, own, 1).shape == (1, 3, SIDE, SIDE)  # its body says what it takes
    _, sentence = model_transform(nn.Conv2d(3, 4, 3))
    assert "to 224 x 224 and normalised with mean 0.485, 0.456, 0.406" in sentence
    assert "as usual for ImageNet" in sentence


# Sizes

INSIST = {
    *("timm vit", "timm deit", "timm deit3", "timm dinov2", "timm dinov2 giant", "timm vit post-norm"),
    *("timm eva", "timm eva post-norm", "timm beit", "timm swin", "timm swinv2", "timm cait", "timm mixer"),
    *("timm resmlp", "hf vit", "hf deit", "hf vitmae", "torchvision vit"),
}


@every_family
def test_expected_size_is_what_the_model_insists_on(case: Case):
    model = case.model()
    size = expected_size(model)
    assert size == ((SIDE, SIDE) if case.name in INSIST else None)
    if case.tokens:
        return
    other = images(1, 64)[:, :, :48]
    with torch.no_grad():
        model(images(1, case.side))
        if size is None:
            model(other)
            assert first_images(other, model, 1).shape == other.shape
        else:
            with pytest.raises((AssertionError, ValueError), match=r"48|64"):
                model(other)
            with pytest.raises(ValueError, match="the model takes images of 32 x 32, got 48 x 64"):
                image_batches(other, model)


SETTINGS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int] | None]] = {
    "timm pair": (
        lambda: timm.create_model("vit_tiny_patch16_224", **{**VIT, "img_size": (32, 48)}),
        (32, 48),
    ),
    "timm dynamic": (lambda: timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **VIT), None),
    "timm swin": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", strict_img_size=False, depths=(1, 1, 1, 1)),
        None,
    ),
    "timm hybrid": (lambda: timm.create_model("vit_tiny_r_s16_p8_224", depth=1), (224, 224)),
    "hf pair": (
        lambda: transformers.ViTModel(transformers.ViTConfig(**{**HF, "image_size": (32, 48)})),
        (32, 48),
    ),
    "hf swin with positions": (
        lambda: transformers.SwinModel(
            transformers.SwinConfig(
                image_size=32,
                embed_dim=16,
                depths=[1],
                num_heads=[2],
                window_size=4,
                use_absolute_embeddings=True,
            )
        ),
        (32, 32),
    ),
    "hf beit with positions": (
        lambda: transformers.BeitModel(transformers.BeitConfig(**HF, use_absolute_position_embeddings=True)),
        None,
    ),
    "resnet": (lambda: timm.create_model("resnet10t"), None),
}


@pytest.mark.parametrize(("make", "size"), SETTINGS.values(), ids=SETTINGS.keys())
def test_expected_size_follows_the_options(make, size):
    model = make().eval()
    assert expected_size(model) == size
    with torch.no_grad():
        model(torch.randn(1, 3, *(size or (64, 64))))
        if size is not None:
            with pytest.raises((AssertionError, ValueError, RuntimeError)):
                model(torch.randn(1, 3, 96, 96))


@pytest.mark.parametrize(("default", "size"), [(False, (SIDE, SIDE)), (None, None)])
def test_positions_that_are_interpolated_unless_told_otherwise(default, size):
    """As BEiT's are in some versions of transformers: None means that they are."""

    class Embeddings(nn.Module):
        __module__ = "transformers.models.made_up"
        image_size = (SIDE, SIDE)

        def interpolate_pos_encoding(self, x: Tensor) -> Tensor:
            return x

        def forward(self, x: Tensor, interpolate_pos_encoding: bool | None = default) -> Tensor:
            return x

    assert expected_size(Embeddings()) == size
