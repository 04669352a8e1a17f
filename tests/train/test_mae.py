"""Masked autoencoder: against loops in float64, with every edit; what hidden patches tell; masks."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from mae_models import FAMILIES, all_edits, build, grayed_embedding, inputs
from wellposed.nn.functional import gray
from wellposed.train.mae import mae_warnings, mask_noise, mask_of, visible_count
from wellposed.train.recipe import Recipe

# Against a reference


def reference_pixels(image: Tensor, row: int, column: int, mae: Any) -> list[Tensor]:
    """A patch's values, channel by channel."""
    height, width = mae.patch_size
    return [
        image[channel, row * height + y, column * width + x]
        for channel in range(mae.channels)
        for y in range(height)
        for x in range(width)
    ]


def reference(
    mae: Any, images: Tensor, noise: Tensor, grayed: bool
) -> tuple[Tensor, Tensor, list[list[bool]]]:
    """Loss, predictions and mask, one patch after another."""
    vit, decoder = mae.encoder, mae.decoder
    cells = [(row, column) for row in range(mae.grid[0]) for column in range(mae.grid[1])]
    hidden_count = round(len(cells) * 0.6)
    kernel = vit.patch_embed.proj.weight.flatten(1)
    offset = 0 if vit.no_embed_class else mae.prefix
    masks, predictions, losses = [], [], []
    for image, numbers in zip(images, noise.tolist(), strict=True):
        patches = [torch.stack(reference_pixels(image, row, column, mae)) for row, column in cells]
        tokens = [kernel @ patch for patch in patches]
        if vit.patch_embed.proj.bias is not None:
            tokens = [token + vit.patch_embed.proj.bias for token in tokens]
        if grayed:
            tokens = list(gray(torch.stack(tokens), 0.7, "svd"))
        if vit.pos_embed is not None:
            tokens = [token + vit.pos_embed[0, offset + i] for i, token in enumerate(tokens)]
        prefix = [
            token[0, i]
            for token in (vit.cls_token, vit.reg_token, getattr(vit, "dist_token", None))
            if token is not None
            for i in range(token.shape[1])
        ]
        if vit.pos_embed is not None and not vit.no_embed_class:
            prefix = [token + vit.pos_embed[0, i] for i, token in enumerate(prefix)]

        hidden = set(sorted(range(len(cells)), key=lambda i: numbers[i])[len(cells) - hidden_count :])
        visible = [i for i in range(len(cells)) if i not in hidden]
        x = torch.stack([*prefix, *(tokens[i] for i in visible)])[None]
        x = vit.norm(vit.blocks(vit.norm_pre(x)))
        seen = decoder.embed(decoder.norm_input(x))[0]
        rows = list(seen[: mae.prefix])
        for i in range(len(cells)):
            token = decoder.mask_token[0, 0] if i in hidden else seen[mae.prefix + visible.index(i)]
            rows.append(token + decoder.positions[0, i])
        predicted = decoder.to_pixels(decoder.norm(decoder.blocks(torch.stack(rows)[None])))[0, mae.prefix :]

        masks.append([i in hidden for i in range(len(cells))])
        predictions.append(predicted)
        for i in hidden:
            target = patches[i]
            if mae.norm_pixels:
                mean = sum(target) / len(target)
                variance = sum((value - mean) ** 2 for value in target) / (len(target) - 1)
                target = (target - mean) / (variance + 1e-6).sqrt()
            losses += [(a - b) ** 2 for a, b in zip(predicted[i], target, strict=True)]
    return sum(losses) / len(losses), torch.stack(predictions), masks


@pytest.mark.parametrize(
    ("family", "edit", "norm_pixels"),
    [
        *((family, id, True) for family in FAMILIES),
        ("oblong", id, False),
        ("class token", grayed_embedding, True),
        ("dynamic size", grayed_embedding, True),
        ("dynamic size", all_edits, True),
        ("registers", all_edits, True),
    ],
)
def test_equals_loops_over_patches(family, edit, norm_pixels):
    mae = build(family, edit, norm_pixels=norm_pixels).double().eval()
    images, noise = inputs(mae)
    loss, prediction, mask = mae(images, noise)
    with torch.no_grad():
        expected = reference(mae, images, noise, grayed=edit is grayed_embedding)
    assert mask.tolist() == expected[2]
    torch.testing.assert_close(prediction, expected[1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss, expected[0], rtol=1e-9, atol=0)


def test_decoder_positions_are_sines_and_cosines_of_row_and_column():
    decoder = build("oblong", decoder_width=8).decoder
    bands = [1.0, 0.01]
    for index, found in enumerate(decoder.positions[0]):
        row, column = divmod(index, 6)
        angles = [place * band for place in (row, column) for band in bands]
        expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert "decoder.positions" not in dict(decoder.state_dict())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("edit", [id, all_edits])
def test_gradients_reach_all_that_takes_part(family, edit):
    mae = build(family, edit).double().train()
    images, noise = inputs(mae)
    mae(images, noise).loss.backward()
    idle = {name for name, parameter in mae.named_parameters() if parameter.grad is None}
    parts = ("fc_norm", "attn_pool", "head", "head_dist")
    assert idle == {name for name, _ in mae.named_parameters() if name.split(".")[1] in parts}
    assert idle == {name for name, parameter in mae.named_parameters() if not parameter.requires_grad}
    for name, parameter in mae.named_parameters():
        assert name in idle or parameter.grad.abs().max() > 0, name


def test_the_parts_of_a_batch_add_up_to_it():
    mae = build().double()
    images, noise = inputs(mae, 4)
    whole = mae(images, noise)
    whole.loss.backward()
    gradients = {name: p.grad.clone() for name, p in mae.named_parameters() if p.grad is not None}
    mae.zero_grad()
    for part in (slice(0, 2), slice(2, 4)):
        (mae(images[part], noise[part]).loss / 2).backward()
    for name, gradient in gradients.items():
        torch.testing.assert_close(mae.get_parameter(name).grad, gradient, rtol=1e-10, atol=1e-12)


def test_checkpointing_of_the_encoder_is_kept():
    mae = build().double()
    images, noise = inputs(mae)
    calls = []
    mae.encoder.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    gradients = []
    for enable in (False, True):
        mae.encoder.set_grad_checkpointing(enable)
        mae.zero_grad()
        mae(images, noise).loss.backward()
        gradients.append(mae.encoder.patch_embed.proj.weight.grad.clone())
    assert torch.equal(*gradients)
    assert len(calls) == 3  # once, and with checkpointing twice


def test_tokens_that_the_encoder_does_not_norm_are_normed_by_the_decoder():
    norms = {family: type(build(family).decoder.norm_input) for family in ("class token", "registers")}
    assert norms == {"class token": nn.Identity, "registers": nn.LayerNorm}


# What hidden patches may tell


def visible_tokens(mae: Any, images: Tensor, noise: Tensor) -> Tensor:
    with torch.no_grad():
        return mae.encode(images, mask_of(noise, mae.visible))


@pytest.mark.parametrize("method", ["svd", "dct"])
@pytest.mark.parametrize(
    ("where", "blocks", "leaks"),
    [("embedding", None, True), ("pixels", None, True), ("blocks", 0, False), ("blocks", None, False)],
)
def test_what_of_a_hidden_patch_reaches_the_visible_tokens(method, where, blocks, leaks):
    mae = build(edit=lambda model: wp.gray_tokens(model, 0.7, method, where, blocks=blocks)).double().eval()
    images, noise = inputs(mae, 1)
    hidden = int(noise[0].argmax())
    row, column = divmod(hidden, 4)
    changed = images.clone()
    changed[:, :, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4].exp_()
    before, after = (visible_tokens(mae, x, noise) for x in (images, changed))
    assert before.shape == (1, 1 + 6, 32)
    if leaks:
        assert (before - after).abs().max() > 1e-3
    else:
        assert torch.equal(before, after)
    # The loss sees the patch in any case.
    assert mae(images, noise).loss != mae(changed, noise).loss


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"graying": "dct"}, True),
        ({"graying": "svd", "gray_where": "pixels"}, True),
        ({"graying": "dct", "gray_where": "blocks", "gray_blocks": "0"}, False),
        ({}, False),
        ({"graying": "dct", "task": "classify"}, False),
    ],
)
def test_a_recipe_that_leaks_is_told(options, warns):
    warnings = mae_warnings(Recipe.from_mapping({"task": "mae", **options}))
    assert len(warnings) == warns
    for warning in warnings:
        assert "where=blocks blocks=0" in warning


# Masks


def test_noise_is_a_function_of_seed_update_and_place():
    state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    noise = mask_noise(3, 7, 4, 9)
    torch.rand(5)
    assert torch.equal(noise, mask_noise(3, 7, 4, 9))
    assert torch.equal(noise[:2], mask_noise(3, 7, 2, 9))
    others = [mask_noise(3, 8, 4, 9), mask_noise(4, 7, 4, 9), mask_noise(3, 7, 4, 9, split="test"), noise]
    assert len({tuple(other.flatten().tolist()) for other in others}) == 4
    assert (noise.dtype, noise.device.type) == (torch.float32, "cpu")
    torch.set_rng_state(state[0])
    assert np.random.get_state()[1].tolist() == state[1]


def test_every_patch_is_hidden_equally_often():
    hidden = mask_of(mask_noise(0, 0, 4000, 16), 4).hidden
    assert (hidden.sum(1) == 12).all()
    # Binomial(4000, 0.75): a deviation of 0.0068 of the share.
    assert (hidden.double().mean(0) - 0.75).abs().max() < 4 * 0.0069


def test_equal_noise_hides_the_last():
    mask = mask_of(torch.zeros(1, 5), 2)
    assert mask.hidden.tolist() == [[False, False, True, True, True]]
    assert mask.restore.tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("tokens", "ratio", "visible"), [(196, 0.75, 49), (16, 0.75, 4), (10, 0.9, 1), (2, 0.6, 1)]
)
def test_visible_patches(tokens, ratio, visible):
    assert visible_count(tokens, ratio) == visible


@pytest.mark.parametrize(
    ("tokens", "ratio", "message"),
    [
        (16, 0.99, "leaves 0 visible"),
        (16, 0.01, "leaves 16 visible"),
        (1, 0.75, "leaves 0 visible"),
        (16, 1.0, r"mask_ratio must be in \(0, 1\), got 1.0"),
    ],
)
def test_ratios_that_do_not_go(tokens, ratio, message):
    with pytest.raises(ValueError, match=message):
        visible_count(tokens, ratio)
