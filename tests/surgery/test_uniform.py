"""Uniform heads: the mean of the values, exactly, and refused where it would not be."""

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

import wellposed as wp
from attention_watch import maps_by_block, maps_of
from reference.ops import linear, logits, packed_qkv, split_heads
from untouched import assert_same, fingerprint
from wellposed.anatomy import AttentionRow, teach
from wellposed.anatomy.model import blocks
from wellposed.probes import attention_density, bounds
from zoo import BY_NAME, CASES, Case, families, output

REFUSED = {
    "timm beit": "made by a call that no module sees",
    "timm swin": "relative position bias",
    "timm swinv2": "relative position bias",
    "timm cait": "mixed before the softmax.*class token alone",
    "timm xcit": "over channels, not tokens.*class token alone",
    "timm mixer": "without attention",
    "timm resmlp": "without attention",
    "timm convmixer": "by convolution",
    "hf beit": "relative position bias",
    "hf swin": "relative position bias",
    "torchvision swin": "relative position bias",
    "torchvision swin_v2": "relative position bias",
}
TAKEN = tuple(case.name for case in CASES if case.name not in REFUSED)
# A module before the softmax, a layer for the query, a packed parameter.
EACH_WAY = ("timm vit", "hf vit", "torchvision vit")


@families(*TAKEN)
def test_the_last_head_is_uniform_and_the_others_stay(case: Case) -> None:
    model, x = case.model(), case.input()
    before = maps_by_block(model, x)
    done = wp.uniform_heads(model, [-1], blocks=0)
    after = maps_by_block(model, x)
    assert [(edit.kind, edit.where, edit.block) for edit in done] == [("uniform_heads", "attention.query", 0)]
    keys = after[0].shape[-1]
    assert (after[0][:, :, -1] == 1 / torch.tensor(keys, dtype=torch.float32)).all()
    assert torch.equal(after[0][:, :, :-1], before[0][:, :, :-1])
    assert (before[0][:, :, -1] - 1 / keys).abs().max() > 0.01
    assert (after[1][:, :, -1] - 1 / keys).abs().max() > 0.01


@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_cannot_be_uniform_is_refused(name: str) -> None:
    model = BY_NAME[name].model()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=f"a uniform head has no meaning for .*{REFUSED[name]}"):
        wp.uniform_heads(model)
    assert_same(before, fingerprint(model))


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {f"a.{name}": parameter.detach() for name, parameter in module.named_parameters()}


def queries_keys_values(family: str, x: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, str]:
    if family.startswith("timm"):
        return *packed_qkv(x, w["a.qkv.weight"], w["a.qkv.bias"], 2), "a.proj"
    if family.startswith("hf"):
        q, k, v = (split_heads(linear(x, w, f"a.{letter}_proj"), 2) for letter in "qkv")
        return q, k, v, "a.o_proj"
    return *packed_qkv(x, w["a.in_proj_weight"], w["a.in_proj_bias"], 2), "a.out_proj"


@families("timm vit", "timm deit", "hf vit", "hf deit", "torchvision vit", "torch encoder")
def test_against_attention_written_out(case: Case) -> None:
    model, x = case.model(dtype=torch.float64), case.input(dtype=torch.float64)
    wp.uniform_heads(model, [0])
    _, attention = blocks(model)[1].attention()
    seen: list[tuple[Tensor, Tensor]] = []

    def see(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict, out: Tensor | tuple) -> None:
        given = args[0] if args else next(iter(kwargs.values()))
        seen.append((given, out[0] if isinstance(out, tuple) else out))

    attention.register_forward_hook(see, with_kwargs=True)
    output(model, x)
    ((tokens, got),) = seen
    w = weights_of(attention)
    q, k, v, out_name = queries_keys_values(case.name, tokens, w)
    learned = torch.softmax(logits(q, k), dim=-1) @ v
    mean = v.mean(-2, keepdim=True).expand_as(v)
    mixed = torch.stack([mean[:, 0], learned[:, 1]], dim=1)
    expected = linear(mixed.transpose(1, 2).flatten(-2), w, out_name)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    as_before = linear(learned.transpose(1, 2).flatten(-2), w, out_name)
    assert (got - as_before).abs().max() > 1e-3


def vit_with_normed_queries() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, qk_norm=True
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    assert model.blocks[0].attn.q_norm.bias.abs().max() > 0.1
    return model.eval()


def test_a_norm_with_a_bias_is_before_the_cut() -> None:
    model, x = vit_with_normed_queries(), BY_NAME["timm vit"].input()
    wp.uniform_heads(model)
    assert maps_by_block(model, x)[0][:, :, 0].unique().numel() == 1
    # The control: zeros in the projection alone come out of the norm as its bias.
    control = vit_with_normed_queries()
    with torch.no_grad():
        for parameter in (control.blocks[0].attn.qkv.weight, control.blocks[0].attn.qkv.bias):
            parameter[:16] = 0
    assert (maps_by_block(control, x)[0][:, :, 0] - 1 / 17).abs().max() > 0.01


def test_control_a_zero_query_under_a_position_bias_is_not_uniform() -> None:
    """Why Swin is refused."""
    case = BY_NAME["timm swin"]
    model, x = case.model(), case.input()
    with torch.no_grad():
        for block in blocks(model):
            for parameter in (block.module.attn.qkv.weight, block.module.attn.qkv.bias):
                parameter[: len(parameter) // 6] = 0
    p = maps_by_block(model, x)[0][:, :, 0]
    assert (p - 1 / p.shape[-1]).abs().max() > 0.01


def test_entropy_is_one() -> None:
    model, x = BY_NAME["timm vit"].model(), BY_NAME["timm vit"].input()
    wp.uniform_heads(model, [1])
    found = {
        (record.block, record.head): record.value
        for record in attention_density(model, x)
        if record.measure == "entropy" and record.head is not None
    }
    for block in (0, 1):
        assert found[block, 1] == pytest.approx(1, abs=1e-6)
        assert found[block, 0] < 0.95


def test_a_query_that_overflows_still_counts_for_nothing() -> None:
    model, x = BY_NAME["timm vit"].model(), BY_NAME["timm vit"].input()
    wp.uniform_heads(model, 2)
    expected = output(model, x)
    with torch.no_grad():
        model.blocks[0].attn.qkv.bias[:32] = torch.inf
    assert torch.equal(output(model, x), expected)


def test_a_mask_still_holds() -> None:
    case = BY_NAME["torch encoder"]
    model, x = case.model(), case.input()
    wp.uniform_heads(model)
    padding = torch.tensor([[False] * 9, [False] * 7 + [True] * 2])
    shown, _ = maps_of(blocks(model), lambda: model(x, src_key_padding_mask=padding))
    p = shown[0][1][:, 0, 0]
    torch.testing.assert_close(p[0], torch.full((9, 9), 1 / 9))
    torch.testing.assert_close(p[1, :, :7], torch.full((9, 7), 1 / 7))
    assert p[1, :, 7:].count_nonzero() == 0


@families(*EACH_WAY)
def test_twice_is_a_mistake(case: Case) -> None:
    model = case.model()
    wp.uniform_heads(model, blocks=1)
    before = wp.edits(model)
    with pytest.raises(ValueError, match=r"already has ZeroQuery\(heads=\[0\], of=2\).*twice is a mistake"):
        wp.uniform_heads(model, [1])
    assert wp.edits(model) == before


@pytest.mark.parametrize(
    ("heads", "error", "says"),
    [
        (0, ValueError, "1 to 2, as many as blocks.0 has, got 0"),
        (3, ValueError, "got 3; heads=1 is the first head"),
        (True, ValueError, "got True"),
        ([], ValueError, "names none of the 2 heads"),
        ([0, 2], IndexError, "within 0 and 1 in blocks.0, got 2"),
        (["0"], TypeError, "got '0'"),
        ([False], TypeError, "got False"),
    ],
)
def test_wrong_heads(heads: object, error: type[Exception], says: str) -> None:
    model = BY_NAME["timm vit"].model()
    before = fingerprint(model)
    with pytest.raises(error, match=says):
        wp.uniform_heads(model, heads)
    assert_same(before, fingerprint(model))


def test_heads_are_told_each_once() -> None:
    model = BY_NAME["timm vit"].model()
    (edit,) = wp.uniform_heads(model, iter([1, -1, 0]), blocks=0)
    assert edit.detail == "ZeroQuery(heads=[0, 1], of=2)"


def test_one_model_without_a_position_bias_is_taken() -> None:
    import transformers

    torch.manual_seed(0)
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    settings |= {"image_size": 32, "patch_size": 8}
    model = transformers.BeitModel(transformers.BeitConfig(**settings)).eval()
    wp.uniform_heads(model)
    assert maps_by_block(model, BY_NAME["hf beit"].input())[0][:, :, 0].unique().numel() == 1


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 16}], ids=str)
def test_attention_of_torch_with_more_than_its_tokens(options: dict) -> None:
    model = BY_NAME["torchvision vit"].model()
    for layer in model.encoder.layers:
        layer.self_attention = nn.MultiheadAttention(32, 2, batch_first=True, **options)
    with pytest.raises(ValueError, match=r"add_zero_attn|another width"):
        wp.uniform_heads(model)


class OtherAttention(timm.layers.Attention):
    """One whose projection no module sees, but whose norm of the queries runs."""

    def forward(self, x: Tensor, attn_mask: None = None, is_causal: bool = False) -> Tensor:
        q, k, v = packed_qkv(x, self.qkv.weight, self.qkv.bias, self.num_heads)
        q, k = self.q_norm(torch.stack([q, k])).unbind()
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class FirstOfTwo(nn.Module):
    """Lets a hook see the queries alone."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Identity()

    def forward(self, q_and_k: Tensor) -> Tensor:
        q, k = q_and_k.unbind()
        return torch.stack([self.queries(q), k])


class OtherMultihead(nn.MultiheadAttention):
    """One that might compute otherwise than torch's."""


def test_a_query_that_a_run_does_not_show_is_refused_until_taught(monkeypatch) -> None:
    from wellposed.anatomy import table

    monkeypatch.setattr("wellposed.anatomy.table.ATTENTIONS", dict(table.ATTENTIONS))
    case = BY_NAME["timm vit"]
    model = case.model()
    for block in model.blocks:
        block.attn.__class__ = OtherAttention
    with pytest.raises(ValueError, match=r"no module sees.*teach\(OtherAttention, AttentionRow"):
        wp.uniform_heads(model)
    for block in model.blocks:
        block.attn.q_norm = FirstOfTwo()
    teach(OtherAttention, AttentionRow(("q_norm.queries",), "axis 1"))
    wp.uniform_heads(model)
    assert maps_by_block(model, case.input())[0][:, :, 0].unique().numel() == 1
    packed = BY_NAME["torchvision vit"].model()
    packed.encoder.layers[0].self_attention.__class__ = OtherMultihead
    with pytest.raises(ValueError, match="OtherMultihead is a subclass"):
        wp.uniform_heads(packed, blocks=0)


def test_bounds_are_of_learned_attention() -> None:
    for name in ("timm vit", "torchvision vit"):
        model, x = BY_NAME[name].model(), BY_NAME[name].input()
        wp.uniform_heads(model, blocks=0)
        records = [record for record in bounds(model, x) if record.measure.startswith("kappa 4")]
        told = {record.block: record for record in records}
        assert told[0].status == "not measured"
        assert "heads 0 are uniform" in told[0].note
        assert told[1].value is not None
