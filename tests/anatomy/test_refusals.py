"""What a refusal says to do: the class to teach, and the model of timm that is built alike."""

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models.swin_transformer import SwinTransformerBlock
from transformers.models.beit.modeling_beit import BeitLayer

import wellposed as wp
from wellposed.anatomy.model import refusal, timm_twin


class Layer(nn.Module):
    """It adds nothing to what it is given, so it is no block."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mix(x)
        return out


class DinoVisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Layer(), Layer(), Layer())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


def test_a_model_without_blocks_is_told_the_class_and_its_twin() -> None:
    with pytest.raises(wp.UnknownModelError) as caught:
        wp.remove_skips(DinoVisionTransformer(), example=torch.randn(2, 3, 8))
    said = str(caught.value)
    assert "The class to teach may be Layer, which is repeated in it." in said
    assert "timm has models of this kind in timm.models.vision_transformer; try one" in said


def test_a_model_without_a_twin() -> None:
    with pytest.raises(wp.UnknownModelError) as caught:
        wp.remove_skips(nn.Sequential(nn.Linear(8, 8)), example=torch.randn(2, 3, 8))
    assert "timm has models" not in str(caught.value)
    assert "The class to teach" not in str(caught.value)


def test_a_block_that_is_refused_is_named_as_the_class_to_teach() -> None:
    model = timm.create_model("mobilevitv2_050")
    found = [block for block in wp.anatomy.blocks(model) if block.row.refused]
    assert str(refusal(found[:1])).endswith(
        "Describe LinearTransformerBlock with wellposed.anatomy.teach, or install a version that is tested."
    )


def test_twins_of_other_libraries() -> None:
    assert "timm.models.swin_transformer;" in timm_twin(SwinTransformerBlock)
    assert "timm.models.beit;" in timm_twin(BeitLayer)
    assert timm_twin(type(timm.create_model("test_vit"))) == ""
