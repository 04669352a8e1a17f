"""Trials, runs that studies share, and records that spare runs."""

import dataclasses
import json
import re
import shutil
import time

import pytest

import study_runner
from study_runner import calls, runs_of
from wellposed.study import catalogue, ledger, measuring, running
from wellposed.study.files import read_summary
from wellposed.study.plan import Cell, StudyRecords, grid
from wellposed.study.pool import run_name
from wellposed.study.trained import both, context_broadcasting, skip_ablation
from wellposed.train.recipe import Recipe

WHOLE = dataclasses.replace(skip_ablation.STUDY, trial=None, chooses_once=False)
TRIED = dataclasses.replace(WHOLE, trial={"epochs": 5, "limit": 300})
PLAIN = context_broadcasting.STUDY


# Trials.


def test_a_trial_chooses_and_never_counts(tmp_path) -> None:
    outcome, _ = study_runner.run(TRIED, tmp_path)
    records = runs_of(outcome.folder)
    trials = [run for run in records if run.trial]
    # 12 short runs with the first seed, then 3 full ones with both.
    assert len(trials) == 12
    assert len(records) == 12 + 6
    assert all((run.recipe["epochs"], run.recipe["limit"], run.seed) == (5, 300, 0) for run in trials)
    assert not any(run.measured for run in trials)
    full = [run for run in records if not run.trial]
    assert {(run.label, run.seed) for run in full} == {
        (label, seed) for label in skip_ablation.VARIANTS for seed in (0, 1)
    }
    assert all(run.chosen == {"init": "xavier", "lr": 1e-3} and run.measured for run in full)
    assert outcome.report is not None
    table = outcome.report.tables["table"]
    # Short runs have 30 points less in this script.
    assert [(row["accuracy"], row["n"]) for row in table] == [(90.05, 2), (88.05, 2), (70.05, 2)]
    tried = [row for row in outcome.report.tables["grid"] if row["trial"]]
    assert len(tried) == 12
    assert sum(row["stands_for_variant"] for row in tried) == 3


def test_a_trial_may_hang_on_the_data_and_leaves_single_cells_alone(tmp_path) -> None:
    study = dataclasses.replace(
        PLAIN,
        cells=lambda scale: [Cell("one"), *grid([Cell("two", {"broadcast": "cb"})], lr=(1e-3, 3e-4))],
        report=lambda records: dataclasses.replace(both.report(records), draw=None),
        trial=lambda scale, data: {} if data == "digits" else {"epochs": 5},
    )
    outcome, _ = study_runner.run(study, tmp_path, data=["digits", "cifar10:DIR"], seeds=[3])
    tried = [(run.label, run.data) for run in runs_of(outcome.folder) if run.trial]
    assert tried == [("two", "cifar10")] * 2


def test_the_users_changes_are_over_the_trial(tmp_path) -> None:
    outcome, _ = study_runner.run(TRIED, tmp_path, seeds=[0], changes={"epochs": 7})
    assert {run.recipe["epochs"] for run in runs_of(outcome.folder)} == {7}


def test_further_seeds_keep_the_choice(tmp_path) -> None:
    for study in (TRIED, WHOLE):
        out = tmp_path / str(study.trial is None)
        study_runner.run(study, tmp_path, out=out, seeds=[0])
        before = calls(out / "runs")
        study_runner.run(study, tmp_path, out=out, seeds=[7])
        assert len(calls(out / "runs")) == len(before) + 3
        best = [run for run in runs_of(out) if run.best and not run.trial]
        assert sorted(run.seed for run in best) == [0, 0, 0, 7, 7, 7]


# One pool.


def test_studies_share_their_runs(tmp_path) -> None:
    outcomes, text = study_runner.run_all([both.STUDY, PLAIN], tmp_path, seeds=[0], draw=True)
    first, second = (runs_of(outcome.folder) for outcome in outcomes)
    assert [outcome.folder.name for outcome in outcomes] == ["both-small", "context-broadcasting-small"]
    shared = {run.run for run in first} & {run.run for run in second}
    # None and CB are the same in both.
    assert len(shared) == 2
    pool = tmp_path / "out" / "runs"
    assert len(calls(pool)) == len(first) + len(second) - 2 == 7
    assert set(calls(pool).values()) == {1}
    assert text.count(" at a time, in ") == 1
    assert all((outcome.folder / "figure.png").exists() for outcome in outcomes)
    assert len(list(pool.glob("*/measured-*.jsonl"))) == 7


def test_a_run_starts_as_soon_as_nothing_stands_before_it(tmp_path) -> None:
    _, text = study_runner.run_all([TRIED, catalogue.get("mae"), PLAIN], tmp_path, seeds=[0], jobs=1)
    assert text.count(" at a time, in ") == 1
    lines = text.splitlines()
    tuned = lines.index("digits-mae-fine-tuned-seed0: running")
    assert lines.index("digits-mae-seed0: finished") < tuned
    # It is longer than the trials, and goes before those that wait.
    assert tuned < max(index for index, line in enumerate(lines) if "-trial: running" in line)


def test_a_run_of_another_study_is_taken_over_when_it_has_ended(tmp_path) -> None:
    """The best of the trials of the second is a run of the first, which ends long before."""
    first = dataclasses.replace(
        WHOLE,
        name="first",
        cells=lambda scale: [Cell("best", {"lr": 1e-3})],
        report=lambda records: dataclasses.replace(both.report(records), draw=None),
    )
    outcomes, _ = study_runner.run_all(
        [first, TRIED], tmp_path, seeds=[0], changes={"init": "xavier"}, jobs=1
    )
    ran = calls(tmp_path / "out" / "runs")
    assert set(ran.values()) == {1}
    records = [runs_of(outcome.folder) for outcome in outcomes]
    full = [run for run in records[1] if not run.trial]
    assert records[0][0].run in {run.run for run in full}
    assert len(ran) == len(records[0]) + len(records[1]) - 1


def test_runs_may_stand_elsewhere(tmp_path) -> None:
    study_runner.run(PLAIN, tmp_path, runs=tmp_path / "pool")
    assert len(calls(tmp_path / "pool")) == 6
    assert not (tmp_path / "out" / "runs").exists()


def test_names_of_runs_stay_what_they_are() -> None:
    """Another name would drop the records that people have kept.

    A new field of the recipe belongs into ``pool.LATER``. A new default changes results, and so the names.
    """
    assert run_name(Recipe()) == "digits-test_vit-78eb3ba9"


def test_checkpoints_that_are_measured_make_another_run() -> None:
    names = {run_name(catalogue.get(name).base("small", "digits")) for name in ("bounds", "density")}
    assert len(names) == 2


# Records as a cache.


def test_a_run_whose_record_stands_is_not_trained_again(tmp_path) -> None:
    out = tmp_path / "out"
    study_runner.run(TRIED, tmp_path, seeds=[0])
    before = (out / "records.jsonl").read_text()
    shutil.rmtree(out / "runs")
    study_runner.run(TRIED, tmp_path, seeds=[0])
    assert (out / "records.jsonl").read_text() == before
    assert not calls(out / "runs")
    study_runner.run(TRIED, tmp_path, seeds=[0, 1], data=["digits", "cifar10:DIR"])
    # The second seed of the first set, and all of the second set.
    assert len(calls(out / "runs")) == 3 + 18
    assert {run.data for run in runs_of(out)} == {"digits", "cifar10"}


def test_the_command_tells_the_seeds_of_each_set(tmp_path) -> None:
    study_runner.run(PLAIN, tmp_path, seeds=[0, 1])
    outcome, _ = study_runner.run(PLAIN, tmp_path, seeds=[0], data=["cifar10:DIR", "cifar100:DIR"])
    name = PLAIN.name
    assert read_summary(outcome.folder)["command"] == (
        f"wellposed study {name} --data digits --scale small --seeds 0,1 && "
        f"wellposed study {name} --data cifar10:DIR --data cifar100:DIR --scale small --seeds 0"
    )


def test_the_first_set_chooses_for_all(tmp_path) -> None:
    once = dataclasses.replace(TRIED, chooses_once=True)
    outcome, _ = study_runner.run(once, tmp_path, seeds=[0], data=["cifar10:DIR", "cifar100:DIR"])
    records = runs_of(tmp_path / "out")
    assert {run.data for run in records if run.trial} == {"cifar10"}
    assert len(records) == 12 + 2 * 3
    assert outcome.report is not None
    assert [row["data"] for row in outcome.report.tables["table"]] == ["cifar10"] * 3 + ["cifar100"] * 3
    # The set that chose need not be at hand later.
    study_runner.run(once, tmp_path, seeds=[0], data=["packed:a/birds.npz"])
    assert len(runs_of(tmp_path / "out")) == 12 + 3 * 3


def test_a_set_with_another_model_does_not_choose(tmp_path) -> None:
    once = dataclasses.replace(TRIED, chooses_once=True)
    study_runner.run(once, tmp_path, seeds=[0], data=["digits", "cifar10:DIR", "cifar100:DIR"])
    tried = [run.data for run in runs_of(tmp_path / "out") if run.trial]
    assert tried == ["digits"] * 12 + ["cifar10"] * 12


def test_sets_one_call_at_a_time(tmp_path) -> None:
    study_runner.run(PLAIN, tmp_path, data=["packed:a/birds.npz"])
    outcome, _ = study_runner.run(PLAIN, tmp_path, data=["cifar10:DIR"], seeds=[2])
    assert outcome.report is not None
    assert [row["data"] for row in outcome.report.tables["table"]] == ["birds"] * 3 + ["cifar10"] * 3
    summary = json.loads((outcome.folder / "summary.json").read_text())
    assert summary["data"] == {"birds": "packed:birds.npz", "cifar10": "cifar10:DIR"}
    assert summary["seeds"] == [0, 1, 2]
    assert "--data packed:birds.npz --scale small --seeds 0,1 && " in summary["command"]
    assert summary["command"].endswith("--data cifar10:DIR --scale small --seeds 2")


def test_records_of_other_recipes_are_put_aside_and_told(tmp_path) -> None:
    out = tmp_path / "out"
    study_runner.run(PLAIN, tmp_path, data=["digits", "cifar10:DIR"])
    _, text = study_runner.run(PLAIN, tmp_path, data=["digits"], changes={"epochs": 8})
    assert "context-broadcasting: 12 records of another recipe (epochs) dropped." in text
    assert {(run.data, run.recipe["epochs"]) for run in runs_of(out)} == {("digits", 8)}
    assert len((out / ledger.DROPPED).read_text().splitlines()) == 12 + 1  # the base of their recipes
    fewer = dataclasses.replace(PLAIN, cells=lambda scale: [Cell("none"), Cell("CB", {"broadcast": "cb"})])
    _, text = study_runner.run(fewer, tmp_path, changes={"epochs": 8})
    assert "2 records of variants that the study does not have dropped." in text


def test_lines_of_another_version_are_put_aside(tmp_path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "records.jsonl").write_text('{"label": "none", "data": "digits", "seed": 0}\n')
    _, text = study_runner.run(PLAIN, tmp_path)
    assert "1 record of an older version" in text
    assert len(runs_of(out)) == 6


def test_a_call_that_only_reports_keeps_lines_of_another_version(tmp_path) -> None:
    study_runner.run(PLAIN, tmp_path)
    file = tmp_path / "out" / "records.jsonl"
    newer = json.loads(file.read_text().splitlines()[0]) | {"from_the_future": 1}
    file.write_text(file.read_text() + json.dumps(newer) + "\n")
    running.report_again([PLAIN], out=tmp_path / "out")
    assert json.loads(file.read_text().splitlines()[-1]) == newer


@pytest.mark.parametrize(("field", "value", "option"), [("seed", 7, "--seeds"), ("data", "DIR", "--data")])
def test_what_tells_runs_apart_is_no_change_of_all(field: str, value: object, option: str, tmp_path) -> None:
    with pytest.raises(ValueError, match=f"say {option}"):
        study_runner.run(PLAIN, tmp_path, changes={field: value})


def test_what_others_start_from_is_trained_again_where_it_is_needed(tmp_path) -> None:
    out, mae = tmp_path / "out", catalogue.get("mae")
    study_runner.run(mae, tmp_path, seeds=[0])
    shutil.rmtree(out / "runs")
    lines = (out / "records.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("label") != "MAE, fine-tuned"]
    (out / "records.jsonl").write_text("\n".join(kept) + "\n")
    outcome, _ = study_runner.run(mae, tmp_path, seeds=[0])
    assert outcome.exit_code == 0
    # The fine-tuning whose record is gone, and the pre-training that it starts from.
    assert len(calls(out / "runs")) == 2
    assert len(runs_of(out)) == 5


def test_a_report_from_records_alone(tmp_path) -> None:
    outcome, _ = study_runner.run(PLAIN, tmp_path, changes={"epochs": 9})
    out = outcome.folder
    kept = {name: (out / name).read_text() for name in ("records.jsonl", "table.csv", "summary.json")}
    shutil.rmtree(out / "runs")
    (out / "table.csv").unlink()
    (again,) = running.report_again([PLAIN], out=out)
    assert again.exit_code == 0
    assert {name: (out / name).read_text() for name in kept} == kept
    with pytest.raises(FileNotFoundError, match=r"expected records\.jsonl"):
        running.report_again([PLAIN], out=tmp_path / "nothing")


def test_a_failed_measurement_is_told_and_tried_again(tmp_path, monkeypatch) -> None:
    def broken(folder, study):
        raise ValueError("no images")

    monkeypatch.setattr(study_runner, "after", broken)
    outcome, text = study_runner.run(PLAIN, tmp_path, seeds=[0])
    assert outcome.exit_code == 1
    assert "measuring digits-cb-seed0 failed: ValueError: no images" in text
    monkeypatch.undo()
    outcome, _ = study_runner.run(PLAIN, tmp_path, seeds=[0])
    assert outcome.exit_code == 0
    assert set(calls(outcome.folder / "runs").values()) == {1}
    assert all(run.measured for run in runs_of(outcome.folder))


def test_a_long_measurement_says_that_it_goes_on(tmp_path, monkeypatch) -> None:
    after = study_runner.after

    def slow(folder, study):
        time.sleep(0.5)
        return after(folder, study)

    monkeypatch.setattr(study_runner, "after", slow)
    monkeypatch.setattr(measuring, "PATIENCE", 0.1)
    outcome, text = study_runner.run(PLAIN, tmp_path, seeds=[0])
    assert outcome.exit_code == 0
    assert re.search(r"measuring digits-\S+-seed0: 0 min so far\n", text)


def test_records_are_small_and_come_back(tmp_path) -> None:
    outcome, _ = study_runner.run(PLAIN, tmp_path, seeds=[0])
    run = runs_of(outcome.folder)[0]
    curve = [{"epoch": e, "loss": e / 7, "accuracy": e / 300, "train_loss": e / 3} for e in range(1, 201)]
    made = dataclasses.replace(run, curve=ledger.thinned(curve), measured=list(run.measured) * 6)
    ledger.write(tmp_path, [made], [])
    # 108 rows of 12 blocks, and 60 points.
    assert (tmp_path / "records.jsonl").stat().st_size < 6000
    (back,) = runs_of(tmp_path)
    assert len(back.curve) == 60
    assert back.curve[-1] == {"epoch": 200, "loss": 28.571, "accuracy": 0.66667, "train_loss": 66.667}
    kappas = [[row for row in each.measured if row["measure"] == "kappa"] for each in (back, made)]
    assert kappas[0] == kappas[1]
    assert len(back.measured) == len(made.measured)
    assert StudyRecords("x", "small", [back]).of("none")


def test_a_record_has_its_whole_recipe_whatever_the_defaults(tmp_path, monkeypatch) -> None:
    outcome, _ = study_runner.run(PLAIN, tmp_path, seeds=[0, 1])
    before = [run.recipe for run in runs_of(outcome.folder)]
    assert before[0]["smoothing"] == 0.1
    changed = dataclasses.replace(Recipe(), smoothing=0.9)
    monkeypatch.setattr(Recipe, "to_mapping", lambda self: {"smoothing": changed.smoothing})
    assert [run.recipe for run in runs_of(outcome.folder)] == before
