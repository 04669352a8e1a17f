"""A trained model's analyses, and the advice on Context Broadcasting, from made-up measurements."""

import dataclasses

import numpy as np
import pytest
import timm
import torch

from studies.cb_advice import study as cb_advice
from studies.pretrained import study as pretrained
from study_material import claim_of, draws, record, records
from wellposed import study_records
from wellposed.records import VERDICTS
from wellposed.stats import Verdict


@pytest.fixture
def small(monkeypatch):
    """A tiny model and four steps in the place of DeiT-Ti's."""
    made = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 4}
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name: create(name, **made))
    for name, value in {"MEASURED": 4, "BOUNDED": 2, "DRAWS": 2, "STEPS": (1, 2)}.items():
        monkeypatch.setattr(pretrained, name, value)
    monkeypatch.setitem(pretrained.TUNING, "batch", 4)
    torch.manual_seed(0)
    return timm.create_model(pretrained.MODEL).eval()


def test_a_model_is_analysed_edited_trained_and_left_as_it_was(small, tmp_path):
    images = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        labels = small(images).argmax(1)
    before = {name: each.clone() for name, each in small.state_dict().items()}
    rows = pretrained.analysed(small, images, pretrained.TRAINED, 0)
    rows += pretrained.analysed(small, images, pretrained.RANDOM, 0)
    rows += pretrained.edited(small, images, labels) + pretrained.tuned(small, images, labels)
    assert all(torch.equal(each, before[name]) for name, each in small.state_dict().items())
    rows = [study_records.rounded(row) for row in rows]
    report = pretrained.report(records({}, rows))
    assert [row["edit"] for row in report.tables["edits"]] == ["none", *pretrained.MILD, *pretrained.STRONG]
    assert report.tables["edits"][0]["top1"] == 100.0
    assert {row["block"] for row in report.tables["heads"]} == {0, 1}
    counts = [sum(row[each] for each in VERDICTS) for row in report.tables["bounds"] if row["of"] == "block"]
    assert set(counts) == {4}, "two images in each of two blocks"
    # The records say the same as the model: kappa by an SVD in float64.
    tokens = small._pos_embed(small.patch_embed(images[:4])).detach().double()
    values = torch.linalg.svdvals(tokens)
    (row,) = (
        row
        for row in rows
        if row["measure"] == "ln kappa"
        and (row["position"], row["block"], row["weights"]) == ("input", 0, pretrained.TRAINED)
    )
    assert row["value"] == pytest.approx(np.median((values[:, 0] / values[:, -1]).log().numpy()), abs=1e-3)
    draws(report, tmp_path)


def missed(edit, wrong, **more):
    return {"measure": "missed", "edit": edit, "values": wrong, "images": 100} | more


def test_edits_are_judged_image_by_image():
    always, sometimes = list(range(20)), list(range(60))
    rows = [missed("none", always), missed("CB, all blocks", sometimes)]
    rows.append(missed("CB, last block", always))
    trained = {"measure": "missed after training", "step": pretrained.STEPS[-1], "images": 50}
    rows += [trained | {"edit": "CB, all blocks", "seed": seed, "values": [0]} for seed in range(2)]
    report = pretrained.report(records({}, rows))
    costs = claim_of(report, "CB, all blocks costs accuracy")
    assert costs.estimate is not None
    assert (costs.estimate.mean, costs.estimate.n) == (-40.0, 100)
    assert costs.verdict is Verdict.SUPPORTED
    # Equal hits show no spread, so they decide nothing.
    assert claim_of(report, "takes CB, last block").verdict is Verdict.UNDECIDED
    after = claim_of(report, "repairs CB, all blocks")
    assert after.estimate is not None
    assert (after.estimate.mean, after.estimate.n) == (-2.0, 50), "the second half, where none is missed"


def test_bounds_of_kappa_stay_bounds():
    row = {"measure": "ln kappa of images", "weights": pretrained.TRAINED}
    values = {"attention.branch": [16.0, 16.0, 15.0], "ffn.branch": [8.0, 8.5, 9.0]}
    rows = [row | {"position": name, "values": each, "at_least": []} for name, each in values.items()]
    rows[0]["at_least"] = [0, 1]
    found = pretrained.kappa_difference(rows, pretrained.TRAINED, "attention.branch", "ffn.branch")
    assert found is not None
    assert (found.mean, found.at_least, found.comparison) == (7.5, True, "paired median")
    rows[1]["at_least"] = [2]
    found = pretrained.kappa_difference(rows, pretrained.TRAINED, "attention.branch", "ffn.branch")
    assert found is not None
    assert found.n == 2, "an image whose FFN is a bound says nothing"


def test_what_it_needs_is_said(tmp_path):
    with pytest.raises(ValueError, match="start_from=WEIGHTS"):
        pretrained.measure("small", tmp_path, ["digits"], {})


def entropy(value):
    return {"measure": "entropy", "block": 0, "value": value}


def test_the_advice_is_read_from_the_records_of_others(monkeypatch, tmp_path):
    draw = np.random.default_rng(0)
    runs = []
    for number, data in enumerate(("a", "b", "c", "d")):
        for seed in range(4):
            sparse = 0.9 - 0.1 * number + 0.01 * draw.normal()
            gain = 5 * (1 - sparse) + 0.05 * draw.normal()
            made = {"data": data, "measured": [entropy(sparse)]}
            runs.append(record("none", seed, 50.0, **made))
            runs.append(record("CB", seed, 50.0 + gain, **made))
    study_records.write(tmp_path, runs)
    monkeypatch.setattr(cb_advice, "PAIRS", {"context-broadcasting": {"own": ("none", "CB")}})
    monkeypatch.setattr(cb_advice, "folder_of", lambda name, scale: tmp_path)
    rows = cb_advice.read_gains("small", tmp_path, [], {})
    assert len(rows) == 16
    report = cb_advice.report(records({}, rows))
    found = claim_of(report, "settings")
    assert found.estimate is not None
    assert found.estimate.mean == pytest.approx(-5, abs=1)
    assert found.verdict is Verdict.SUPPORTED
    draws(report, tmp_path)
    flat = [dataclasses.asdict(cb_advice.Gain("one", seed, 0.8 + 0.01 * seed, 1.0)) for seed in range(3)]
    assert cb_advice.over_settings(cb_advice.by_setting(records({}, flat))) is None


def test_the_advice_needs_records(monkeypatch, tmp_path):
    monkeypatch.setattr(cb_advice, "folder_of", lambda name, scale: tmp_path)
    with pytest.raises(FileNotFoundError, match="run that study first"):
        cb_advice.read_gains("small", tmp_path, [], {})
