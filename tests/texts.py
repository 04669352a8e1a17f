"""Tiny models of texts, sounds and ragged images, with padded inputs, seeded."""

from collections.abc import Callable
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_WORDS = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def bert(**options: Any) -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**_SIZES, **_WORDS, **options))


def albert() -> nn.Module:
    return transformers.AlbertModel(transformers.AlbertConfig(**_SIZES, **_WORDS, embedding_size=16))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, **_WORDS)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_SIZES, **_WORDS, num_key_value_heads=2, max_position_embeddings=32)
    )


def qwen3() -> nn.Module:
    config = transformers.Qwen3Config(**_SIZES, **_WORDS, num_key_value_heads=2, head_dim=8)
    return transformers.Qwen3ForCausalLM(config)


def clip() -> nn.Module:
    text = {**_SIZES, **_WORDS, "max_position_embeddings": 32}
    vision = {**_SIZES, "image_size": 32, "patch_size": 8}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    )


def whisper() -> nn.Module:
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _WHISPER.items()}
    config = transformers.WhisperConfig(
        **sizes, **_WORDS, d_model=32, max_source_positions=20, num_mel_bins=8, decoder_start_token_id=1
    )
    return transformers.WhisperModel(config)


_WHISPER = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}


def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        **_SIZES,
        **_WORDS,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
    )
    return transformers.Wav2Vec2Model(config)


def naflex() -> nn.Module:
    return timm.create_model(
        "naflexvit_base_patch16_gap",
        embed_dim=32,
        depth=2,
        num_heads=4,
        patch_size=4,
        num_classes=5,
        init_values=None,
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """The model in float64 and evaluation mode, with weights that make each block matter."""
    model = make().double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2, generator=generator)
    return model


def texts(lengths: tuple[int, ...], width: int) -> dict[str, Tensor]:
    """Ids and masks of texts padded at their ends; the words do not depend on the width."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, 50, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(width) < torch.tensor(lengths)[:, None]).long()}


def patches(lengths: tuple[int, ...], width: int) -> dict[str, Tensor]:
    """Patches of images of different sizes, one column of patches each, as NaFlexViT takes them."""
    generator = torch.Generator().manual_seed(1)
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    values = torch.zeros(len(lengths), width, 48, dtype=torch.float64)
    for row, length in enumerate(lengths):
        values[row, :length] = torch.randn(length, 48, generator=generator, dtype=torch.float64)
    places = torch.stack((torch.arange(width), torch.zeros(width, dtype=torch.int64)), -1)
    coord = places * valid[..., None]
    return {"patches": values, "patch_coord": coord, "patch_valid": valid}


def tokens(lengths: tuple[int, ...], width: int) -> dict[str, Tensor]:
    """Tokens with a padding mask, as PyTorch's encoder takes them."""
    generator = torch.Generator().manual_seed(1)
    values = torch.zeros(len(lengths), width, 32, dtype=torch.float64)
    for row, length in enumerate(lengths):
        values[row, :length] = torch.randn(length, 32, generator=generator, dtype=torch.float64)
    padding = torch.arange(width) >= torch.tensor(lengths)[:, None]
    return {"src": values, "src_key_padding_mask": padding}
