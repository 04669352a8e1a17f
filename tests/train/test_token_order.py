"""The order of tokens in memory: the same numbers, near to each other."""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

from wellposed import surgery
from wellposed.anatomy import blocks
from wellposed.train import Recipe
from wellposed.train.model import make_task, order_tokens


def vit(**options: object) -> nn.Module:
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 5} | options
    return timm.create_model("vit_tiny_patch16_224", **options)


def inputs_of_blocks(model: nn.Module, images: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    handles = [
        block.module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        for block in blocks(model)
    ]
    model(images)
    for handle in handles:
        handle.remove()
    return seen


def test_every_block_of_a_pooled_model_gets_ordered_tokens() -> None:
    model, images = vit(class_token=False, global_pool="avg"), torch.randn(3, 3, 32, 32)
    before = inputs_of_blocks(model, images)
    assert not any(tokens.is_contiguous() for tokens in before), "timm orders them itself now"
    order_tokens(model)
    after = inputs_of_blocks(model, images)
    assert all(tokens.is_contiguous() for tokens in after)
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("options", [{}, {"class_token": False, "global_pool": "avg"}])
def test_gradients_are_those_of_the_model_without(options: dict[str, object]) -> None:
    plain, images = vit(**options), torch.randn(3, 3, 32, 32)
    ordered = copy.deepcopy(plain)
    order_tokens(ordered)
    for model in (plain, ordered):
        model(images).square().sum().backward()
    for (name, one), other in zip(plain.named_parameters(), ordered.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_graying_of_the_embedding_reads_ordered_tokens() -> None:
    model = vit(class_token=False, global_pool="avg")
    surgery.gray_tokens(model, 0.7, "dct", "embedding")
    seen: list[bool] = []
    graying = model.patch_embed.inserted_after
    graying.register_forward_pre_hook(lambda module, args: seen.append(args[0].is_contiguous()))
    order_tokens(model)
    model(torch.randn(2, 3, 32, 32))
    assert seen == [True]


def test_training_orders_them() -> None:
    model = vit(class_token=False, global_pool="avg")
    task = make_task(model, Recipe())
    assert all(tokens.is_contiguous() for tokens in inputs_of_blocks(task.trunk, torch.randn(2, 3, 32, 32)))


def test_images_stay_as_they_are() -> None:
    embedding = timm.layers.PatchEmbed(img_size=32, patch_size=8, embed_dim=16, output_fmt="NCHW")
    images = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    before = embedding(images)
    order_tokens(embedding)
    after = embedding(images)
    assert after.stride() == before.stride()
    torch.testing.assert_close(after, before)
