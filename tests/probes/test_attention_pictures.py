"""Pictures of attention: the model's own weights on the grid of its patches, on the page and as a figure."""

import base64
import io

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import wellposed as wp
import zoo
from untouched import assert_same, fingerprint
from wellposed.probes import attention_pictures
from wellposed.probes.attention_pictures import grid_of, rollout
from wellposed.records import Record
from wellposed.report.attention import overlay, pictures_of
from wellposed.report.page import diagnosis_page

VIT = zoo.BY_NAME["timm vit"]
SIZE = {"img_size": (48, 32), "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 4}


def vit(**options) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **SIZE | options).eval()
    with torch.no_grad():  # attention that is not uniform
        for block in model.blocks:
            block.attn.qkv.weight.mul_(20)
    return model


def images(count: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 48, 32, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def by_hand(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The attention (H, N, N) of each block of timm's ViT, in float64."""
    model = model.double()
    maps = []
    x = model.norm_pre(model._pos_embed(model.patch_embed(x.double())))
    for block in model.blocks:
        attention, y = block.attn, block.norm1(x)
        q, k, _ = attention.qkv(y).reshape(1, -1, 3, 4, 12).permute(2, 0, 3, 1, 4)
        maps.append((q @ k.mT / 12**0.5).softmax(-1)[0])
        x = block(x)
    model.float()
    return maps


@pytest.mark.parametrize("registers", [0, 4])
def test_the_weights_are_those_of_the_class_token(registers: int) -> None:
    model = vit(reg_tokens=registers)
    before = fingerprint(model)
    records = attention_pictures(model, images(3))
    assert_same(before, fingerprint(model))
    maps = by_hand(model, images(3)[:1])
    prefix = 1 + registers
    pictures = {(r.block, r.head): r for r in records if r.measure == "attention picture"}
    assert len(pictures) == 3 * (1 + 4)
    for (block, head), record in pictures.items():
        p = maps[block].mean(0) if head is None else maps[block][head]
        assert record.shape == (6, 4)
        assert list(record.curve) == pytest.approx(p[0, prefix:].tolist(), rel=1e-3, abs=1e-5)
    (through,) = (r for r in records if r.measure == "attention rollout")
    expected = torch.eye(24 + prefix, dtype=torch.float64)
    for p in maps:
        expected = (p.mean(0) + torch.eye(24 + prefix, dtype=torch.float64)) / 2 @ expected
    assert list(through.curve) == pytest.approx(expected[0, prefix:].tolist(), rel=1e-3, abs=1e-5)
    assert through.note == "of the class token; through 3 of 3 blocks"


def test_rollout_keeps_rows_that_sum_to_one() -> None:
    maps = [torch.rand(2, 5, 5, dtype=torch.float64).softmax(-1) for _ in range(4)]
    torch.testing.assert_close(rollout(maps).sum(-1), torch.ones(5, dtype=torch.float64))


def test_without_a_class_token_it_is_the_mean_over_queries() -> None:
    model = vit(class_token=False, global_pool="avg")
    record = next(r for r in attention_pictures(model, images()) if r.measure == "attention picture")
    assert record.note == "mean over the queries"
    expected = by_hand(model, images())[0].mean(0).mean(0)
    assert list(record.curve) == pytest.approx(expected.tolist(), rel=1e-3)


@pytest.mark.parametrize(
    ("tokens", "size", "expected"),
    [
        (197, (224, 224), (14, 14)),
        (201, (224, 224), (14, 14)),
        (257, (224, 224), (16, 16)),
        (25, (48, 32), (6, 4)),
        (3, (224, 224), (1, 1)),
        (24, (224, 224), None),
        (40, (224, 224), None),
    ],
)
def test_grids(tokens: int, size: tuple[int, int], expected: tuple[int, int] | None) -> None:
    assert grid_of(tokens, size) == expected


def test_the_image_is_small_and_grey() -> None:
    image = next(r for r in attention_pictures(VIT.model(), VIT.input(1)) if r.measure == "image")
    assert image.shape == (32, 32)
    grey = VIT.input(1)[0].double().mean(0)
    expected = (grey - grey.min()) / (grey.max() - grey.min())
    assert list(image.curve) == pytest.approx(expected.flatten().tolist(), abs=1e-3)


@zoo.families("timm swin", "timm pvt_v2", "timm xcit")
def test_what_has_no_picture_says_why(case: zoo.Case) -> None:
    model, x = case.model(), case.input(1)
    records = [r for r in attention_pictures(model, x) if r.status == "not measured"]
    assert records
    words = {"timm swin": "windows", "timm pvt_v2": "no patches", "timm xcit": "channels"}
    assert any(words[case.name] in record.note for record in records)


def test_a_model_without_attention() -> None:
    mixer = zoo.BY_NAME["timm mixer"]
    with pytest.raises(ValueError, match="expected a block with attention over tokens"):
        attention_pictures(mixer.model(), mixer.input(1))


def test_texts_have_none() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    with pytest.raises(ValueError, match=r"expected an image \(1, C, H, W\) to picture attention over"):
        attention_pictures(transformers.BertModel(config), torch.tensor([[5, 6, 7]]))


def test_an_overlay_is_red_where_the_weight_is() -> None:
    (image, block, *_) = attention_pictures(vit(), images())
    picture = overlay(block, image)
    assert picture.shape == (112, 75, 3)
    top = max(range(24), key=block.curve.__getitem__)
    row, column = divmod(top, 4)
    there = picture[(2 * row + 1) * 112 // 12, (2 * column + 1) * 75 // 8]
    assert there[0] - there[1] > 100
    assert (picture[..., 0] >= picture[..., 1] - 1e-9).all()


def test_the_scale_tells_weights_that_differ_and_not_those_that_hardly_do() -> None:
    def reds(*curve: float) -> list[float]:
        record = Record(measure="attention picture", value=None, shape=(1, len(curve)), curve=curve)
        picture = overlay(record, None)
        columns = [(2 * index + 1) * picture.shape[1] // (2 * len(curve)) for index in range(len(curve))]
        return [float(picture[0, column, 0] - picture[0, column, 1]) for column in columns]

    spread = reds(0.2, 0.3, 0.6)
    assert spread[0] == 0
    assert spread[1] == pytest.approx(spread[2] / 4)  # of 0.2 to 0.6
    alike = reds(0.99, 1.0)
    assert alike[0] == pytest.approx(0.98 * alike[1])


def test_on_the_page_and_as_figures(tmp_path) -> None:
    diagnosis = wp.diagnose(vit(), images(), what="attention")
    assert not diagnosis.select("kappa")
    diagnosis.save(tmp_path)
    again = wp.Diagnosis.from_json(tmp_path / "diagnosis.json")
    assert again.records == diagnosis.records
    page = diagnosis_page(again.records, again.about)
    pictures = pictures_of(again.records)
    assert len(pictures) == 3 * 5 + 1
    for record, picture in pictures:
        drawn = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture.partition(",")[2]))).convert("RGB"))
        assert drawn.shape[:2] == (112, 75)
        on_page = record.head is None or record.block == 2
        assert (picture in page) == on_page
    pytest.importorskip("matplotlib")
    for choice in ({}, {"block": 1}, {"block": 2, "head": 3}):
        file = tmp_path / "picture.png"
        again.save_attention(file, **choice)
        assert Image.open(file).size == (600, 660)
        file.unlink()
    with pytest.raises(
        ValueError, match=r"expected a picture of block 9, head None in the records, which have"
    ):
        again.save_attention(tmp_path / "none.png", block=9)
