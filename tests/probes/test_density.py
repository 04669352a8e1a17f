"""Density of attention: the measures against their definitions, the records against explicit attention."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import wellposed as wp
from untouched import assert_same, fingerprint
from wellposed.anatomy import Add, BlockRow, blocks
from wellposed.anatomy.model import Block
from wellposed.probes import density
from wellposed.probes.attention_maps import FROM_QK, attention_probabilities, no_attention, watching_attention
from wellposed.probes.density import (
    ABSOLUTE_ERROR,
    MEASURES,
    DensityProbe,
    attention_density,
    distance_from_uniform,
    jacobian_frobenius,
    jacobian_trace,
    row_entropy,
)
from wellposed.probes.passes import forward_passes
from wellposed.records import Record, read_json, write_json
from zoo import BY_NAME, Case, each_kind, families

# The measures


@st.composite
def probabilities(draw: st.DrawFn) -> Tensor:
    """Rows from uniform to one key, float64 or float32."""
    keys = draw(st.integers(2, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    sharpness = 10 ** draw(st.floats(-3, 3))
    p = (sharpness * torch.randn(6, keys, generator=generator, dtype=torch.float64)).softmax(-1)
    return p.to(draw(st.sampled_from([torch.float32, torch.float64])))


def jacobian(p: Tensor) -> Tensor:
    """diag(p) - p p^T."""
    p = p.double()
    return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


@given(probabilities())
@settings(deadline=None, max_examples=60)
def test_entropy_lies_between_one_key_and_uniform(p: Tensor) -> None:
    entropy = row_entropy(p)
    assert (entropy >= 0).all()
    assert (entropy <= 1 + 1e-6).all()
    shuffled = p[:, torch.randperm(p.shape[-1], generator=torch.Generator().manual_seed(0))]
    assert torch.allclose(row_entropy(shuffled), entropy, atol=1e-12)


@given(probabilities())
@settings(deadline=None, max_examples=60)
def test_entropy_is_its_definition(p: Tensor) -> None:
    for row, entropy in zip(p.tolist(), row_entropy(p).tolist(), strict=True):
        expected = -sum(x * math.log(x) for x in row if x > 0) / math.log(len(row))
        assert entropy == pytest.approx(expected, abs=1e-12)


@given(probabilities())
@settings(deadline=None, max_examples=60)
def test_jacobian_norms_are_those_of_the_matrix(p: Tensor) -> None:
    J = jacobian(p)
    assert torch.allclose(jacobian_frobenius(p), torch.linalg.matrix_norm(J), atol=1e-7)
    assert torch.allclose(jacobian_trace(p), J.diagonal(dim1=-2, dim2=-1).sum(-1), atol=1e-12)
    # Rows in float32 sum to 1 but for the last digit; so far the matrix is not positive.
    assert torch.allclose(jacobian_trace(p), torch.linalg.svdvals(J).sum(-1), atol=1e-6)


@given(probabilities())
@settings(deadline=None, max_examples=60)
def test_distance_from_uniform_lies_in_its_range(p: Tensor) -> None:
    keys = p.shape[-1]
    distance = distance_from_uniform(p)
    assert (distance >= 0).all()
    assert (distance <= 1 - 1 / keys + 1e-6).all()
    # The same by its other definition: the largest difference over sets of keys.
    largest = (p.double() - 1 / keys).clamp(min=0).sum(-1)
    assert torch.allclose(distance, largest, atol=1e-6)


def test_jacobian_is_that_of_softmax() -> None:
    scores = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    J = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), scores)
    p = scores.softmax(-1)
    assert jacobian_frobenius(p).item() == pytest.approx(torch.linalg.matrix_norm(J).item())
    assert jacobian_trace(p).item() == pytest.approx(torch.linalg.matrix_norm(J, "nuc").item())


@pytest.mark.parametrize("keys", [2, 49, 197])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_and_one_key(keys: int, dtype: torch.dtype) -> None:
    uniform = torch.full((keys,), 1 / keys, dtype=dtype)
    one = torch.eye(keys, dtype=dtype)[1]
    expected = {
        row_entropy: (1.0, 0.0),
        jacobian_frobenius: (math.sqrt(keys - 1) / keys, 0.0),
        jacobian_trace: (1 - 1 / keys, 0.0),
        distance_from_uniform: (0.0, 1 - 1 / keys),
    }
    for measure, (of_uniform, of_one) in expected.items():
        assert measure(uniform).item() == pytest.approx(of_uniform, abs=1e-6)
        assert measure(one).item() == pytest.approx(of_one, abs=1e-12)


def test_the_trace_is_steepest_for_uniform_attention() -> None:
    uniform = torch.full((1, 10), 0.1)
    others = torch.randn(50, 10, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert (jacobian_trace(others) < jacobian_trace(uniform)).all()


def test_one_key_has_no_entropy() -> None:
    assert row_entropy(torch.ones(2, 3, 1)).isnan().all()


@pytest.mark.parametrize("spread", [1e-3, 0.1, 1, 4, 16, 64])
@pytest.mark.parametrize("keys", [17, 197])
def test_float32_is_as_exact_as_the_records_say(spread: float, keys: int) -> None:
    """Single rows, the worst case; the spread is the standard deviation of the scores."""
    generator = torch.Generator().manual_seed(0)
    q, k = (math.sqrt(spread) * torch.randn(60, 1, n, 64, generator=generator) for n in (1, keys))
    p, exact = attention_probabilities(q, k), attention_probabilities(q.double(), k.double())
    for measure in MEASURES.values():
        assert (measure(p) - measure(exact)).abs().max() < ABSOLUTE_ERROR


# Records of models


def measure(model: nn.Module, x: Tensor, images: int = 16) -> list[Record]:
    return forward_passes(model, [x], lambda found: [DensityProbe(found, images)])


def select(records: list[Record], measure: str, block: int, head: int | None = None) -> Record:
    (record,) = [r for r in records if (r.measure, r.block, r.head) == (measure, block, head)]
    return record


@each_kind
def test_records_are_means_of_the_attention(case: Case) -> None:
    model, x = case.model().train(), case.input(3)
    if case.name == "torch encoder pre-norm":  # has images on the second axis
        x = x.transpose(0, 1)
    before, random = fingerprint(model), torch.get_rng_state()
    if not case.has_attention:
        with pytest.raises(ValueError, match="got none"):
            measure(model, x)
        return
    maps: dict[int, Tensor] = {}
    if case.name != "hf vitmae":  # masks at random
        model.eval()
        found = blocks(model)
        with (
            watching_attention(found, lambda block, p: maps.update({block.index: p.double()}), 3),
            torch.no_grad(),
        ):
            model(x)
        model.train()
    records = measure(model, x)
    assert_same(before, fingerprint(model))
    assert torch.equal(torch.get_rng_state(), random)
    assert len({record.key for record in records}) == len(records)
    assert {record.block for record in records} == set(range(case.blocks))
    for index, p in maps.items():
        heads = p.shape[2]
        assert len([r for r in records if r.block == index]) == 4 + 2 * heads
        for name, function in MEASURES.items():
            expected = function(p).mean(dim=(1, 3))
            record = select(records, name, index)
            assert record.position == "attention"
            assert record.status == "ok"
            assert record.dtype == "float32"
            assert record.images == len(p)
            assert record.samples == pytest.approx(expected.mean(-1).tolist(), abs=1e-6)
            assert record.value == pytest.approx(expected.mean(-1).median().item(), abs=1e-6)
            assert record.low <= record.value <= record.high
            assert record.tolerance == pytest.approx(ABSOLUTE_ERROR / record.value)
            assert record.note.startswith(f"{p.shape[-1]} keys")
            if name in ("entropy", "distance from uniform"):
                for head in range(heads):
                    of_head = select(records, name, index, head)
                    assert of_head.samples == pytest.approx(expected[:, head].tolist(), abs=1e-6)


@families("hf vit", "hf dinov2", "hf dinov3", "hf beit", "hf deit")
def test_entropy_is_that_of_eager_attention(case: Case) -> None:
    model, x = case.model(), case.input(3)
    records = attention_density(model, x)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(x, output_attentions=True).attentions
    for index, p in enumerate(attentions):
        p = p.double()
        entropy = -(p * p.log()).sum(-1).mean(dim=(1, 2)) / math.log(p.shape[-1])
        record = select(records, "entropy", index)
        assert record.samples == pytest.approx(entropy.tolist(), rel=1e-5)
        assert record.estimator == FROM_QK
        assert record.note == f"{p.shape[-1]} keys"


def test_keys_and_windows_are_noted() -> None:
    def notes(name: str) -> list[str]:
        case = BY_NAME[name]
        return [r.note for r in measure(case.model(), case.input()) if r.measure == "entropy" and not r.head]

    assert notes("timm swin")[::2] == ["16 keys, 4 windows"] * 2 + ["16 keys"] * 2
    assert notes("timm pvt_v2")[0] == "16 keys"


def test_attention_without_queries_is_uniform() -> None:
    case = BY_NAME["timm vit"]
    model = case.model()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[:32] = 0
        model.blocks[0].attn.qkv.bias[:32] = 0
    records = attention_density(model, case.input(3))
    assert select(records, "entropy", 0).value == pytest.approx(1, abs=1e-6)
    assert select(records, "softmax jacobian trace", 0).value == pytest.approx(16 / 17, abs=1e-6)
    assert select(records, "distance from uniform", 0).value == pytest.approx(0, abs=1e-6)
    assert select(records, "entropy", 1).value < 0.99


def test_so_many_images_and_no_more() -> None:
    case = BY_NAME["timm swin"]
    model, x = case.model(), case.input(7)
    all_at_once = attention_density(model, x, attention_images=5, batch_size=16)
    assert {record.images for record in all_at_once} == {5}
    in_batches = attention_density(model, x, attention_images=5, batch_size=2)
    few = attention_density(model, x[:3], attention_images=5)
    assert {record.images for record in few} == {3}
    for one, other, first in zip(all_at_once, in_batches, few, strict=True):
        assert one.key == other.key
        assert one.samples == pytest.approx(other.samples, abs=1e-6)
        assert one.samples[:3] == pytest.approx(first.samples, abs=1e-6)


def test_measured_in_parts_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["timm swin"]
    model, x = case.model(), case.input(3)
    whole = attention_density(model, x)
    monkeypatch.setattr(density, "_AT_ONCE_ON_CPU", 100)
    for part, expected in zip(attention_density(model, x), whole, strict=True):
        assert part.samples == pytest.approx(expected.samples, abs=1e-12)


def test_named_blocks_alone() -> None:
    case = BY_NAME["timm cait"]
    model, x = case.model(), case.input()
    every = attention_density(model, x)
    assert attention_density(model, x, blocks=[2, 0]) == [r for r in every if r.block in (0, 2)]
    assert attention_density(model, x, blocks=(i for i in (3,))) == [r for r in every if r.block == 3]


def test_xcit_measures_its_class_attention_alone() -> None:
    case = BY_NAME["timm xcit"]
    model, x = case.model(), case.input()
    records = attention_density(model, x)
    channels = [record for record in records if record.block in (0, 1)]
    assert [(r.value, r.status, r.position) for r in channels] == [(None, "not measured", "attention")] * 2
    assert {r.note for r in channels} == {"its attention is over channels, not tokens"}
    assert all(r.status == "ok" and r.note == "5 keys" for r in records if r.block in (2, 3))
    with pytest.raises(
        ValueError, match=r"no meaning for blocks\.1 \(XCABlock: its attention is over channels"
    ):
        attention_density(model, x, blocks=[1, 2])


@families("timm mixer", "timm resmlp", "timm convmixer")
def test_models_without_attention_are_refused(case: Case) -> None:
    model, x = case.model(), case.input()
    before = fingerprint(model)
    reason = no_attention(blocks(model)[0])
    with pytest.raises(ValueError, match=reason):
        attention_density(model, x)
    with pytest.raises(ValueError, match=f"{type(blocks(model)[0].module).__name__}: {reason}"):
        DensityProbe(blocks(model))
    assert_same(before, fingerprint(model))


def test_one_key_is_not_measured() -> None:
    case = BY_NAME["timm pvt_v2"]
    records = attention_density(case.model(), case.input()[..., :32, :32])
    (last,) = [record for record in records if record.block == 3]
    assert (last.value, last.status, last.images) == (None, "not measured", 2)
    assert last.note.startswith("one key")
    assert all(record.status == "ok" for record in records if record.block < 3)


def test_attention_that_is_not_finite_is_said(tmp_path) -> None:
    case = BY_NAME["timm vit"]
    x = case.input(3)
    x[1] = math.nan
    records = measure(case.model(), x)
    for record in records:
        assert record.samples[1] is None
        assert record.images == 2
        assert "1 of 3 images have non-finite" in record.note
    lost = measure(case.model(), x[1:2])
    assert {record.status for record in lost} == {"not measured"}
    write_json([*records, *lost], {}, tmp_path / "records.json")
    assert read_json(tmp_path / "records.json")[0] == [*records, *lost]


@families("timm vit", "torchvision vit", "timm swin")
def test_half_precision_gives_no_tolerance(case: Case) -> None:
    model, x = case.model(), case.input(3)
    exact = attention_density(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        records = attention_density(model, x)
    for record, expected in zip(records, exact, strict=True):
        assert record.dtype == "bfloat16"
        assert record.tolerance is None
        assert record.value == pytest.approx(expected.value, abs=0.05)


@families("timm vit", "hf swin", "torchvision vit", "timm cait")
def test_edited_models_are_measured(case: Case) -> None:
    model, x = case.model(), case.input(3)
    plain = attention_density(model, x)
    wp.gray_tokens(model, 0.6)
    wp.broadcast_context(model)
    wp.remove_skips(model, "attention", blocks=0)
    before = fingerprint(model)
    records = attention_density(model, x)
    assert [record.key for record in records] == [record.key for record in plain]
    assert all(a.value != pytest.approx(b.value, rel=1e-4) for a, b in zip(records, plain, strict=True))
    assert_same(before, fingerprint(model))


def test_after_an_error_the_model_is_as_found() -> None:
    case = BY_NAME["torchvision vit"]
    model, x = case.model().train(), torch.zeros(2, 3, 31, 31)
    before = fingerprint(model)
    with pytest.raises(Exception, match="32"):
        forward_passes(model, [x], lambda found: [DensityProbe(found)])
    assert_same(before, fingerprint(model))
    assert torch.backends.mha.get_fastpath_enabled()


def test_several_attentions_of_a_block_have_positions() -> None:
    module = nn.Sequential(nn.Softmax(-1), nn.Softmax(-1))
    block = Block(0, "twice", module, BlockRow("twice", (Add("attention"),), ()))
    probe = DensityProbe([block])
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    with probe.watching():
        for image in x:
            module(image[None])
    records = probe.records()
    assert {record.images for record in records} == {2}
    first, second = (
        [r for r in records if r.position == position] for position in ("attention", "attention 2")
    )
    assert len(first) == len(second) == len(records) / 2
    assert select(first, "entropy", 0).samples == pytest.approx(row_entropy(x.softmax(-1)).mean(-1).tolist())
    assert select(second, "entropy", 0).value > select(first, "entropy", 0).value


def test_a_block_that_did_not_run_says_so() -> None:
    case = BY_NAME["timm vit"]
    model = case.model()
    probe = DensityProbe(blocks(model))
    with probe.watching(), torch.no_grad():
        model.blocks[0](torch.randn(2, 17, 32))
    assert [r.note for r in probe.records() if r.block == 1] == ["the model did not run it"]
