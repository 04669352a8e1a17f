"""Norms, outliers and mean of tokens, spectra of weights, gradients by block: float64 references."""

import math
import sys

import pytest
import torch
from torch import Tensor

import wellposed as wp
import zoo
from untouched import assert_same, fingerprint
from wellposed.anatomy.model import Block
from wellposed.probes.observe import observed, watching_tokens
from wellposed.probes.parameters import gradient_norms, weight_spectra
from wellposed.probes.tokens import mean_share, norm_kurtosis, outlier_ratio, token_norm, token_norms

VIT = zoo.BY_NAME["timm vit"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(x: Tensor) -> dict[str, float]:
    """Of the tokens (N, D) of one image, token by token."""
    norms = sorted(math.sqrt(sum(float(entry) ** 2 for entry in token)) for token in x)
    half = len(norms) // 2
    median = norms[half] if len(norms) % 2 else (norms[half - 1] + norms[half]) / 2
    average = sum(norms) / len(norms)
    second = sum((norm - average) ** 2 for norm in norms) / len(norms)
    fourth = sum((norm - average) ** 4 for norm in norms) / len(norms)
    mean = [sum(float(token[c]) for token in x) / len(x) for c in range(x.shape[1])]
    return {
        "token norm": median,
        "outlier tokens": norms[-1] / median,
        "norm kurtosis": fourth / second**2 if second else math.nan,
        "mean share": len(x) * sum(m * m for m in mean) / sum(norm**2 for norm in norms),
    }


@pytest.mark.parametrize("tokens", [2, 7, 16])
def test_the_measures_are_those_written_out(tokens: int) -> None:
    x = random(3, tokens, 5) + 0.5
    for number, image in enumerate(x):
        expected = by_hand(image)
        got = [
            measure(x)[number].item() for measure in (token_norm, outlier_ratio, norm_kurtosis, mean_share)
        ]
        assert got == pytest.approx(list(expected.values()), rel=1e-10)


def test_limits() -> None:
    alike, without_mean = torch.ones(1, 8, 4), torch.cat([torch.eye(4), -torch.eye(4)])[None]
    assert mean_share(alike).item() == pytest.approx(1, abs=1e-12)
    assert mean_share(without_mean).item() == 0
    assert outlier_ratio(alike).item() == 1
    assert norm_kurtosis(alike).isnan()
    long = torch.cat([torch.ones(1, 31, 4), 20 * torch.ones(1, 1, 4)], dim=1)
    assert outlier_ratio(long).item() == pytest.approx(20)
    assert norm_kurtosis(long).item() > 25
    assert mean_share(torch.zeros(1, 3, 2)).isnan()


@pytest.mark.parametrize("scale", [1e-3, 7.0])
def test_scale_does_not_count(scale: float) -> None:
    x = random(2, 9, 6)
    for measure in (outlier_ratio, norm_kurtosis, mean_share):
        torch.testing.assert_close(measure(scale * x), measure(x), rtol=1e-10, atol=0)


def test_broadcasting_moves_the_share_of_the_mean() -> None:
    """M + d/2 of y = m + d: the share s becomes s / (s + (1 - s) / 4)."""
    x = random(2, 9, 6) + 0.3
    share = mean_share(x)
    broadcast = (x + x.mean(1, keepdim=True)) / 2
    torch.testing.assert_close(mean_share(broadcast), share / (share + (1 - share) / 4), rtol=1e-10, atol=0)


@zoo.each_kind
def test_at_each_position_of_each_family(case: zoo.Case) -> None:
    model, x = case.model(), case.input(2)
    before = fingerprint(model)
    records = token_norms(model, x)
    assert_same(before, fingerprint(model))
    seen: dict[tuple[int, str], Tensor] = {}

    def see(block: Block, position: str, tokens: Tensor) -> None:
        seen[block.index, position] = tokens.double()

    with observed(model) as found, torch.no_grad(), watching_tokens(found, see):
        model(x)
    assert {(r.block, r.position) for r in records} == {key for key in seen if not key[1].endswith(".skip")}
    for record in records:
        expected = [by_hand(image)[record.measure] for image in seen[record.block, record.position]]
        if record.measure != "norm kurtosis":  # its fourth powers cancel in float32
            assert list(record.samples) == pytest.approx(expected, rel=1e-5)


def test_padding_does_not_count() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    model = transformers.BertModel(config).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    padded = token_norms(model, {"input_ids": ids, "attention_mask": mask})
    alone = token_norms(model, {"input_ids": ids[1:, :3], "attention_mask": mask[1:, :3]})
    for whole, own in zip(padded, alone, strict=True):
        assert whole.note.startswith("without padding")
        if whole.value is None:
            assert "equally long" in whole.note  # behind a LayerNorm
        else:
            assert whole.samples[1] == pytest.approx(own.samples[0], rel=1e-4)


# Weights


@pytest.mark.parametrize(
    ("name", "position", "of"),
    [
        ("timm vit", "attn.qkv k", lambda m: m.blocks[1].attn.qkv.weight[32:64]),
        ("timm vit", "mlp.fc2", lambda m: m.blocks[1].mlp.fc2.weight),
        ("hf vit", "attention.attention.query", None),
        (
            "torchvision vit",
            "self_attention v",
            lambda m: m.encoder.layers[1].self_attention.in_proj_weight[64:],
        ),
    ],
)
def test_spectra_of_weights(name: str, position: str, of) -> None:
    model = zoo.BY_NAME[name].model()
    records = {(r.measure, r.block, r.position): r for r in weight_spectra(model)}
    if of is None:
        position = next(p for _, _, p in records if p.rsplit(".")[-1] in ("query", "q_proj"))
        path = next(n for n, _ in model.named_modules() if n.endswith(f"1.{position}"))
        weight = model.get_submodule(path).weight
    else:
        weight = of(model)
    values = torch.linalg.svdvals(weight.detach().double())
    kappa = records["weight kappa", 1, position]
    assert kappa.value == pytest.approx((values[0] / values[-1]).item(), rel=1e-5)
    stable = records["weight stable rank", 1, position]
    assert stable.value == pytest.approx((values.square().sum() / values[0] ** 2).item(), rel=1e-6)


def test_weights_are_measured_as_the_layers_use_them_and_stay() -> None:
    model = VIT.model()
    wp.condition_weights(model, strength="exact")
    wp.normalise_spectrum(model, "ffn")
    model.train()
    before = fingerprint(model)
    diagnosis = wp.diagnose(model, what="weights")
    assert_same(before, fingerprint(model))
    kappas = [r.value for r in diagnosis.select("weight kappa") if "qkv" in r.position]
    assert len(kappas) == 6
    assert max(kappas) <= 2 + 1e-5
    assert "weight stable rank" in str(diagnosis)


def test_images_are_asked_for_where_they_are_needed() -> None:
    with pytest.raises(ValueError, match=r"expected images to measure conditioning, got none"):
        wp.diagnose(VIT.model(), what=["conditioning", "weights"])


def test_a_deficient_weight_has_a_bound() -> None:
    model = VIT.model()
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight[:, 0] = 0
    (record,) = wp.diagnose(model, what="weights").select("weight kappa", block=0, position="mlp.fc1")
    assert record.status == "at least"
    assert record.value > 1e6


# Gradients


def test_gradients_are_those_of_autograd_and_leave_no_trace() -> None:
    model, x = VIT.model(dtype=torch.float64), VIT.input(2, dtype=torch.float64)
    model.blocks[0].requires_grad_(False)
    kept = torch.full_like(model.blocks[1].mlp.fc1.weight, 3.0)
    model.blocks[1].mlp.fc1.weight.grad = kept.clone()
    before = fingerprint(model)
    records = gradient_norms(model, x)
    assert_same(before, fingerprint(model))
    assert not any(p.requires_grad for p in model.blocks[0].parameters())
    assert torch.equal(model.blocks[1].mlp.fc1.weight.grad, kept)

    twin = VIT.model(dtype=torch.float64).eval()
    classes = twin(x[:1]).shape[-1]
    direction = torch.randn(1, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    direction /= direction.norm()
    for number in range(2):
        twin.zero_grad()
        (twin(x[number : number + 1]) * direction).sum().backward()
        for record in records:
            squares = [p.grad.square().sum() for p in twin.blocks[record.block].parameters()]
            assert record.samples[number] == pytest.approx(torch.stack(squares).sum().sqrt().item(), rel=1e-9)


def test_diagnose_takes_them_all(tmp_path) -> None:
    model, x = VIT.model(), VIT.input(2)
    diagnosis = wp.diagnose(model, x, what=["tokens", "weights", "gradients"])
    told = str(diagnosis)
    for measure in ("token norm", "outlier tokens", "norm kurtosis", "mean share", "weight kappa"):
        assert diagnosis.select(measure)
        assert measure in told
    assert len(diagnosis.select("gradient norm")) == 2
    in_short = str(wp.diagnose(model, x))
    assert "mean share" in in_short
    assert "norm kurtosis" not in in_short
    diagnosis.save(tmp_path)
    assert wp.Diagnosis.from_json(tmp_path / "diagnosis.json").records == diagnosis.records


def test_a_table_of_pandas(monkeypatch, tmp_path) -> None:
    pandas = pytest.importorskip("pandas")
    diagnosis = wp.diagnose(VIT.model(), VIT.input(2), what=["tokens", "weights"])
    frame = diagnosis.to_pandas()
    diagnosis.to_csv(tmp_path / "all.csv")
    assert len(frame) == len(diagnosis.records)
    assert list(frame.columns) == list(pandas.read_csv(tmp_path / "all.csv").columns)
    chosen = frame[(frame.measure == "mean share") & (frame.position == "ffn.sum")]
    expected = diagnosis.select("mean share", position="ffn.sum")
    assert chosen.value.tolist() == [record.value for record in expected]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"expected pandas .* pip install 'wellposed\[pandas\]', or use"):
        diagnosis.to_pandas()
