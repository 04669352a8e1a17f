"""What a method adds to a training step; and what all measured studies have."""

from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.graying import StepsPlan
from studies import runner
from studies.report import read_summary, write_report
from studies.study import get, names
from studies.training_time import study as training_time
from study_material import draws, records, verdicts
from wellposed import study_records
from wellposed.stats import Verdict
from wellposed.train import Recipe


def test_training_steps_are_timed_once(monkeypatch, tmp_path):
    def tiny(device: torch.device, given: dict[str, Any]) -> StepsPlan:
        sizes = {"model": "test_vit", "image_size": 32, "batch_size": 2, "precision": "fp32"}
        return StepsPlan(
            **sizes, compile=False, updates=1, edits=("svd-embedding", "dct-embedding"), rounds=1
        )

    monkeypatch.setattr(training_time, "usual_steps", tiny)
    study, quiet = training_time.STUDY, Console(quiet=True)
    done = runner.run(study, scale="small", data=["digits"], seeds=[0], out=tmp_path, console=quiet)
    write_report("training-time", study, done.records, tmp_path, has_worked=True, draw=False)
    rows = study_records.read(tmp_path).measured
    assert [row["edit"] for row in rows] == ["plain", "svd-embedding", "dct-embedding"]
    report = training_time.report(records({}, rows))
    assert [row["edit"] for row in report.tables["table"]] == [row["edit"] for row in rows]
    draws(report, tmp_path)
    summary = read_summary(tmp_path)
    assert (summary["data"], summary["seeds"]) == ({}, [])
    assert summary["command"] == "python -m studies training-time --scale small"


@pytest.mark.parametrize(
    ("dct", "svd", "on", "expected"),
    [
        (1.01, 6.0, "cuda", [Verdict.SUPPORTED, Verdict.SUPPORTED]),
        (1.01, 1.2, "cuda", [Verdict.SUPPORTED, Verdict.CONTRADICTED]),
        (1.5, 1.2, "cuda", [Verdict.CONTRADICTED, Verdict.CONTRADICTED]),
        (1.01, None, "cuda", [Verdict.SUPPORTED, Verdict.UNDECIDED]),
        (1.01, 6.0, "cpu", [Verdict.NOT_TESTED, Verdict.NOT_TESTED]),
    ],
)
def test_the_verdicts_on_training_time(dct, svd, on, expected):
    about = dict.fromkeys(("model", "image_size", "batch_size", "precision", "device"), "any") | {"on": on}
    ratios = {"plain": 1.0, "dct-embedding": dct, "svd-embedding": svd}
    rows = [
        {
            "measure": "training step",
            "edit": edit,
            "each_round": " ".join(str(10 * ratio * wobble) for wobble in wobbles),
            "status": "ok",
            "about": about,
        }
        for (edit, ratio), wobbles in zip(
            ratios.items(), ((1.0, 1.0, 1.0), (1.001, 0.999, 1.0), (1.001, 1.002, 0.999)), strict=True
        )
        if ratio is not None
    ]
    assert verdicts(training_time.report(records({}, rows))) == expected


@pytest.mark.parametrize("name", names())
def test_without_records_nothing_is_decided(name):
    assert set(verdicts(get(name).report(records({})))) <= {Verdict.UNDECIDED, Verdict.NOT_TESTED}


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("name", names())
def test_the_recipes_of_a_study_are_recipes(name, scale):
    study = get(name)
    for data in ("digits", "cifar10:DIR"):
        variants = study.variants(scale, data)
        labels = [variant.label for variant in variants]
        assert len(set(labels)) == len(labels)
        for variant in variants:
            assert Recipe.from_mapping(variant.recipe.to_mapping()) == variant.recipe
            assert variant.start is None or variant.start in labels
