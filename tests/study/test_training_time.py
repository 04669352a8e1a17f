"""What a method adds to a training step; and what all measured studies have."""

from typing import Any

import pytest
import torch
from rich.console import Console

import short_runs
from benchmarks.graying import StepsPlan
from study_records import draws, records
from wellposed.study import ledger
from wellposed.study.files import read_summary
from wellposed.study.measured import bounds, density, jacobian_spectrum, training_time
from wellposed.study.running import run


def test_training_steps_are_timed_once(monkeypatch, tmp_path):
    def tiny(device: torch.device, given: dict[str, Any]) -> StepsPlan:
        sizes = {"model": "test_vit", "image_size": 32, "batch_size": 2, "precision": "fp32"}
        return StepsPlan(
            **sizes, compile=False, updates=1, edits=("svd-embedding", "dct-embedding"), rounds=1
        )

    monkeypatch.setattr(training_time, "usual_steps", tiny)
    run(training_time.STUDY, out=tmp_path, console=Console(quiet=True))
    _, rows, _ = ledger.read(tmp_path)
    assert [row["edit"] for row in rows] == ["plain", "svd-embedding", "dct-embedding"]
    report = training_time.report(records({}, rows))
    assert [row["edit"] for row in report.tables["table"]] == [row["edit"] for row in rows]
    draws(report, tmp_path)
    summary = read_summary(tmp_path)
    assert (summary["data"], summary["seeds"]) == ({}, [])
    assert summary["command"] == "wellposed study training-time --scale small"


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
