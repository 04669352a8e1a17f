"""What studies measure on the weights of a run, and what they read off it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import short_runs
from wellposed.bench.graying import StepsPlan
from wellposed.linalg.bounds import VERDICTS
from wellposed.nn import TokenGraying
from wellposed.study import RunRecord, StudyRecords
from wellposed.study.measured import bounds, density, jacobian_spectrum, training_time
from wellposed.study.measured.entropy_per_head import entropy_per_head
from wellposed.study.measured.kappa_per_layer import FOUR, kappa_after, kappa_per_layer
from wellposed.study.measured.softmax_rows import attention_rows, rank_correlation
from wellposed.study.measured.weights import open_run

TEST_IMAGES = 400


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain run with its checkpoints of 12 updates."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    short_runs.run(folder, checkpoint_every=4, keep=10, lr=3e-3)
    return folder


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edited") / "run"
    edits = {"graying": "dct", "eps": 0.9, "eps_end": 0.5, "broadcast": "cb_s", "remove_skips": "ffn"}
    short_runs.run(folder, init="xavier", **edits)
    return folder


def accuracy(folder: Path, weights: Any) -> float:
    trained = open_run(folder, TEST_IMAGES)
    with torch.inference_mode():
        found = trained.model(trained.moment(weights))(trained.images).argmax(-1)
    return (found == trained.labels).double().mean().item()


def kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As ``measured.jsonl`` gives them back."""
    return [json.loads(json.dumps(row, allow_nan=False)) for row in rows]


def records(runs: dict[tuple[str, int], list[dict[str, Any]]], measured: Any = ()) -> StudyRecords:
    made = [
        RunRecord(label, "digits", seed, {}, {}, {}, "finished", {}, measured=rows)
        for (label, seed), rows in runs.items()
    ]
    return StudyRecords("any", "small", made, measured)


# The weights of a run.


@pytest.mark.parametrize("weights", ["best", "last"])
@pytest.mark.parametrize("which", ["run", "edited"])
def test_the_model_classifies_as_it_did_when_it_was_tested(request, which, weights):
    folder = request.getfixturevalue(which)
    result = json.loads((folder / "result.json").read_text())
    expected = result["test" if weights == "last" else "best"]["accuracy"]
    assert accuracy(folder, weights) == pytest.approx(expected, abs=1e-9)


def test_the_power_of_the_graying_is_that_of_the_moment(edited):
    trained = open_run(edited, 2)
    powers = {
        weights: next(
            float(module.eps)
            for module in trained.model(trained.moment(weights)).modules()
            if isinstance(module, TokenGraying)
        )
        for weights in ("initial", "last")
    }
    assert powers == pytest.approx({"initial": 0.9, "last": 0.5})


def test_moments_go_from_the_start_over_the_checkpoints_to_the_end(run):
    moments = open_run(run, 2).through_training()
    assert [(moment.weights, moment.update, moment.epoch) for moment in moments] == [
        ("initial", 0, 0.0),
        ("checkpoint", 4, 1.0),
        ("checkpoint", 8, 2.0),
        ("last", 12, 3.0),
    ]


def test_test_images_are_spread_over_the_set(run):
    assert len(open_run(run, 40).labels.unique()) > 5
    assert len(open_run(run, 10_000).images) == TEST_IMAGES


def test_what_is_not_there_is_told(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="expected the folder of a run"):
        open_run(tmp_path)
    (tmp_path / "best").mkdir()
    for name in ("recipe.toml", "result.json", "best/config.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    with pytest.raises(FileNotFoundError, match=r"expected last/model\.safetensors"):
        open_run(tmp_path).moment("last")


def test_a_masked_autoencoder_is_measured_at_its_end_alone(tmp_path):
    short_runs.run(tmp_path / "mae", task="mae", epochs=1, decoder_depth=1)
    assert {row["weights"] for row in kappa_per_layer(tmp_path / "mae", images=2)} == {"best"}
    with pytest.raises(ValueError, match="expected a run that classifies"):
        kappa_per_layer(tmp_path / "mae", through_training=True, images=2)


# Kappa and entropy.


def test_kappa_at_the_four_positions_of_every_block(run):
    rows = kept(kappa_per_layer(run, images=4))
    assert {(row["block"], row["position"]) for row in rows} >= {(b, p) for b in (0, 1) for p in FOUR}
    assert {row["weights"] for row in rows} == {"best"}
    assert all(row["estimator"] and row["dtype"] == "float32" and row["images"] == 4 for row in rows)
    assert all(row["log"] == pytest.approx(math.log(row["value"]), rel=1e-4) for row in rows)


def test_kappa_is_that_of_the_token_matrices(run):
    trained = open_run(run, 5)
    model = trained.model(trained.moment("last"))
    seen: list[torch.Tensor] = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].double()))
    with torch.inference_mode():
        model(trained.images)
    expected = np.median([np.linalg.cond(tokens) for tokens in seen[0].numpy()])
    rows = kappa_after(weights="last", images=5)(run, run)
    (found,) = [row["value"] for row in rows if (row["block"], row["position"]) == (1, "input")]
    assert found == pytest.approx(expected, rel=1e-4)


def test_kappa_through_training(run):
    rows = kappa_per_layer(run, through_training=True, images=2)
    one = [row["update"] for row in rows if (row["block"], row["position"]) == (0, "ffn.branch")]
    assert one[:4] == [0, 4, 8, 12]


def test_entropy_of_each_head_before_and_after(edited):
    rows = kept(entropy_per_head(edited, images=3))
    heads = {
        (row["weights"], row["block"], row["head"])
        for row in rows
        if row["measure"] == "entropy" and "head" in row
    }
    assert heads == {(w, block, head) for w in ("initial", "best") for block in (0, 1) for head in (0, 1)}
    assert all(0 <= row["value"] <= 1 for row in rows if row["measure"] == "entropy")


# The studies.


def test_bounds_are_measured_through_training_and_counted(run, tmp_path):
    rows = kept(bounds.bounds_of_run(run))
    of_block = [row for row in rows if row["block"] == 0 and row.get("head") is None]
    assert {(row["measure"], row["update"]) for row in of_block} == {
        (measure, update) for measure in bounds.MEASURES for update in (0, 4, 8, 12)
    }
    assert all(sum(row["verdicts"]) == bounds.IMAGES for row in of_block)
    report = bounds.report(records({("all skips", 0): rows}))
    table = {(row["measure"], row["heads"]): row for row in report.tables["table"]}
    ffn = table["kappa ffn linear", "all as one"]
    assert sum(ffn[name] for name in VERDICTS) == 4 * 2 * bounds.IMAGES
    assert ffn["ln bound, end"] > ffn["ln kappa, end"]
    draws(report, tmp_path)


def bound_row(measure: str, violated: int, log_bound: float, head: str | None = None) -> dict[str, Any]:
    row = {"measure": measure, "block": 0, "weights": "last", "update": 1, "epoch": 1.0, "log": 3.0}
    return row | {"log_bound": log_bound, "verdicts": [4 - violated, 0, violated, 0], "head": head}


@pytest.mark.parametrize(
    ("violated", "with_skip", "expected"), [(0, 5.0, "reproduced"), (1, 5.0, "partly"), (0, 12.0, "partly")]
)
def test_a_violated_bound_or_a_higher_one_with_the_skip_is_told(violated, with_skip, expected):
    rows = [bound_row("kappa 4.1 linear", violated, 10.0), bound_row("kappa 4.2 linear", 0, with_skip)]
    rows.append(bound_row("kappa 4.1 linear", 2, 6.0, "each"))
    report = bounds.report(records({("all skips", 0): rows}))
    assert report.verdict == expected
    assert f"violated in {violated} of 4" in report.reason
    assert any("head by head, kappa 4.1 linear is violated in 2 of 4" in note for note in report.notes)


def test_spectra_of_a_plain_run_under_both_grayings(run, monkeypatch, tmp_path):
    monkeypatch.setattr(jacobian_spectrum, "EPS", (1.0, 0.5))
    monkeypatch.setattr(jacobian_spectrum, "IMAGES", 1)
    rows = kept(jacobian_spectrum.spectra_of_run(run))
    places = {(row["method"], row["where"], row["eps"]) for row in rows}
    assert places == {(m, w, e) for m in ("svd", "dct") for w in ("blocks", "embedding") for e in (1.0, 0.5)}
    plain = [row["relative"] for row in rows if row["eps"] == 1]
    for relative in plain:
        assert relative == pytest.approx(plain[0], rel=1e-2, abs=1e-6)
        assert relative == sorted(relative, reverse=True)
        assert relative[0] == 1
    report = jacobian_spectrum.report(records({("plain", 0): rows}))
    assert len(report.tables["table"]) == len(rows)
    draws(report, tmp_path)


def test_the_spectrum_of_a_run_trained_with_graying_is_as_trained(edited, monkeypatch):
    monkeypatch.setattr(jacobian_spectrum, "IMAGES", 1)
    (row,) = jacobian_spectrum.spectra_of_run(edited)
    assert (row["method"], row["where"]) == ("dct", "as trained")


@pytest.mark.parametrize(("middle", "expected"), [(0.2, "reproduced"), (0.1, "no difference"), (0.01, "not")])
def test_a_flatter_spectrum_has_a_higher_middle(middle, expected):
    def row(method: str, where: str, eps: float, value: float) -> dict[str, Any]:
        told = {"measure": "jacobian spectrum", "method": method, "where": where, "eps": eps}
        return told | {"sigma_max": 1.0, "relative": [1.0, value, 1e-3], "points": 3}

    rows = [
        row(method, where, eps, value)
        for method in ("svd", "dct")
        for where in ("blocks", "embedding")
        for eps, value in ((1.0, 0.1), (0.5, middle))
    ]
    assert jacobian_spectrum.report(records({("plain", 0): rows})).verdict == expected


def test_without_the_whole_matrix_only_the_upper_tenth_is_told(run, monkeypatch):
    small = {"DENSE": 10, "EPS": (1.0, 0.5), "IMAGES": 1, "METHODS": ("svd",)}
    for name, value in small.items():
        monkeypatch.setattr(jacobian_spectrum, name, value)
    rows = jacobian_spectrum.spectra_of_run(run)
    assert {len(row["relative"]) for row in rows} == {11}
    report = jacobian_spectrum.report(records({("plain", 0): rows}))
    assert "at 10% of the spectrum" in report.reason
    assert all(row["ln relative at 50%"] is None for row in report.tables["table"])


def test_density_of_a_run(run, tmp_path):
    rows = kept(density.density_of_run(run))
    report = density.report(records({("plain", 0): rows, ("plain", 1): rows}))
    table = report.tables["table"]
    assert [row["block"] for row in table] == [0, 1]
    assert all(row["lowest head"] <= row["entropy"] <= row["highest head"] for row in table)
    assert "mean entropy" in report.reason
    assert any("at the start to" in note for note in report.notes)
    draws(report, tmp_path)


def test_rows_of_attention_are_those_of_the_model(run):
    trained = open_run(run, 3)
    model = trained.model(trained.moment("last"))
    rows = list(attention_rows(model, trained.images))
    tokens = 17
    for row in rows:
        if row["measure"] == "softmax rows":
            assert row["keys"] == tokens
            # The trace is 1 - |p|^2, and |p|^2 at least 1 / n; the Frobenius norm is at most the trace.
            assert all(0 <= trace <= 1 - 1 / tokens + 1e-4 for trace in row["trace"])
            assert all(f <= t + 1e-4 for f, t in zip(row["frobenius"], row["trace"], strict=True))
    counted = {row["rows"] for row in rows if row["measure"] == "softmax correlation"}
    assert counted == {3 * 2 * 2 * tokens}  # images, blocks, heads, queries


def test_rank_correlation_has_a_sign_and_none_without_variation():
    x = torch.arange(10.0)
    assert rank_correlation(x, -(x**3)) == -1
    assert rank_correlation(x, torch.ones(10)) is None


def test_training_steps_are_timed_once(monkeypatch, tmp_path):
    def tiny(device: torch.device, given: dict[str, Any]) -> StepsPlan:
        sizes = {"model": "test_vit", "image_size": 32, "batch_size": 2, "precision": "fp32"}
        return StepsPlan(
            **sizes, compile=False, updates=1, edits=("svd-embedding", "dct-embedding"), rounds=1
        )

    monkeypatch.setattr(training_time, "usual_steps", tiny)
    rows = kept(training_time.steps_once("small", tmp_path))
    assert [row["edit"] for row in rows] == ["plain", "svd-embedding", "dct-embedding"]
    report = training_time.report(records({}, rows))
    assert [row["edit"] for row in report.tables["table"]] == [row["edit"] for row in rows]
    draws(report, tmp_path)


@pytest.mark.parametrize(
    ("dct", "svd", "on", "expected"),
    [
        (1.01, 6.0, "cuda", "reproduced"),
        (1.01, 1.2, "cuda", "partly"),
        (1.5, 1.2, "cuda", "not"),
        (1.01, None, "cuda", "incomplete"),
        (1.01, 6.0, "cpu", "incomplete"),
    ],
)
def test_the_verdict_on_training_time(dct, svd, on, expected):
    about = dict.fromkeys(("model", "image_size", "batch_size", "precision", "device"), "any") | {"on": on}
    ratios = {"plain": 1.0, "dct-embedding": dct, "svd-embedding": svd}
    rows = [{"measure": "training step", "edit": e, "ratio": r, "about": about} for e, r in ratios.items()]
    assert training_time.report(records({}, rows)).verdict == expected


def test_without_records_a_study_is_incomplete():
    for module in (bounds, density, jacobian_spectrum, training_time):
        assert module.report(records({})).verdict == "incomplete"


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("module", [bounds, density, jacobian_spectrum, training_time])
def test_the_recipes_of_a_study_are_recipes(module, scale):
    for data in ("digits", "cifar10:DIR"):
        base = module.STUDY.base(scale, data).to_mapping()
        for cell in module.STUDY.cells(scale):
            short_runs.Recipe.from_mapping(base | dict(cell.fields))


def draws(report: Any, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    report.draw(folder / "figure.png")
    assert (folder / "figure.png").stat().st_size > 1000
