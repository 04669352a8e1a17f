"""From a grid to files, with a script in the place of training; one study is trained for real."""

import csv
import dataclasses
import json
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

import study_runner
from short_runs import TINY
from study_runner import calls, runs_of
from wellposed.cli import app
from wellposed.study import catalogue, running
from wellposed.study.plan import Cell, Study, StudyReport
from wellposed.study.trained import skip_ablation
from wellposed.train.recipe import Recipe


def test_a_whole_study(tmp_path) -> None:
    outcome, text = study_runner.run(skip_ablation.STUDY, tmp_path, draw=True)
    assert outcome.exit_code == 0
    assert outcome.report is not None
    assert outcome.report.verdict == "reproduced"
    out = tmp_path / "out"
    records = runs_of(out)
    # 12 cells are tried with the first seed, the best of each of the 3 variants trained with both.
    assert len(records) == 18
    assert len(list((out / "recipes").glob("*.toml"))) == 18
    best = [run for run in records if run.best and not run.trial]
    assert {run.label for run in best} == {"all skips", "no FFN skip", "no attention skip"}
    assert all(run.chosen == {"init": "xavier", "lr": 1e-3} for run in best)
    assert all(len(run.measured) == 18 for run in best)
    assert not any(run.measured for run in records if not run.best or run.trial)
    assert best[0].curve[-1] == {"epoch": 2, "loss": 0.5, "accuracy": 0.9, "train_loss": 0.5}
    with (out / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["accuracy"] for row in table] == ["90.05", "88.05", "70.05"]
    assert [row["difference"] for row in table] == ["", "-2.0", "-20.0"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["command"] == "wellposed study skip-ablation --data digits --scale small --seeds 0,1"
    assert summary["accuracy"][0] == {
        "data": "digits",
        "variant": "all skips",
        "mean": pytest.approx(90.05),
        "deviation": pytest.approx(0.0707, abs=1e-4),
        "n": 2,
    }
    (surroundings,) = summary["environments"]
    assert "torch" in surroundings["packages"]
    assert (out / "figure.png").stat().st_size > 10_000
    assert "verdict: reproduced (all 4 claims hold)\n- no FFN skip minus all skips: -2.00" in text


def test_where_all_settings_break_the_best_trial_stands(tmp_path) -> None:
    def base(scale, data) -> Recipe:
        # The script takes 30 points from runs of 5 epochs; the trials have 10.
        return dataclasses.replace(skip_ablation.base(scale, data), epochs=5)

    study = dataclasses.replace(skip_ablation.STUDY, base=base)
    outcome, text = study_runner.run(study, tmp_path, seeds=[0])
    assert outcome.exit_code == 0
    told = "all skips, digits, seed 0: broke with init=xavier, lr=0.001, 60.0 in the end and 90.0 in its"
    assert f"note: {told} short trial; so did all others, and the best trial's stands." in text
    records = runs_of(tmp_path / "out")
    assert len([run for run in records if not run.trial]) == 12
    best = [run for run in records if run.best and not run.trial]
    assert [run.chosen for run in best] == [{"init": "xavier", "lr": 1e-3}] * 3


def test_a_setting_that_breaks_in_the_long_run_gives_way_to_the_next(tmp_path) -> None:
    def cells(scale) -> list[Cell]:
        # The script takes 30 points from runs of 5 epochs: those of the better start, in full length.
        return [
            Cell("all skips", {"init": "xavier", "epochs": 5}, {"init": "xavier"}),
            Cell("all skips", {"init": "timm", "epochs": 30}, {"init": "timm"}),
        ]

    def table(records) -> StudyReport:
        rows = [{"accuracy": run.accuracy, "seed": run.seed} for run in records.of("all skips")]
        return StudyReport({"table": rows}, None, "reproduced", "")

    study = dataclasses.replace(skip_ablation.STUDY, cells=cells, report=table)
    outcome, text = study_runner.run(study, tmp_path, seeds=[0, 1])
    assert outcome.report is not None
    # Both seeds have the setting that carries them, and what broke stays in the records.
    assert outcome.report.tables["table"] == [{"accuracy": 85.0, "seed": 0}, {"accuracy": 85.1, "seed": 1}]
    assert "broke with init=xavier, 60.0 in the end and 90.0 in its short trial; another setting" in text
    before = runs_of(tmp_path / "out")
    assert sum(run.chosen == {"init": "xavier"} and not run.trial for run in before) >= 1
    # A second call has nothing to train.
    again, _ = study_runner.run(study, tmp_path, seeds=[0, 1])
    assert again.report is not None
    assert again.report.tables == outcome.report.tables
    assert len(runs_of(tmp_path / "out")) == len(before)


def test_a_call_that_only_reports_says_anew_which_setting_stands(tmp_path) -> None:
    study_runner.run(skip_ablation.STUDY, tmp_path, seeds=[0])
    file = tmp_path / "out" / "records.jsonl"
    text = file.read_text()
    # As if another version had chosen otherwise.
    file.write_text(text.replace('"best":true', '"best":false'))
    assert not any(run.best for run in runs_of(tmp_path / "out"))
    running.report_again([skip_ablation.STUDY], out=tmp_path / "out", console=Console(quiet=True))
    assert file.read_text() == text


def test_a_call_that_only_reports_leaves_what_stood_in_a_grid_that_is_not_whole(tmp_path) -> None:
    study_runner.run(skip_ablation.STUDY, tmp_path, seeds=[0])
    file = tmp_path / "out" / "records.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    # One of the grid of "all skips" is lost, so nobody can tell any more which of it is the best.
    lost = next(line for line in lines if '"label":"all skips"' in line and '"best":false' in line)
    lines.remove(lost)
    file.write_text("".join(lines))
    running.report_again([skip_ablation.STUDY], out=tmp_path / "out", console=Console(quiet=True))
    assert file.read_text() == "".join(lines)


def test_again_it_trains_and_measures_nothing(tmp_path) -> None:
    study_runner.run(skip_ablation.STUDY, tmp_path, seeds=[0])
    out = tmp_path / "out"
    assert set(calls(out / "runs").values()) == {1}
    before = (out / "records.jsonl").read_text()
    for measured in (out / "runs").glob("*/measured-*.jsonl"):
        measured.write_text("")
    study_runner.run(skip_ablation.STUDY, tmp_path, seeds=[0])
    assert set(calls(out / "runs").values()) == {1}
    assert (out / "records.jsonl").read_text() == before
    # Another seed adds to it.
    study_runner.run(skip_ablation.STUDY, tmp_path, seeds=[0, 5])
    assert len(calls(out / "runs")) == 18
    assert set(calls(out / "runs").values()) == {1}


def test_no_folder_of_the_machine_is_in_the_files(tmp_path) -> None:
    study_runner.run(catalogue.get("mae"), tmp_path, data=[f"packed:{tmp_path}/birds.npz"], seeds=[0])
    out = tmp_path / "out"
    for name in ("records.jsonl", "table.csv", "summary.json"):
        assert str(tmp_path) not in (out / name).read_text()
    assert "--data packed:birds.npz" in (out / "summary.json").read_text()


def test_a_run_starts_from_that_of_its_seed(tmp_path) -> None:
    outcome, _ = study_runner.run(catalogue.get("mae"), tmp_path)
    assert outcome.exit_code == 0
    out = tmp_path / "out"
    records = runs_of(out)
    assert records[0].label == "MAE"
    source = next(run for run in records if (run.label, run.seed) == ("MAE + DCT", 1))
    text = (out / "recipes" / "digits-mae-dct-fine-tuned-seed1.toml").read_text()
    assert f'start_from = "{out / "runs" / source.run}"' in text
    assert outcome.report is not None
    table = outcome.report.tables["table"]
    assert [row["variant"] for row in table] == ["from scratch", "MAE, fine-tuned", "MAE + DCT, fine-tuned"]


def test_several_sets_and_changes(tmp_path) -> None:
    outcome, _ = study_runner.run(
        skip_ablation.STUDY,
        tmp_path,
        data=["digits", "cifar10:DIR"],
        seeds=[0],
        changes={"lr": 0.5, "model_options": {"depth": 2}},
    )
    records = runs_of(outcome.folder)
    # The rate is no longer chosen, so half of the grid is left; the digits have a model of their own.
    assert len(records) == 2 * (3 * 2 + 3)
    assert {run.data for run in records} == {"digits", "cifar10"}
    assert {run.recipe["lr"] for run in records} == {0.5}
    assert {run.recipe["model_options"]["depth"] for run in records} == {2}
    assert records[0].recipe["model_options"]["embed_dim"] == 48
    assert records[0].chosen == {"init": "timm"}


def test_a_failed_run_leaves_the_others_and_no_verdict(tmp_path) -> None:
    outcome, text = study_runner.run(skip_ablation.STUDY, tmp_path, seeds=[0], changes={"epochs": 13})
    assert outcome.exit_code == 1
    assert outcome.report is not None
    assert outcome.report.verdict == "incomplete"
    assert "no FFN skip minus all skips: not measured" in text


def test_a_run_that_is_not_finite_counts(tmp_path) -> None:
    outcome, _ = study_runner.run(skip_ablation.STUDY, tmp_path, seeds=[0], changes={"epochs": 14})
    assert outcome.exit_code == 0
    assert {run.state for run in runs_of(outcome.folder)} == {"nonfinite"}


def test_what_is_refused(tmp_path) -> None:
    study = skip_ablation.STUDY
    with pytest.raises(ValueError, match="would be the same run"):
        study_runner.run(study, tmp_path, changes={"remove_skips": "ffn"})
    with pytest.raises(ValueError, match="different sets"):
        study_runner.run(study, tmp_path, data=["cifar10:A", "cifar10:B"])
    with pytest.raises(ValueError, match="different numbers"):
        study_runner.run(study, tmp_path, seeds=[1, 1])
    assert not (tmp_path / "out" / "runs").exists()


def test_without_matplotlib_the_tables_are_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    outcome, text = study_runner.run(catalogue.get("cb-position"), tmp_path, seeds=[0], draw=True)
    assert outcome.exit_code == 0
    assert not (outcome.folder / "figure.png").exists()
    assert (outcome.folder / "table.csv").exists()
    assert "pip install 'wellposed[plot]'" in text


def test_a_study_without_runs_measures_once(tmp_path) -> None:
    asked = []

    def once(scale, folder):
        asked.append(scale)
        return [{"value": 3.0}]

    def report(records) -> StudyReport:
        return StudyReport({"table": list(records.measured)}, None, "reproduced", "as it was said")

    study = Study(
        name="no-runs",
        title="t",
        paper="beyond",
        claim="c",
        cells=lambda scale: [],
        base=lambda scale, data: Recipe(data=data),
        report=report,
        once=once,
    )
    for _ in range(2):
        outcome, _ = study_runner.run(study, tmp_path, data=["digits", "cifar10:DIR"])
    assert asked == ["small"]
    assert outcome.report is not None
    assert outcome.report.tables["table"] == [{"value": 3.0}]


def test_a_stopped_study_says_where_it_ran(tmp_path, monkeypatch) -> None:
    train_runs = running.train_runs
    monkeypatch.setattr(running, "train_runs", lambda *args, **more: (train_runs(*args, **more)[0], 143))
    study = catalogue.get("cb-position")
    outcome, text = study_runner.run(study, tmp_path, seeds=[0], data=["packed:a/birds.npz"])
    assert outcome.exit_code == 143
    assert outcome.report is None
    assert "verdict" not in text
    running.report_again([study], out=outcome.folder, console=Console(quiet=True))
    summary = json.loads((outcome.folder / "summary.json").read_text())
    assert summary["command"].startswith("wellposed study cb-position --data packed:birds.npz")
    (surroundings,) = summary["environments"]
    assert "torch" in surroundings["packages"]


def test_a_cell_that_starts_from_nothing(tmp_path) -> None:
    study = Study(
        name="lost",
        title="t",
        paper="beyond",
        claim="c",
        cells=lambda scale: [Cell("a", starts_from="b")],
        base=lambda scale, data: Recipe(data=data),
        report=lambda records: StudyReport({}, None, "incomplete", ""),
    )
    with pytest.raises(ValueError, match="starts from 'b', which is no cell"):
        study_runner.run(study, tmp_path)


def test_the_command_trains(tmp_path) -> None:
    """The whole way once: real runs, measured on their weights."""
    options = [f"--set=model_options.{name}={value}" for name, value in TINY.items()]
    options += ["--set=limit=64", "--set=epochs=1", "--set=batch_size=32", "--set=device=cpu"]
    arguments = [
        "study",
        "context-broadcasting",
        "--out",
        str(tmp_path / "out"),
        "--seeds",
        "0",
        "--jobs",
        "3",
        *options,
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    records = runs_of(tmp_path / "out")
    assert len(records) == 3
    for run in records:
        assert {each["measure"] for each in run.measured} == {"kappa", "entropy"}
        assert run.result["test"]["accuracy"] > 0
    listed = CliRunner().invoke(app, ["study"])
    assert "skip-ablation" in listed.output
    wrong = CliRunner().invoke(app, ["study", "bot"])
    assert wrong.exit_code == 1
    assert "did you mean 'both'" in wrong.output
