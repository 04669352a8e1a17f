"""Operations on tokens reach all tokens of an image and no others, whatever the model makes of them."""

import copy

import pytest
import timm
import torch
from torch import nn

import wellposed as wp


def video_swin() -> nn.Module:
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    torch.manual_seed(0)
    return SwinTransformer3d([2, 4, 4], 16, [2], [2], [2, 2, 2], num_classes=5).eval()


VIDEO = torch.randn(1, 3, 4, 16, 16, generator=torch.Generator().manual_seed(0))


def recorded(model: nn.Module, module: nn.Module) -> torch.Tensor:
    """What a module gives out in a run of the model, its other hooks included."""
    seen: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda module, args, output: seen.append(output))
    model(VIDEO)
    handle.remove()
    return seen[0]


def test_the_mean_in_a_video_model_is_over_time_and_space() -> None:
    model = video_swin()
    block = wp.anatomy.blocks(model, example=VIDEO)[0].module
    plain = recorded(model, block.mlp)
    wp.broadcast_context(model, blocks=0, example=VIDEO)
    mixed = recorded(model, block.mlp)
    assert plain.ndim == 5
    expected = (plain + plain.mean(dim=(1, 2, 3), keepdim=True)) / 2
    torch.testing.assert_close(mixed, expected)


def test_a_video_is_grayed_as_one_matrix() -> None:
    model = video_swin()
    embed = model.patch_embed
    wp.gray_tokens(model, 0.5, "svd", "blocks", blocks=0, example=VIDEO)
    block = wp.anatomy.blocks(model)[0].module
    plain = recorded(model, embed)
    block.norm1.register_forward_pre_hook(lambda module, args: grayed.append(args[0]))
    grayed: list[torch.Tensor] = []
    model(VIDEO)
    expected = wp.nn.functional.gray(plain.flatten(1, -2), 0.5, method="svd").reshape(plain.shape)
    torch.testing.assert_close(grayed[0], expected)


@pytest.mark.parametrize("edit", ["broadcast_context", "remove_skips", "diagnose"])
def test_pieces_of_an_image_are_no_images(edit: str) -> None:
    """MobileViT's blocks see each image as four of a quarter of its pixels."""
    model = timm.create_model("mobilevit_xxs").eval()
    x = torch.randn(2, 3, 64, 64)
    with pytest.raises(wp.SeamError, match="4 pieces of each image"):
        wp.diagnose(model, x) if edit == "diagnose" else getattr(wp, edit)(model)
    assert not wp.edits(model)


def test_cross_attention_has_skips_too() -> None:
    torch.manual_seed(0)
    model = timm.create_model("crossvit_tiny_240").eval()
    found = wp.anatomy.blocks(model)
    assert [type(block.module).__name__ for block in found].count("CrossAttentionBlock") == 6
    wp.remove_skips(model, "all")
    assert len(wp.edits(model)) == 15 * 2 + 6
    cross = next(block.module for block in found if type(block.module).__name__ == "CrossAttentionBlock")
    x = torch.randn(2, 5, cross.norm1.normalized_shape[0])
    torch.testing.assert_close(cross(x), cross.attn(cross.norm1(x)))


def test_stochastic_depth_without_a_skip_is_refused() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, drop_path_rate=0.2)
    with pytest.raises(
        ValueError, match=r"blocks\.1\.drop_path1 drops branches at a rate of 0\.2.*drop_path_rate=0"
    ):
        wp.remove_skips(model, "attention")
    assert not wp.edits(model)
    wp.remove_skips(model, "attention", allow_drop_path=True)
    assert len(wp.edits(model)) == 2
    plain = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    wp.remove_skips(plain, "attention")


def test_a_model_is_left_alone_where_one_block_is_refused() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, drop_path_rate=0.2)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match="drops branches"):
        wp.remove_skips(model, "ffn")
    assert [type(a) for a in model.modules()] == [type(b) for b in before.modules()]
