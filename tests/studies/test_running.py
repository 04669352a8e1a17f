"""From variants to files, with a script in the place of training; one study is trained for real."""

import csv
import dataclasses
import json
import shutil
import sys

import pytest
from typer.testing import CliRunner

import study_runner
from short_runs import TINY
from studies import report as reporting
from studies import runner
from studies.__main__ import app, kept
from studies.both.study import STUDY as BOTH
from studies.context_broadcasting.study import STUDY as PLAIN
from studies.mae.study import STUDY as MAE
from studies.skip_ablation.study import STUDY as SKIPS
from studies.study import Records, Report, Study, Variant, get
from study_runner import calls, runs_of
from wellposed import study_records
from wellposed.train import Recipe, sweep


def test_a_whole_study(tmp_path) -> None:
    done = study_runner.run(SKIPS, tmp_path, name="skip-ablation", draw=True)
    assert done.outcome.exit_code == 0
    runs = runs_of(done.folder)
    assert [(run.label, run.seed) for run in runs] == [
        (label, seed) for label in ("all skips", "no FFN skip", "no attention skip") for seed in (0, 1)
    ]
    assert all(run.chosen == {"init": "xavier", "lr": 1e-3} for run in runs)
    assert all(len(run.measured) == 18 for run in runs)
    assert runs[0].curve[-1] == {"epoch": 2, "loss": 0.5, "accuracy": 0.9, "train_loss": 0.5}
    with (done.folder / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["accuracy"] for row in table] == ["90.05", "88.05", "70.05"]
    assert [row["difference"] for row in table] == ["", "-2.0", "-20.0"]
    summary = json.loads((done.folder / "summary.json").read_text())
    assert summary["command"] == "python -m studies skip-ablation --scale small --data digits --seeds 0-1"
    assert summary["accuracy"][0] == {
        "data": "digits",
        "variant": "all skips",
        "mean": pytest.approx(90.05),
        "deviation": pytest.approx(0.0707, abs=1e-4),
        "n": 2,
    }
    (surroundings,) = summary["environments"]
    assert "torch" in surroundings["packages"]
    assert (done.folder / "figure.png").stat().st_size > 10_000
    assert "no FFN skip - all skips, digits, points of accuracy): -2.00" in done.text


def test_again_it_trains_and_measures_nothing(tmp_path, monkeypatch) -> None:
    done = study_runner.run(SKIPS, tmp_path, seeds=[0])
    pool = tmp_path / "pool"
    assert set(calls(pool).values()) == {1}
    before = (done.folder / "records.jsonl").read_text()
    monkeypatch.setattr(study_runner, "after", lambda folder: pytest.fail("it is measured"))
    again = study_runner.run(SKIPS, tmp_path, seeds=[0])
    assert not again.outcome.has_worked
    assert set(calls(pool).values()) == {1}
    assert (done.folder / "records.jsonl").read_text() == before
    monkeypatch.undo()
    # Another seed adds to it.
    study_runner.run(SKIPS, tmp_path, seeds=[0, 5])
    assert len(calls(pool)) == 6
    assert set(calls(pool).values()) == {1}


def test_a_run_whose_record_is_there_is_not_trained_again(tmp_path) -> None:
    done = study_runner.run(SKIPS, tmp_path, seeds=[0])
    before = (done.folder / "records.jsonl").read_text()
    shutil.rmtree(tmp_path / "pool")
    study_runner.run(SKIPS, tmp_path, seeds=[0])
    assert (done.folder / "records.jsonl").read_text() == before
    assert not calls(tmp_path / "pool")
    study_runner.run(SKIPS, tmp_path, seeds=[0, 1], data=["digits", "cifar10:DIR"])
    # The second seed of the first set, and all of the second set.
    assert len(calls(tmp_path / "pool")) == 3 + 6
    assert {run.data for run in runs_of(done.folder)} == {"digits", "cifar10"}


def test_studies_share_their_runs(tmp_path) -> None:
    first = study_runner.run(BOTH, tmp_path, seeds=[0], out=tmp_path / "both")
    second = study_runner.run(PLAIN, tmp_path, seeds=[0], out=tmp_path / "cb")
    shared = {run.run for run in runs_of(first.folder)} & {run.run for run in runs_of(second.folder)}
    # None and CB are the same in both.
    assert len(shared) == 2
    assert len(calls(tmp_path / "pool")) == 6 + 3 - 2
    assert set(calls(tmp_path / "pool").values()) == {1}


def test_checkpoints_that_are_measured_make_another_run() -> None:
    plain = [get(name).variants("small", "digits")[0].recipe for name in ("bounds", "density")]
    assert len(set(map(runner.run_name, plain))) == 2


def test_no_folder_of_the_machine_is_in_the_files(tmp_path) -> None:
    done = study_runner.run(MAE, tmp_path, data=[f"packed:{tmp_path}/birds.npz"], seeds=[0])
    for name in ("records.jsonl", "table.csv", "summary.json"):
        assert str(tmp_path) not in (done.folder / name).read_text()
    assert "--data packed:birds.npz" in (done.folder / "summary.json").read_text()


def test_a_run_starts_from_that_of_its_seed(tmp_path) -> None:
    done = study_runner.run(MAE, tmp_path)
    assert done.outcome.exit_code == 0
    runs = {(run.label, run.seed): run for run in runs_of(done.folder)}
    assert runs["MAE", 0].role == "start"
    for seed in (0, 1):
        tuned = runs["MAE + DCT, fine-tuned", seed]
        assert tuned.recipe["start_from"] == runs["MAE + DCT", seed].run
    table = done.report.tables["table"]
    assert [row["variant"] for row in table] == ["from scratch", "MAE, fine-tuned", "MAE + DCT, fine-tuned"]


def test_what_others_start_from_is_trained_again_where_it_is_needed(tmp_path) -> None:
    done = study_runner.run(MAE, tmp_path, seeds=[0])
    shutil.rmtree(tmp_path / "pool")
    lines = (done.folder / "records.jsonl").read_text().splitlines()
    rest = [line for line in lines if json.loads(line).get("label") != "MAE, fine-tuned"]
    (done.folder / "records.jsonl").write_text("\n".join(rest) + "\n")
    again = study_runner.run(MAE, tmp_path, seeds=[0])
    assert again.outcome.exit_code == 0
    # The fine-tuning whose record is gone, and the pre-training that it starts from.
    assert len(calls(tmp_path / "pool")) == 2
    assert len(runs_of(done.folder)) == 5


def test_several_sets_and_changes(tmp_path) -> None:
    changes = {"lr": 0.5, "model_options": {"depth": 2}}
    done = study_runner.run(SKIPS, tmp_path, data=["digits", "cifar10:DIR"], seeds=[0], changes=changes)
    runs = runs_of(done.folder)
    assert len(runs) == 2 * 3
    assert {run.data for run in runs} == {"digits", "cifar10"}
    assert {run.recipe["lr"] for run in runs} == {0.5}
    assert {run.recipe["model_options"]["depth"] for run in runs} == {2}
    # The digits have a model of their own.
    assert runs[0].recipe["model_options"]["embed_dim"] == 48


def test_the_command_has_the_seeds_of_each_set(tmp_path) -> None:
    study_runner.run(PLAIN, tmp_path, seeds=[0, 1])
    done = study_runner.run(PLAIN, tmp_path, seeds=[0], data=["cifar10:DIR", "cifar100:DIR"])
    assert reporting.read_summary(done.folder)["command"] == (
        "python -m studies any --scale small --data digits --seeds 0-1 && "
        "python -m studies any --scale small --data cifar10:DIR --data cifar100:DIR --seeds 0"
    )


def test_sets_one_call_at_a_time(tmp_path) -> None:
    study_runner.run(PLAIN, tmp_path, data=["packed:a/birds.npz"])
    done = study_runner.run(PLAIN, tmp_path, data=["cifar10:DIR"], seeds=[2])
    assert [row["data"] for row in done.report.tables["table"]] == ["birds"] * 3 + ["cifar10"] * 3
    summary = json.loads((done.folder / "summary.json").read_text())
    assert summary["data"] == {"birds": "packed:birds.npz", "cifar10": "cifar10:DIR"}
    assert summary["seeds"] == [0, 1, 2]
    assert "--data packed:birds.npz --seeds 0-1 && " in summary["command"]
    assert summary["command"].endswith("--data cifar10:DIR --seeds 2")


def test_a_failed_run_leaves_the_others_and_no_verdict(tmp_path) -> None:
    done = study_runner.run(SKIPS, tmp_path, seeds=[0], changes={"epochs": 13})
    assert done.outcome.exit_code == 1
    assert {run.label for run in runs_of(done.folder)} == {"all skips", "no attention skip"}
    assert "no FFN skip - all skips, digits, points of accuracy): not measured" in done.text


def test_a_run_that_is_not_finite_counts(tmp_path) -> None:
    done = study_runner.run(SKIPS, tmp_path, seeds=[0], changes={"epochs": 14})
    assert done.outcome.exit_code == 0
    assert {run.state for run in runs_of(done.folder)} == {"nonfinite"}


def test_a_failed_measurement_is_reported_and_tried_again(tmp_path, monkeypatch) -> None:
    def broken(folder):
        raise ValueError("no images")

    monkeypatch.setattr(study_runner, "after", broken)
    done = study_runner.run(PLAIN, tmp_path, seeds=[0])
    assert done.outcome.exit_code == 1
    assert "measuring CB, digits, seed 0 failed: ValueError: no images" in done.text
    monkeypatch.undo()
    again = study_runner.run(PLAIN, tmp_path, seeds=[0])
    assert again.outcome.exit_code == 0
    assert set(calls(tmp_path / "pool").values()) == {1}
    assert all(run.measured for run in runs_of(again.folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"changes": {"edits": ["remove_skips which=ffn"]}}, "would be the same run"),
        ({"data": ["cifar10:A", "cifar10:B"]}, "different sets"),
        ({"seeds": [1, 1]}, "different numbers"),
        ({"changes": {"seed": 7}}, "say --seeds"),
        ({"changes": {"data": "DIR"}}, "say --data"),
    ],
)
def test_what_is_refused(tmp_path, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study_runner.run(SKIPS, tmp_path, **options)
    assert not (tmp_path / "pool").exists()


def test_records_of_other_recipes_are_not_mixed_with_new_ones(tmp_path) -> None:
    done = study_runner.run(PLAIN, tmp_path, seeds=[0])
    before = (done.folder / "records.jsonl").read_text()
    with pytest.raises(ValueError, match=r"has another \(epochs\); give another folder as --out"):
        study_runner.run(PLAIN, tmp_path, seeds=[0, 1], changes={"epochs": 8})
    assert (done.folder / "records.jsonl").read_text() == before


def test_lines_of_another_version_are_neither_read_nor_lost(tmp_path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "records.jsonl").write_text('{"label": "none", "data": "digits", "seed": 0}\n')
    before = (out / "records.jsonl").read_text()
    with pytest.raises(ValueError, match="1 are of another; give another folder"):
        study_runner.run(PLAIN, tmp_path)
    with pytest.raises(ValueError, match="1 are of another"):
        kept(out, "small")
    assert (out / "records.jsonl").read_text() == before


def test_without_matplotlib_the_tables_are_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = study_runner.run(get("cb-position"), tmp_path, seeds=[0], draw=True)
    assert done.outcome.exit_code == 0
    assert not (done.folder / "figure.png").exists()
    assert (done.folder / "table.csv").exists()
    assert any(
        "pip install 'wellposed[plot]'" in note for note in reporting.read_summary(done.folder)["notes"]
    )


def made(**fields) -> Study:
    """A study that reports what it measured without a run."""
    usual = {
        "title": "t",
        "paper": "beyond",
        "claim": "c",
        "variants": lambda scale, data: [],
        "report": lambda records: Report({"table": list(records.measured)}, []),
    }
    return Study(**usual | fields)


def test_a_study_without_runs_measures_once(tmp_path) -> None:
    asked = []

    def once(scale, folder, data, changes):
        asked.append(scale)
        return [{"value": 3.0}]

    for _ in range(2):
        done = study_runner.run(made(once=once), tmp_path, data=["digits", "cifar10:DIR"])
    assert asked == ["small"]
    assert done.report.tables["table"] == [{"value": 3.0}]


def test_a_variant_that_starts_from_nothing(tmp_path) -> None:
    lost = made(variants=lambda scale, data: [Variant("a", Recipe(data=data), start="b")])
    with pytest.raises(ValueError, match="starts from 'b', which is no variant"):
        study_runner.run(lost, tmp_path)


def test_a_stopped_study_resumes(tmp_path, monkeypatch) -> None:
    run_sweep = sweep.run

    def stopped(*args, **more):
        return dataclasses.replace(run_sweep(*args, **more), exit_code=143)

    monkeypatch.setattr(sweep, "run", stopped)
    done = study_runner.run(get("cb-position"), tmp_path, seeds=[0], data=["packed:a/birds.npz"])
    assert done.outcome.exit_code == 143
    assert "the same command resumes it" in done.text
    assert len(runs_of(done.folder)) == 6
    monkeypatch.undo()
    again = study_runner.run(get("cb-position"), tmp_path, seeds=[0], data=["packed:a/birds.npz"])
    assert again.outcome.exit_code == 0
    assert set(calls(tmp_path / "pool").values()) == {1}


def test_records_are_small_and_come_back(tmp_path) -> None:
    done = study_runner.run(PLAIN, tmp_path, seeds=[0])
    run = runs_of(done.folder)[0]
    curve = [{"epoch": e, "loss": e / 7, "accuracy": e / 300, "train_loss": e / 3} for e in range(1, 201)]
    long = dataclasses.replace(run, curve=study_records.thinned(curve), measured=list(run.measured) * 6)
    study_records.write(tmp_path, [long])
    # 108 rows of 12 blocks, and 60 points.
    assert (tmp_path / "records.jsonl").stat().st_size < 6000
    (back,) = runs_of(tmp_path)
    assert len(back.curve) == 60
    assert back.curve[-1] == {"epoch": 200, "loss": 28.571, "accuracy": 0.66667, "train_loss": 66.667}
    kappas = [[row for row in each.measured if row["measure"] == "kappa"] for each in (back, long)]
    assert kappas[0] == kappas[1]
    assert len(back.measured) == len(long.measured)
    assert Records("small", [back]).of("none")


def test_a_record_has_its_whole_recipe_whatever_the_defaults(tmp_path, monkeypatch) -> None:
    done = study_runner.run(PLAIN, tmp_path)
    before = [run.recipe for run in runs_of(done.folder)]
    assert before[0]["smoothing"] == 0.1
    changed = dataclasses.replace(Recipe(), smoothing=0.9)
    monkeypatch.setattr(Recipe, "to_mapping", lambda self: {"smoothing": changed.smoothing})
    assert [run.recipe for run in runs_of(done.folder)] == before


def test_the_command_trains(tmp_path) -> None:
    """The whole way once: real runs, measured on their weights; then a report from the records alone."""
    options = [f"--set=model_options.{name}={value}" for name, value in TINY.items()]
    options += ["--set=limit=64", "--set=epochs=1", "--set=batch_size=32", "--set=device=cpu"]
    where = ["--out", str(tmp_path / "out"), "--no-draw"]
    arguments = [
        "context-broadcasting",
        *where,
        "--runs",
        str(tmp_path / "runs"),
        "--seeds",
        "0",
        "--jobs",
        "3",
    ]
    done = CliRunner().invoke(app, [*arguments, *options])
    assert done.exit_code == 0, done.output
    runs = runs_of(tmp_path / "out")
    assert len(runs) == 3
    for run in runs:
        assert {each["measure"] for each in run.measured} == {"kappa", "entropy"}
        assert run.result["test"]["accuracy"] > 0
    files = {
        name: (tmp_path / "out" / name).read_text() for name in ("records.jsonl", "table.csv", "summary.json")
    }
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "out" / "table.csv").unlink()
    again = CliRunner().invoke(app, ["context-broadcasting", *where, "--report-only"])
    assert again.exit_code == 0, again.output
    assert {name: (tmp_path / "out" / name).read_text() for name in files} == files


def test_the_command_lists_the_studies_and_names_what_is_wrong(tmp_path) -> None:
    listed = CliRunner().invoke(app, [])
    assert "skip-ablation" in listed.output
    for arguments, said in (
        (["bot"], "there is no study 'bot'"),
        (["both", "mae", "--out", str(tmp_path)], "expected one study with --out"),
        (["both", "--scale", "large"], "scale must be small or paper"),
        (["both", "--report-only", "--out", str(tmp_path)], "expected records.jsonl in"),
    ):
        wrong = CliRunner().invoke(app, arguments)
        assert wrong.exit_code == 1
        assert said in " ".join(wrong.output.split())
