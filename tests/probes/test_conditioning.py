"""Kappa, ranks and spectra of tokens against an explicit float64 computation."""

import importlib

import numpy as np
import pytest
import timm
import torch
from torch import nn

import wellposed as wp
import zoo
from untouched import assert_same, fingerprint
from wellposed.linalg import KAPPA_LIMIT
from wellposed.probes import conditioning
from wellposed.probes.conditioning import ConditioningProbe
from wellposed.records import Record

VIT = zoo.BY_NAME["timm vit"]


def by_hand(model: nn.Module, x: torch.Tensor) -> dict[tuple[int, str], torch.Tensor]:
    """The tokens of a timm ViT at every position, written out."""
    tokens = {}
    with torch.no_grad():
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
        for index, block in enumerate(model.blocks):
            tokens[index, "input"] = tokens[index, "attention.skip"] = x
            tokens[index, "attention.branch"] = block.attn(block.norm1(x))
            x = x + tokens[index, "attention.branch"]
            tokens[index, "attention.sum"] = tokens[index, "ffn.skip"] = x
            tokens[index, "ffn.branch"] = block.mlp(block.norm2(x))
            x = x + tokens[index, "ffn.branch"]
            tokens[index, "ffn.sum"] = x
    return tokens


def of(records: list[Record], measure: str) -> dict[tuple[int | None, str], Record]:
    return {(record.block, record.position): record for record in records if record.measure == measure}


def test_against_numpy() -> None:
    model, x = VIT.model(), VIT.input(5)
    records = conditioning(model, x, batch_size=2)
    kappa, spectrum = of(records, "kappa"), of(records, "spectrum")
    effective, stable = of(records, "effective rank"), of(records, "stable rank")
    expected = by_hand(model, x)
    assert set(kappa) == set(expected)
    for place, tokens in expected.items():
        s = np.linalg.svd(tokens.double().numpy(), compute_uv=False)
        true = s[:, 0] / s[:, -1]
        record = kappa[place]
        assert np.allclose(record.samples, true, rtol=1e-4)
        assert np.isclose(record.value, np.median(true), rtol=1e-4)
        assert np.isclose(record.low, np.quantile(true, 0.25), rtol=1e-4)
        assert np.isclose(record.high, np.quantile(true, 0.75), rtol=1e-4)
        assert np.isclose(record.log, np.log(np.median(true)), rtol=1e-4)
        assert np.allclose(spectrum[place].curve, (s / s[:, :1]).mean(0), rtol=1e-4, atol=1e-7)
        p = s / s.sum(1, keepdims=True)
        assert np.isclose(effective[place].value, np.median(np.exp(-(p * np.log(p)).sum(1))), rtol=1e-4)
        assert np.isclose(stable[place].value, np.median((s**2).sum(1) / s[:, 0] ** 2), rtol=1e-4)
        assert (record.images, record.dtype, record.status) == (5, "float32", "ok")
        assert record.estimator == "float64 Gram eigenvalues, SVD above kappa 3e4"
        assert record.tolerance is not None


@zoo.each_kind
def test_every_family(case: zoo.Case) -> None:
    model, x = case.model(), case.input(2)
    before = fingerprint(model)
    kappas = of(conditioning(model, x), "kappa")
    assert_same(before, fingerprint(model))
    assert {block for block, _ in kappas} == set(range(case.blocks))
    for block in wp.anatomy.blocks(model):
        positions = {position for index, position in kappas if index == block.index}
        parts = {f"{role}.{part}" for role in block.row.roles for part in ("branch", "skip", "sum")}
        assert positions == {"input", *parts}
    for record in kappas.values():
        if record.value is None:
            assert "one token" in record.note
        else:
            assert 1 <= record.value <= KAPPA_LIMIT


def test_the_stream_is_one_chain() -> None:
    model, x = VIT.model(), VIT.input(3)
    kappa = of(conditioning(model, x), "kappa")
    assert kappa[0, "input"].samples == kappa[0, "attention.skip"].samples
    assert kappa[0, "attention.sum"].samples == kappa[0, "ffn.skip"].samples
    assert kappa[0, "ffn.sum"].samples == kappa[1, "input"].samples


def test_a_removed_skip_shows() -> None:
    model, x = VIT.model(), VIT.input(3)
    wp.remove_skips(model, "attention")
    kappa = of(conditioning(model, x), "kappa")
    assert kappa[0, "attention.sum"].samples == kappa[0, "attention.branch"].samples
    assert kappa[0, "attention.skip"].samples != kappa[0, "attention.branch"].samples


def test_graying_shows() -> None:
    model, x = VIT.model(), VIT.input(3)
    before = of(conditioning(model, x), "kappa")[0, "input"]
    wp.gray_tokens(model, 0.5, "svd", where="blocks", blocks=0)
    after = of(conditioning(model, x), "kappa")[0, "input"]
    assert np.allclose(np.sqrt(before.samples), after.samples, rtol=1e-3)


def test_rank_deficient_images_are_counted() -> None:
    model, x = VIT.model(), VIT.input(4)
    with torch.no_grad():
        model.pos_embed.zero_()
    x[:3] = 1.0  # every patch of these images is alike
    records = conditioning(model, x)
    kappa, share = of(records, "kappa")[0, "input"], of(records, "rank deficient")[0, "input"]
    assert share.value == 0.75
    assert kappa.status == "at least"
    assert 1e6 < kappa.value <= KAPPA_LIMIT
    assert "3 of 4" in kappa.note
    assert kappa.at_least == (0, 1, 2)
    assert kappa.text().startswith("≥ ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_after_a_norm_without_bias_lack_a_rank(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(1, 1)).to(
        dtype
    )
    records = conditioning(model, torch.randn(3, 3, 64, 64), blocks=0)
    # 256 tokens of 96 channels that sum to zero, but for rounding.
    assert of(records, "kappa")[0, "input"].status == "at least"
    assert of(records, "rank deficient")[0, "input"].value == 1
    if dtype == torch.float32:
        assert of(records, "kappa")[0, "ffn.sum"].status == "ok"


@pytest.mark.parametrize("bad", [[1], [0, 1, 2]])
def test_non_finite_tokens_are_told(bad: list[int]) -> None:
    model = VIT.model()

    def spoil(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output[bad] = torch.nan

    model.patch_embed.register_forward_hook(spoil)
    records = conditioning(model, VIT.input(3))
    kappa, deficient = (of(records, measure)[0, "input"] for measure in ("kappa", "rank deficient"))
    assert [index for index, value in enumerate(kappa.samples) if value is None] == bad
    assert kappa.images == 3 - len(bad)
    assert f"{len(bad)} of 3" in kappa.note
    for record in (kappa, deficient):
        assert (record.status == "not measured") == (record.value is None) == (len(bad) == 3)


def test_few_spectra_many_kappas() -> None:
    records = conditioning(VIT.model(), VIT.input(5), batch_size=2, spectra=3)
    assert of(records, "kappa")[0, "input"].images == 5
    assert of(records, "effective rank")[0, "input"].images == 3
    whole = conditioning(VIT.model(), VIT.input(5))
    assert of(records, "kappa")[1, "ffn.sum"].samples == pytest.approx(
        of(whole, "kappa")[1, "ffn.sum"].samples
    )


@pytest.mark.parametrize("at_once", [1, 7, 1000])
@zoo.families("timm vit", "timm swin", "timm pvt_v2", "timm cait")
def test_measured_together_or_one_by_one(case: zoo.Case, at_once: int, monkeypatch) -> None:
    model, x = case.model(), case.input(5)
    expected = conditioning(model, x, batch_size=2, spectra=3)
    module = importlib.import_module("wellposed.probes.conditioning")
    monkeypatch.setattr(module, "_waits", lambda tokens: True)
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    assert conditioning(model, x, batch_size=2, spectra=3) == expected


@pytest.mark.parametrize("waits", [False, True])
def test_a_tensor_changed_in_place_is_measured_again(waits: bool, monkeypatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("wellposed.probes.conditioning"), "_waits", lambda tokens: waits
    )
    found = wp.anatomy.blocks(VIT.model())
    probe = ConditioningProbe(found)
    tokens = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    with probe.watching():
        probe.see(found[0], "input", tokens)
        tokens[:, 0] *= 100
        probe.see(found[0], "attention.skip", tokens)
    kappa = of(probe.records(), "kappa")
    first, second = (kappa[0, name].samples for name in ("input", "attention.skip"))
    assert all(after > 2 * before for before, after in zip(first, second, strict=True))


def test_autocast_counts() -> None:
    model, x = VIT.model(), VIT.input(2)
    with torch.autocast("cpu", torch.bfloat16):
        kappa = of(conditioning(model, x), "kappa")
    assert kappa[0, "attention.branch"].dtype == "bfloat16"
    full = of(conditioning(model, x), "kappa")[0, "attention.branch"]
    assert kappa[0, "attention.branch"].status == "ok"
    assert kappa[0, "attention.branch"].value == pytest.approx(full.value, rel=0.05)


def test_half_precision_model() -> None:
    kappa = of(conditioning(VIT.model(dtype=torch.bfloat16), VIT.input(2)), "kappa")
    assert kappa[0, "input"].dtype == "bfloat16"


def test_selected_blocks() -> None:
    records = conditioning(
        zoo.BY_NAME["timm swin"].model(), zoo.BY_NAME["timm swin"].input(1), blocks=[0, -1]
    )
    assert {record.block for record in records} == {0, 3}
    with pytest.raises(IndexError, match="within 0 and 1"):
        conditioning(VIT.model(), VIT.input(1), blocks=5)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_as_found_after_an_error(error: type[BaseException]) -> None:
    model = VIT.model().train()
    wp.broadcast_context(model)
    model.blocks[0].eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def fail(*_: object) -> None:
        raise error("stop")

    handle = model.blocks[1].mlp.register_forward_hook(fail)
    before = fingerprint(model)
    with pytest.raises(error, match="stop"):
        conditioning(model, VIT.input(2))
    assert_same(before, fingerprint(model))
    handle.remove()


def test_a_mean_of_bounds_is_a_bound() -> None:
    from wellposed.probes.passes import Sample, summarize

    values = torch.tensor([10.0, 20.0, 30.0])
    flags = torch.tensor([True, False, False])
    assert summarize("kappa", Sample(values, flags)).status == "at least"
    assert summarize("kappa", Sample(values, flags.flip(0))).status == "ok"
    assert summarize("kappa", Sample(values, torch.tensor([False, False, False]))).status == "ok"
    # Of four, the third decides the median with the second: it may be any number above 3.
    even = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([False, False, True, False])
    assert summarize("kappa", Sample(*even)).status == "at least"
