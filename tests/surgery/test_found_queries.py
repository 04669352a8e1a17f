"""Queries that a run finds: attentions of many kinds, against each of them written out in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import wellposed as wp

WIDTH, HEADS = 24, 3


def randomised(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=1.5 * max(parameter[0].numel(), 1) ** -0.5)
    return model.double().eval()


def split(x: Tensor, heads: int = HEADS) -> Tensor:
    """(B, N, H C) to (B, H, N, C)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


def attended(q: Tensor, k: Tensor, v: Tensor, uniform: int, hidden: Tensor | None = None) -> Tensor:
    """Attention whose head ``uniform`` takes the mean over the keys that are not hidden."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    p = scores.softmax(-1)
    seen = torch.ones_like(p) if hidden is None else (~hidden).expand_as(p).to(p.dtype)
    p[:, uniform] = (seen / seen.sum(-1, keepdim=True))[:, uniform]
    return joined(p @ v)


def attention_call(model: nn.Module, attention: nn.Module, **inputs: Any) -> tuple[Tensor, Tensor, dict]:
    """What an attention of a model is given and what it returns."""
    seen: list[tuple[Tensor, Tensor, dict]] = []

    def see(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        given = args[0] if args else kwargs["hidden_states"]
        seen.append((given, out[0] if isinstance(out, tuple) else out, kwargs))

    handle = attention.register_forward_hook(see, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return seen[0]


def later(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


IDS = torch.tensor([[3, 7, 2, 9, 4, 1], [5, 5, 8, 0, 6, 2]])


def test_gpt2_packed_by_a_transposed_layer_and_causal() -> None:
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_layer=2, n_head=HEADS, vocab_size=11, bos_token_id=0, eos_token_id=0
    )
    model = randomised(transformers.GPT2Model(config))
    wp.uniform_heads(model, [1])
    a = model.h[1].attn
    x, got, _ = attention_call(model, a, input_ids=IDS)
    q, k, v = map(split, (x @ a.c_attn.weight + a.c_attn.bias).chunk(3, -1))
    expected = attended(q, k, v, 1, later(6)) @ a.c_proj.weight + a.c_proj.bias
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_qwen3_with_grouped_queries_norms_and_rotation(implementation: str) -> None:
    config = transformers.Qwen3Config(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=32, vocab_size=11, attn_implementation=implementation,
    )  # fmt: skip
    model = randomised(transformers.Qwen3Model(config))
    edits = wp.uniform_heads(model, [2])
    assert {edit.module.rpartition(".")[2] for edit in edits} == {"q_norm"}
    a = model.layers[1].self_attn
    x, got, kwargs = attention_call(model, a, input_ids=IDS)
    cos, sin = (each.double() for each in kwargs["position_embeddings"])
    q = rms(split(x @ a.q_proj.weight.T, 4), a.q_norm.weight, config.rms_norm_eps)
    k = rms(split(x @ a.k_proj.weight.T, 2), a.k_norm.weight, config.rms_norm_eps)
    v = split(x @ a.v_proj.weight.T, 2).repeat_interleave(2, 1)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin).repeat_interleave(2, 1)
    expected = attended(q, k, v, 2, later(6)) @ a.o_proj.weight.T
    # transformers computes these norms in float32 whatever the model's dtype is.
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


def test_bert_with_padding() -> None:
    config = transformers.BertConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=32, vocab_size=11
    )
    model = randomised(transformers.BertModel(config))
    wp.uniform_heads(model, [0], blocks=1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    a = model.encoder.layer[1].attention.self
    x, got, _ = attention_call(model, a, input_ids=IDS, attention_mask=mask)
    q, k, v = (split(functional.linear(x, m.weight, m.bias)) for m in (a.query, a.key, a.value))
    expected = attended(q, k, v, 0, (mask == 0)[:, None, None])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_sam_whose_position_bias_is_made_of_the_query() -> None:
    config = transformers.SamVisionConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, mlp_dim=32, output_channels=8,
        image_size=32, patch_size=8, window_size=0, global_attn_indexes=[0, 1], use_rel_pos=True,
    )  # fmt: skip
    model = randomised(transformers.SamVisionModel(config))
    assert model.vision_encoder.layers[1].attn.rel_pos_h.abs().max() > 0.1
    wp.uniform_heads(model, [2])
    a = model.vision_encoder.layers[1].attn
    x, got, _ = attention_call(model, a, pixel_values=torch.randn(2, 3, 32, 32, dtype=torch.float64))
    q, k, v = map(split, functional.linear(x.flatten(1, 2), a.qkv.weight, a.qkv.bias).chunk(3, -1))

    def relative(table: Tensor, axis: int) -> Tensor:
        """(B, H, N, N): of each query, its product with the table at the distance along one axis."""
        place = torch.arange(16).reshape(4, 4)
        at = place // 4 if axis == 0 else place % 4
        distance = at.flatten()[:, None] - at.flatten()[None, :] + 3
        return torch.einsum("bhnc,nmc->bhnm", q, table[distance])

    scores = q @ k.mT / math.sqrt(8) + relative(a.rel_pos_h, 0) + relative(a.rel_pos_w, 1)
    p = scores.softmax(-1)
    p[:, 2] = 1 / 16
    expected = functional.linear(joined(p @ v), a.proj.weight, a.proj.bias).reshape(got.shape)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


class PerHead(nn.Module):
    """Each head's query, key and value lie beside each other, as in GPT-NeoX; written with a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed(x).unflatten(-1, (HEADS, 3, -1)).permute(0, 2, 3, 1, 4).unbind(2)
        return self.out(joined((q @ k.mT * 0.3).softmax(-1) @ v))


class Windows(PerHead):
    """Attention within halves of the tokens, whose windows and heads share the first axis."""

    def forward(self, x: Tensor) -> Tensor:
        halves = x.unflatten(1, (2, -1)).flatten(0, 1)
        q, k, v = self.packed(halves).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        y = torch.bmm((q * 0.3).bmm(k.mT).softmax(-1), v)
        y = y.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(-2)
        return self.out(y.unflatten(0, (-1, 2)).flatten(1, 2))


class Cosine(PerHead):
    """Queries and keys of length one, with a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(split, self.packed(x).chunk(3, -1))
        scores = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT
        return self.out(joined((scores * self.scale.exp()).softmax(-1) @ v))


class Biased(PerHead):
    """A bias on the logits that is zero at initialisation, in a cache that evaluation keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HEADS, 10, 10))
        self.cache: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> "Biased":
        if mode:
            self.cache.clear()
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(split, self.packed(x).chunk(3, -1))
        bias = self.bias if self.training else self.cache.setdefault("bias", self.bias.detach().clone())
        return self.out(joined(functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)))


class AddedAfter(PerHead):
    """A bias added to the query behind its projection, zero at initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.zeros(HEADS, 1, WIDTH // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(split, self.packed(x).chunk(3, -1))
        return self.out(joined(functional.scaled_dot_product_attention(q + self.added, k, v)))


class SharedQueriesAndKeys(PerHead):
    """Queries that are keys too."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(split, self.packed(x).chunk(3, -1))
        return self.out(joined(functional.scaled_dot_product_attention(q, q + 0 * k, v)))


class Talking(PerHead):
    """Logits of a head that are mixed of those of all."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(HEADS, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(split, self.packed(x).chunk(3, -1))
        scores = torch.einsum("gh,bhnm->bgnm", self.mix, q @ k.mT)
        return self.out(joined(scores.softmax(-1) @ v))


class OwnBlock(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.attend, self.norm2 = nn.LayerNorm(WIDTH), attention(), nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.feed(self.norm2(x))


def own_model(attention: Callable[[], nn.Module], *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(OwnBlock(attention), OwnBlock(attention)).double().eval()


TOKENS = torch.randn(2, 10, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def packed_beside_each_other(a: Any, x: Tensor) -> Tensor:
    w, b = a.packed.weight.reshape(HEADS, 3, 8, WIDTH), a.packed.bias.reshape(HEADS, 3, 1, 8)
    q, k, v = (x[:, None] @ w[:, i].mT + b[:, i] for i in range(3))
    p = (q @ k.mT * 0.3).softmax(-1)
    p[:, 1] = 1 / 10
    return joined(p @ v)


def in_windows(a: Any, x: Tensor) -> Tensor:
    halves = []
    for half in x.chunk(2, 1):
        q, k, v = map(split, functional.linear(half, a.packed.weight, a.packed.bias).chunk(3, -1))
        p = (q @ k.mT * 0.3).softmax(-1)
        p[:, 1] = 1 / 5
        halves.append(joined(p @ v))
    return torch.cat(halves, 1)


def by_cosine(a: Any, x: Tensor) -> Tensor:
    q, k, v = map(split, functional.linear(x, a.packed.weight, a.packed.bias).chunk(3, -1))
    cosine = (q @ k.mT) / (q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :])
    p = (cosine * a.scale.exp()).softmax(-1)
    p[:, 1] = 1 / 10
    return joined(p @ v)


@pytest.mark.parametrize(
    ("attention", "written"),
    [(PerHead, packed_beside_each_other), (Windows, in_windows), (Cosine, by_cosine)],
    ids=lambda x: x.__name__,
)
def test_own_attentions(attention: type[nn.Module], written: Callable[[Any, Tensor], Tensor]) -> None:
    model = own_model(attention)
    plain = model(TOKENS)
    done = wp.uniform_heads(model, [1], example=TOKENS)
    assert [edit.detail for edit in done] == ["ZeroQuery(heads=[1], of=3)"] * 2
    a = model[1].attend
    seen: list[tuple[Tensor, Tensor]] = []
    a.register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    model(TOKENS)
    expected = a.out(written(a, seen[0][0]))
    torch.testing.assert_close(seen[0][1], expected, rtol=0, atol=1e-12)
    wp.restore(model)
    assert torch.equal(model(TOKENS), plain)


@pytest.mark.parametrize(
    ("attention", "says"),
    [
        (Biased, "something besides q k"),
        (AddedAfter, "something besides q k"),
        (SharedQueriesAndKeys, "no module sees"),
        (Talking, "mixed before the softmax"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_a_zero_query_would_not_make_uniform_is_refused(attention: type[nn.Module], says: str) -> None:
    model = own_model(attention)
    model(TOKENS)  # fills caches
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=rf"{says}.*teach\({attention.__name__}, AttentionRow"):
        wp.uniform_heads(model, example=TOKENS)
    assert not wp.edits(model)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_of_ones_own_needs_an_example_each() -> None:
    """One may hand its blocks a bias that the other does not."""
    wp.uniform_heads(own_model(PerHead), example=TOKENS)
    with pytest.raises(ValueError, match="give an input as example="):
        wp.uniform_heads(own_model(PerHead))


def test_a_shared_bias_from_outside_is_seen() -> None:
    settings: dict[str, Any] = {
        "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 32,
        "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    plain = transformers.BeitModel(transformers.BeitConfig(**settings)).eval()
    assert len(wp.uniform_heads(plain)) == 2
    shared = transformers.BeitConfig(**settings, use_shared_relative_position_bias=True)
    with pytest.raises(ValueError, match="relative position bias"):
        wp.uniform_heads(transformers.BeitModel(shared).eval())


def test_what_was_found_serves_other_sizes_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpt2(width: int, heads: int) -> nn.Module:
        config = transformers.GPT2Config(
            n_embd=width, n_layer=1, n_head=heads, vocab_size=11, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2Model(config).eval()

    wp.uniform_heads(gpt2(24, 3))
    monkeypatch.setattr("wellposed.anatomy.queries._proven_by_runs", None)  # no run from now on
    model = randomised(gpt2(32, 4)).float()
    (edit,) = wp.uniform_heads(model, [3])
    assert edit.detail == "ZeroQuery(heads=[3], of=4)"
    model.set_attn_implementation("eager")
    with torch.no_grad():
        p = model(IDS, output_attentions=True).attentions[0]
    rows = torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None]
    torch.testing.assert_close(p[:, 3], rows.expand(2, 6, 6))
    assert (p[:, 2] - rows).abs().max() > 0.05
