"""Edits that mix tokens, on texts with padding: adding padding changes nothing, or is an error."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

import wellposed as wp
from texts import bert, clip, encoder, gpt2, llama, made, naflex, patches, qwen3, texts, tokens

LENGTHS = (5, 3, 5)
Inputs = Callable[[tuple[int, ...], int], dict[str, Tensor]]
PADDED = [(bert, texts), (naflex, patches), (encoder, tokens)]


def output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What the model makes of the valid tokens."""
    with torch.no_grad():
        out: Any = model(inputs) if "patches" in inputs else model(**inputs)
    out = getattr(out, "last_hidden_state", out)
    if "patches" in inputs:
        return out  # pooled over the valid ones
    mask = inputs["attention_mask"].bool() if "attention_mask" in inputs else ~inputs["src_key_padding_mask"]
    return out[mask]


def edited(make: Callable[[], nn.Module], edit: str) -> nn.Module:
    model = made(make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if edit == "gray":
            wp.gray_tokens(model, 0.7, "svd", "blocks")
        else:
            wp.broadcast_context(model, edit, scaled=True, init="cb")
    return model


@pytest.mark.parametrize("edit", ["mlp.end", "mlp.middle", "attention.end", "gray"])
@pytest.mark.parametrize(("make", "inputs"), PADDED)
def test_more_padding_changes_nothing(make: Callable[[], nn.Module], inputs: Inputs, edit: str) -> None:
    model = edited(make, edit)
    plain = output(made(make), inputs(LENGTHS, 5))
    few, many = output(model, inputs(LENGTHS, 5)), output(model, inputs(LENGTHS, 9))
    assert (few - plain).abs().max() > 1e-3
    torch.testing.assert_close(many, few, rtol=0, atol=1e-9)


@pytest.mark.parametrize("edit", ["mlp.end", "gray"])
@pytest.mark.parametrize(("make", "inputs"), PADDED)
def test_a_padded_text_is_as_if_it_were_alone(make: Any, inputs: Inputs, edit: str) -> None:
    model = edited(make, edit)
    together = output(model, inputs((5, 3), 7))
    alone = {name: x[1:, :3] for name, x in inputs((5, 3), 7).items()}
    without_mask = {name: x for name, x in alone.items() if "mask" not in name or name == "attention_mask"}
    if inputs is tokens:
        with torch.no_grad():
            own = model(**without_mask)[0]
    else:
        own = output(model, alone)
    torch.testing.assert_close(together[-len(own) :], own, rtol=0, atol=1e-9)


def test_masks_survive_copies_and_restore_takes_the_hooks_out() -> None:
    model = edited(bert, "mlp.end")
    expected = output(model, texts(LENGTHS, 7))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output(other, texts(LENGTHS, 7)), expected)
    wp.restore(model)
    assert torch.equal(output(model, texts(LENGTHS, 7)), output(made(bert), texts(LENGTHS, 7)))
    plain = made(bert)
    for (name, module), own in zip(model.named_modules(), plain.modules(), strict=True):
        assert list(vars(module)) == list(vars(own)), name
        assert len(module._forward_pre_hooks) == len(own._forward_pre_hooks), name
        assert len(module._forward_hooks) == len(own._forward_hooks), name


def noise_in_the_padding(lengths: tuple[int, ...], width: int) -> dict[str, Tensor]:
    """Patches whose padding is not zero, which a linear embedding would make tokens without a direction."""
    inputs = patches(lengths, width)
    noise = torch.randn(inputs["patches"].shape, dtype=torch.float64)
    inputs["patches"] = torch.where(inputs["patch_valid"][..., None], inputs["patches"], noise)
    return inputs


def siglip() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Siglip2VisionConfig(**sizes, patch_size=4, num_patches=16)
    return transformers.Siglip2VisionModel(config)


def of_siglip(lengths: tuple[int, ...], width: int) -> dict[str, Tensor]:
    given = noise_in_the_padding(lengths, width)
    return {
        "pixel_values": given["patches"],
        "pixel_attention_mask": given["patch_valid"].long(),
        "spatial_shapes": torch.tensor([[length, 1] for length in lengths]),
    }


def pooled(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Any = model(inputs) if "patches" in inputs else model(**inputs).pooler_output
    return out  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "inputs"), [(naflex, noise_in_the_padding), (siglip, of_siglip)])
def test_padded_patches_are_no_part_of_a_grayed_embedding(make: Any, inputs: Inputs) -> None:
    model = made(make)
    plain = pooled(model, inputs(LENGTHS, 5))
    wp.gray_tokens(model, 0.7, "svd")
    few, many = pooled(model, inputs(LENGTHS, 5)), pooled(model, inputs(LENGTHS, 9))
    assert (few - plain).abs().max() > 1e-3
    torch.testing.assert_close(many, few, rtol=0, atol=1e-9)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(pooled(other, inputs(LENGTHS, 7)), few, rtol=0, atol=1e-9)
    wp.restore(model)
    torch.testing.assert_close(pooled(model, inputs(LENGTHS, 5)), plain, rtol=0, atol=1e-12)
    for module, own in zip(model.modules(), made(make).modules(), strict=True):
        assert list(vars(module)) == list(vars(own))
        assert len(module._forward_pre_hooks) == len(own._forward_pre_hooks)
        assert len(module._forward_hooks) == len(own._forward_hooks)


@pytest.mark.slow
def test_the_image_tower_of_a_model_of_texts_and_images() -> None:
    """It needs no example, and its features are asked for past the model's own forward."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = {**sizes, "patch_size": 4, "num_patches": 16}
    text = {**sizes, "vocab_size": 50, "max_position_embeddings": 16, "projection_size": 32}
    config = transformers.Siglip2Config(vision_config=vision, text_config=text)
    model = made(lambda: transformers.Siglip2Model(config))
    assert len(wp.gray_tokens(model, 0.7, "svd")) == 1
    with torch.no_grad():
        few, many = (model.get_image_features(**of_siglip(LENGTHS, width)) for width in (5, 9))
    torch.testing.assert_close(many.pooler_output, few.pooler_output, rtol=0, atol=1e-9)


class Pixels(nn.Module):
    """A model that is given which pixels are padding, as detectors are."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2
        )

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.vit(pixel_values)
        return out


def test_a_mask_of_pixels_is_refused_where_an_embedding_is_grayed() -> None:
    model, x = Pixels().eval(), torch.randn(2, 3, 32, 32)
    wp.gray_tokens(model, 0.7, example=x)
    mask = torch.ones(2, 32, 32, dtype=torch.int64)
    assert torch.equal(model(x, mask), model(x))
    mask[1, :, 20:] = 0
    with pytest.raises(
        ValueError, match=r"expected a mask of the patches .*got pixel_mask of shape \(2, 32, 32"
    ):
        model(x, pixel_mask=mask)


def test_the_mask_is_dropped_after_an_error_inside_the_block() -> None:
    model = edited(bert, "mlp.end")
    layer = model.encoder.layer[0]
    handle = layer.output.dense.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**texts(LENGTHS, 7))
    handle.remove()
    assert all(getattr(module, "padding", None) is None for module in model.modules())


def test_broadcasting_trains_with_padding() -> None:
    model = edited(bert, "mlp.end").train()
    model.config.hidden_dropout_prob = 0.0
    out = model(**texts(LENGTHS, 7)).last_hidden_state
    out.square().mean().backward()
    scales = [p.grad for name, p in model.named_parameters() if name.endswith("scale")]
    assert len(scales) == 2
    assert all(grad is not None and grad.abs().max() > 0 for grad in scales)


@pytest.mark.slow
@pytest.mark.parametrize("edit", ["mlp.end", "gray"])
def test_compiled_and_exported(edit: str) -> None:
    model = edited(bert, edit)
    whole, padded = texts((5, 5), 5), texts((5, 3), 5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(output(compiled, whole), output(model, whole), rtol=0, atol=1e-9)
    exported = torch.export.export(model, (), whole).module()
    torch.testing.assert_close(output(exported, whole), output(model, whole), rtol=0, atol=1e-9)
    for other in (compiled, exported):
        if edit == "gray":
            with pytest.raises(RuntimeError, match="got padding"):
                output(other, padded)
        else:
            torch.testing.assert_close(output(other, padded), output(model, padded), rtol=0, atol=1e-9)


def test_nested_tensors_are_refused() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    wp.broadcast_context(model)
    inputs = tokens(LENGTHS, 7)
    with pytest.raises(TypeError, match="enable_nested_tensor=False"), torch.no_grad():
        model(inputs["src"].float(), src_key_padding_mask=inputs["src_key_padding_mask"])


@pytest.mark.parametrize("make", [gpt2, llama, qwen3])
def test_a_causal_model_does_not_look_into_the_future(make: Callable[[], nn.Module]) -> None:
    model = made(make)
    with pytest.raises(ValueError, match=r"causal.*those that come after"):
        wp.broadcast_context(model)
    with pytest.warns(UserWarning, match="causal"):
        wp.gray_tokens(model, 0.7, "svd", "blocks")
    ids = texts((6,), 6)["input_ids"]
    changed = ids.clone()
    changed[0, -1] = 4
    with torch.no_grad():
        first, second = model(ids).logits, model(changed).logits
    assert (first[:, :-1] - second[:, :-1]).abs().max() > 1e-6  # what the warning is about
    wp.restore(model)
    wp.remove_skips(model, "attention", blocks=0)
    with torch.no_grad():
        first, second = model(ids).logits, model(changed).logits
    torch.testing.assert_close(first[:, :-1], second[:, :-1], rtol=0, atol=1e-12)


def test_a_causal_mask_at_run_time_is_refused() -> None:
    model = made(encoder)
    wp.broadcast_context(model)
    x = tokens((5,), 5)["src"]
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    model(x)
    for causal in (mask, mask.isinf()):
        with pytest.raises(ValueError, match="causal mask"):
            model(x, mask=causal)


def test_one_class_in_a_causal_and_another_tower() -> None:
    model = made(clip)
    vision = [block.index for block in wp.anatomy.blocks(model) if "vision" in block.name]
    wp.broadcast_context(model, blocks=vision)
    inputs = texts((5, 3), 5) | {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64)}
    model(**inputs)
    wp.restore(model)
    wp.broadcast_context(model)
    with pytest.raises(ValueError, match="causal mask"):
        model(**inputs)
