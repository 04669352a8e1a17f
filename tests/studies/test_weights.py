"""The weights of a run as a model again, and kappa and entropy measured on them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import short_runs
from studies.density.study import density_of_run
from studies.measures import conditioning_and_density
from studies.skip_ablation.study import POSITIONS
from study_material import kept
from wellposed.nn import TokenGraying
from wellposed.train.runs import open_run

TEST_IMAGES = 400


def accuracy(folder: Path, weights: Any) -> float:
    trained = open_run(folder, TEST_IMAGES)
    with torch.inference_mode():
        found = trained.model(trained.moment(weights))(trained.images).argmax(-1)
    return (found == trained.labels).double().mean().item()


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


def test_what_is_missing_is_reported(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="expected the folder of a run"):
        open_run(tmp_path)
    (tmp_path / "best").mkdir()
    for name in ("recipe.toml", "result.json", "best/config.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    with pytest.raises(FileNotFoundError, match=r"expected last/model\.safetensors"):
        open_run(tmp_path).moment("last")


def test_a_masked_autoencoder_is_measured_at_its_end_alone(tmp_path):
    short_runs.run(tmp_path / "mae", task="mae", epochs=1, decoder_depth=1)
    assert conditioning_and_density(tmp_path / "mae")
    with pytest.raises(ValueError, match="expected a run that classifies"):
        open_run(tmp_path / "mae", 2).through_training()


def test_kappa_at_the_four_positions_of_every_block(run):
    rows = [row for row in kept(conditioning_and_density(run)) if row["measure"] == "kappa"]
    assert {(row["block"], row["position"]) for row in rows} >= {(b, p) for b in (0, 1) for p in POSITIONS}
    assert all(row["value"] >= 1 for row in rows)


def test_kappa_is_that_of_the_token_matrices(run):
    trained = open_run(run)
    model = trained.model(trained.moment("last"))
    seen: list[torch.Tensor] = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].double()))
    with torch.inference_mode():
        model(trained.images)
    expected = np.median([np.linalg.cond(tokens) for tokens in seen[0].numpy()])
    rows = conditioning_and_density(run)
    (found,) = [
        row["value"]
        for row in rows
        if row["measure"] == "kappa" and (row["block"], row["position"]) == (1, "input")
    ]
    assert found == pytest.approx(expected, rel=1e-4)


def test_entropy_of_each_head_before_and_after(edited):
    rows = kept(density_of_run(edited))
    heads = {
        (row["weights"], row["block"], row["head"])
        for row in rows
        if row["measure"] == "entropy" and "head" in row
    }
    assert heads == {(w, block, head) for w in ("initial", "last") for block in (0, 1) for head in (0, 1)}
    assert all(0 <= row["value"] <= 1 for row in rows if row["measure"] == "entropy")
