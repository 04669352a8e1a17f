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


def recorded(model: nn.Module, module: nn.Module, videos: torch.Tensor = VIDEO) -> torch.Tensor:
    """What a module gives out in a run of the model, its other hooks included."""
    seen: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda module, args, output: seen.append(output))
    model(videos)
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


def test_a_video_model_is_measured_on_videos() -> None:
    model = video_swin()
    videos = torch.cat([VIDEO, VIDEO.flip(2) * 0.3])
    diagnosis = wp.diagnose(model, videos)
    (kappa,) = diagnosis.select("kappa", block=0, position="ffn.branch")
    assert kappa.images == 2
    branch = recorded(model, wp.anatomy.blocks(model)[0].module.mlp, videos)
    wanted = wp.linalg.condition_number(branch.flatten(1, -2)).kappa.quantile(0.5)
    assert kappa.value == pytest.approx(float(wanted), rel=1e-3)
    with pytest.raises(ValueError, match=r"expected videos .* got a tensor of shape \(1, 3, 16, 16\)"):
        wp.diagnose(model, VIDEO[:, :, 0])


class InPieces(nn.Module):
    """MobileViT's way: blocks see each image as several, of some of its tokens each."""

    def __init__(self, images_first: bool = True) -> None:
        super().__init__()
        self.images_first = images_first
        self.embed = nn.Linear(12, 12)
        self.block = timm.models.vision_transformer.Block(12, 2)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, N, D = x.shape
        x = self.embed(x).reshape(B, N // 2, 2, D)
        x = x.permute(0, 2, 1, 3) if self.images_first else x.permute(2, 0, 1, 3)
        x = self.block(x.reshape(2 * B, N // 2, D)).reshape(-1, 2 * (N // 2) * D)
        return self.head(x.reshape(B, N, D))


def in_pieces(images_first: bool = True) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return InPieces(images_first).eval().double(), torch.randn(3, 8, 12, dtype=torch.float64)


def test_skips_are_removed_where_images_are_in_pieces() -> None:
    model, x = in_pieces()
    plain, block = model(x), model.block
    seen: list[torch.Tensor] = []
    handle = block.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    wp.remove_skips(model, "attention", example=x[:1])
    edited = model(x)
    handle.remove()
    y = block.attn(block.norm1(seen[-1]))
    torch.testing.assert_close(edited, model.head((y + block.mlp(block.norm2(y))).reshape(3, 8, 12)))
    wp.restore(model)
    assert torch.equal(model(x), plain)


def test_the_tokens_of_all_pieces_of_an_image_are_measured_together() -> None:
    model, x = in_pieces()
    (kappa,) = wp.diagnose(model, x).select("kappa", block=0, position="input")
    tokens = model.embed(x)  # in another order, which does not matter
    assert kappa.images == 3
    assert kappa.value == pytest.approx(
        float(wp.linalg.condition_number(tokens).kappa.quantile(0.5)), rel=1e-6
    )


@pytest.mark.parametrize("edit", ["broadcast_context", "gray_tokens"])
def test_no_operation_goes_where_images_are_in_pieces(edit: str) -> None:
    model, x = in_pieces()
    options = {"where": "blocks", "eps": 0.7} if edit == "gray_tokens" else {}
    with pytest.raises(ValueError, match="sees each image in pieces"):
        getattr(wp, edit)(model, example=x[:1], **options)
    assert not wp.edits(model)


def test_pieces_of_several_images_in_turn_are_refused() -> None:
    """Of (P B, N, D) the rows of one image are not together."""
    model, x = in_pieces(images_first=False)
    for what in (lambda: wp.diagnose(model, x), lambda: wp.remove_skips(model, example=x[:1])):
        with pytest.raises(wp.SeamError, match="which of them are of one image"):
            what()
    assert not wp.edits(model)


def test_a_block_in_pieces_elsewhere_is_itself_in_a_plain_model() -> None:
    model, x = in_pieces()
    wp.remove_skips(model, example=x[:1])
    plain = nn.Sequential(timm.models.vision_transformer.Block(12, 2))
    assert len(wp.broadcast_context(plain, example=x)) == 1


def test_mobilevit_is_measured() -> None:
    torch.manual_seed(0)
    model = timm.create_model("mobilevit_xxs").eval()
    found = wp.diagnose(model, torch.randn(2, 3, 64, 64), blocks=0)
    assert {record.images for record in found.select("kappa") + found.select("entropy")} == {2}


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
