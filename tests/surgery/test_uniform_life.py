"""Models with uniform heads in the life of a model: copied, saved, compiled, exported, in low precision."""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wellposed as wp
from attention_watch import maps_by_block
from untouched import fingerprint
from wellposed.anatomy.model import blocks
from wellposed.anatomy.subclass import PackedQueryAttention
from wellposed.surgery.uniform import uniform_heads_of
from zoo import BY_NAME, Case, families, output

# A module before the softmax, a layer for the query, a packed parameter.
EACH_WAY = ("timm vit", "hf vit", "torchvision vit")


@families(*EACH_WAY)
def test_restore_and_state_dict(case: Case) -> None:
    model, x = case.model(), case.input()
    before, plain, keys = fingerprint(model), output(model, x), list(model.state_dict())
    wp.uniform_heads(model)
    assert not torch.allclose(output(model, x), plain, atol=1e-3)
    assert list(model.state_dict()) == keys
    assert len(list(model.parameters())) == len(before["tensors"])
    other = case.model(seed=3)
    wp.uniform_heads(other)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(output(other, x), output(model, x))
    assert len(wp.restore(model)) == 2
    after = fingerprint(model)
    assert before["modules"] == after["modules"]
    assert torch.equal(output(model, x), plain)


@families(*EACH_WAY)
def test_copies(case: Case) -> None:
    model, x = case.model(), case.input()
    wp.uniform_heads(model, [1], blocks=[1])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output(twin, x), output(model, x))
        assert wp.edits(twin) == wp.edits(model)
        wp.restore(twin)
        assert torch.equal(output(twin, x), output(case.model(), x))
    assert uniform_heads_of(blocks(model)[1]) == (1,)
    assert uniform_heads_of(blocks(model)[0]) == ()


@families(*EACH_WAY)
@pytest.mark.parametrize("heads", [1, 2])
def test_queries_and_keys_of_uniform_heads_get_a_gradient_of_zero(case: Case, heads: int) -> None:
    """Of zero and not none: replicas wait for the gradient of every parameter."""
    model, x = case.model(), case.input()
    wp.uniform_heads(model, heads)
    output(model, x).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    _, attention = blocks(model)[0].attention()
    packed = {"timm vit": "qkv.weight", "torchvision vit": "in_proj_weight"}.get(case.name)
    if packed is None:
        q, k, v = (attention.get_parameter(f"{letter}_proj.weight").grad for letter in "qkv")
    else:
        q, k, v = attention.get_parameter(packed).grad.chunk(3)
    for grad in (q, k):
        of_head = grad.unflatten(0, (2, -1)).abs().amax((1, 2))
        assert (of_head == 0).tolist() == [head < heads for head in range(2)]
    assert (v.unflatten(0, (2, -1)).abs().amax((1, 2)) > 0).all()


@pytest.mark.slow
@families(*EACH_WAY)
def test_compiles_whole(case: Case) -> None:
    torch._dynamo.reset()
    x = case.input()

    def compiled(model: nn.Module) -> Tensor:
        return torch.compile(partial(output, model), fullgraph=True, backend="aot_eager")(x)

    plain = compiled(case.model())
    results = []
    for heads in ([0], [1]):
        model = case.model()
        wp.uniform_heads(model, heads)
        expected = output(model, x)
        expected.square().mean().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        got = compiled(model)
        torch.testing.assert_close(got, expected)
        got.square().mean().backward()
        again = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        torch.testing.assert_close(again, gradients)
        results.append(got)
    for a, b in itertools.combinations([plain, *results], 2):
        assert not torch.allclose(a, b, atol=1e-3)


@families(*EACH_WAY)
def test_exports(case: Case) -> None:
    model, x = case.model(), case.input()
    wp.uniform_heads(model)

    class Tensors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return output(self.model, x)

    program = torch.export.export(Tensors().eval(), (x,))
    torch.testing.assert_close(program.module()(x), output(model, x))


@families(*EACH_WAY)
def test_bf16_autocast(case: Case) -> None:
    model, x = case.model(), case.input()
    wp.uniform_heads(model, [1])
    with torch.autocast("cpu", torch.bfloat16):
        p = maps_by_block(model, x)[0][:, :, 1]
        out = output(model, x)
    assert (p == 1 / torch.tensor(p.shape[-1], dtype=torch.float32)).all()
    cosine = functional.cosine_similarity(out.float().flatten(), output(model, x).flatten(), dim=0)
    assert cosine > 0.9
    assert torch.equal(maps_by_block(model.bfloat16(), x.bfloat16())[0][:, :, 1], p)


@families("torch encoder", "torch encoder pre-norm")
def test_evaluation_uses_no_fused_encoder_layer(case: Case) -> None:
    model, x = case.model(), case.input()
    wp.uniform_heads(model)
    with_gradient = output(model, x)
    with torch.no_grad():
        torch.testing.assert_close(output(model, x), with_gradient)


def test_nested_tensors_are_refused_with_the_remedy() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    wp.uniform_heads(model)
    padding = torch.tensor([[False] * 9, [False] * 7 + [True] * 2])
    with torch.no_grad(), pytest.raises(TypeError, match="enable_nested_tensor=False"):
        model(torch.randn(2, 9, 32), src_key_padding_mask=padding)


@families(*EACH_WAY)
def test_combines_with_other_edits_in_any_order(case: Case) -> None:
    x = case.input()
    edits = (
        lambda model: wp.uniform_heads(model, blocks=1),
        lambda model: wp.broadcast_context(model, "attention.end"),
        lambda model: wp.remove_skips(model, "attention", blocks=1),
    )
    before, results = fingerprint(case.model())["modules"], []
    for order in itertools.permutations(edits):
        model = case.model()
        for edit in order:
            edit(model)
        results.append(output(model, x))
        assert len(wp.edits(model)) == 4
        wp.restore(model)
        assert fingerprint(model)["modules"] == before
    assert all(torch.equal(result, results[0]) for result in results)


def test_packed_parameters_load_move_and_can_be_set() -> None:
    case = BY_NAME["torchvision vit"]
    model, x = case.model(), case.input()
    wp.uniform_heads(model)
    attention = model.encoder.layers[0].self_attention
    assert isinstance(attention, PackedQueryAttention)
    exact = output(model, x)
    torch.testing.assert_close(output(model.double(), x.double()).float(), exact, rtol=1e-3, atol=1e-3)
    model.float()
    with torch.no_grad():
        attention.in_proj_weight[:16] = 7.0
    assert torch.equal(output(model, x), exact)
    attention.in_proj_weight = nn.Parameter(torch.zeros(96, 32))
    assert not torch.allclose(output(model, x), exact, atol=1e-3)
