"""Runs, sweeps, studies and diagnoses become subjects; what is none of them is an error."""

import html
import json
import math
from pathlib import Path
from typing import Any

import pytest

import report_material as make
import short_runs
import study_runner
from studies.study import get
from wellposed import study_records
from wellposed.probes.diagnosis import Diagnosis
from wellposed.report import read_data, read_material, report_page
from wellposed.run_records import read_run
from wellposed.study_records import RunRecord


def test_a_real_run(tmp_path: Path) -> None:
    short_runs.run(tmp_path / "run", monitor_every=4, seed=3)
    material = read_material([tmp_path / "run"])
    (subject,) = material.subjects
    assert (subject.name, subject.kind, subject.seed) == ("run", "run", 3)
    assert subject.provenance["data"] == "digits"
    assert "torch" in subject.provenance["packages"]
    data = read_data(report_page(material))
    tests = [line["accuracy"] for line in read_run(tmp_path / "run") if line["event"] == "test"]
    assert [row["value"] for row in data["training"] if row["number"] == "test accuracy"] == tests
    last = next(line for line in reversed(read_run(tmp_path / "run")) if line["event"] == "monitor")
    for row in data["conditioning"]:
        assert row["kappa"] == last[f"kappa/{row['block']}/{row['position']}"]


def test_a_diagnosis_beside_a_run_is_its_own(tmp_path: Path) -> None:
    make.write_run(tmp_path / "run")
    Diagnosis(tuple(make.records()), {"model": "vit", "images": 4}).to_json(
        tmp_path / "run" / "diagnosis.json"
    )
    (subject,) = read_material([tmp_path / "run"]).subjects
    assert subject.kind == "run"
    assert len(subject.select("kappa")) == 2 * len(make.POSITIONS)


def test_runs_that_start_from_other_weights_are_no_seeds_of_one_variant(tmp_path: Path) -> None:
    for seed in (0, 1):
        make.write_run(tmp_path / f"plain-{seed}", seed=seed)
    for name in ("a", "b"):
        make.write_run(tmp_path / f"tuned-{name}", recipe=f'start_from = "{name}"\n')
    groups = read_material([tmp_path]).groups()
    assert sorted(len(of) for of in groups.values()) == [1, 1, 2]


def test_a_study(tmp_path: Path) -> None:
    study_runner.run(get("skip-ablation"), tmp_path, name="skip-ablation")
    material = read_material([tmp_path / "out"])
    assert {len(of) for of in material.groups().values()} == {2}
    data = read_data(report_page(material))
    assert [row["name"] for row in data["runs"]] == [
        f"skip-ablation: {label}" for label in ("all skips", "no FFN skip", "no attention skip")
    ]
    best = [run for run in study_runner.runs_of(tmp_path / "out") if run.label == "all skips"]
    mean = sum(run.accuracy or 0.0 for run in best) / len(best)
    assert data["runs"][0]["accuracy"] == pytest.approx(mean)
    assert {row["kappa"] for row in data["conditioning"]} == {20.0, 30.0, 40.0, 50.0, 400.0}
    (conclusion,) = material.conclusions
    assert "Study skip-ablation" in conclusion.sentence
    assert conclusion.sentence.endswith("4 claims: 4 undecided.")  # two seeds decide nothing
    assert any("(no FFN skip - all skips, digits" in claim for claim in conclusion.claims)
    assert f"<li>{html.escape(conclusion.claims[0])}</li>" in report_page(material)


def test_jacobian_rows_of_a_study(tmp_path: Path) -> None:
    relative = [1.0, 0.5, 0.25]
    row = {
        "measure": "jacobian spectrum",
        "method": "svd",
        "eps": 0.7,
        "where": "blocks",
        "image": 0,
        "block": 0,
    }
    row |= {"position": "attention", "points": 3, "relative": relative, "weights": "last"}
    told: dict[str, Any] = {"recipe": {}, "state": "finished", "result": {}}
    run = RunRecord(label="plain", data="digits", seed=0, **told, measured=[row], run="one")
    study_records.write(tmp_path, [run])
    (tmp_path / "summary.json").write_text(json.dumps({"study": "jacobian-spectrum", "claims": []}))
    rows = read_data(report_page(read_material([tmp_path])))["jacobian"]
    assert [(row["eps"], row["share"], row["value"]) for row in rows] == [
        (0.7, 0, 1.0),
        (0.7, 0.5, 0.5),
        (0.7, 1, 0.25),
    ]


def test_runs_of_a_study_say_how_they_ended(tmp_path: Path) -> None:
    told: dict[str, Any] = {"label": "plain", "data": "digits", "recipe": {}}
    ends = [
        ("finished", False, 0.9),
        ("finished", True, 0.1),
        ("nonfinite", False, 0.3),
        ("failed", False, 0.2),
    ]
    runs = [
        RunRecord(
            **told,
            seed=seed,
            state=state,
            result={"collapsed": collapsed, "test": {"accuracy": accuracy}},
            run=str(seed),
        )
        for seed, (state, collapsed, accuracy) in enumerate(ends)
    ]
    study_records.write(tmp_path, runs)
    (tmp_path / "summary.json").write_text(json.dumps({"study": "some"}))
    material = read_material([tmp_path])
    assert [(each.name, each.state) for each in material.subjects] == [
        ("some: plain, seed 0", "finished"),
        ("some: plain, seed 1 (collapsed)", "finished, collapsed"),
        ("some: plain, seed 2 (not finished)", "not finished: nonfinite"),
        ("some: plain, seed 3 (not finished)", "not finished: failed"),
    ]
    rows = read_data(report_page(material))["runs"]
    assert [(row["n"], row["accuracy"]) for row in rows] == [(2, 50.0), (0, 30.0), (0, 20.0)]


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    make.write_run(tmp_path / "run")
    with (tmp_path / "run" / "run.jsonl").open("a") as file:
        file.write('{"event": "train", "update": 31, "loss": "nan"}\n')
        file.write('{"event": "monitor", "update": 31, "kappa/0/input": "inf", "kappa/1/input": 5.0}\n')
    data = read_data(report_page(read_material([tmp_path / "run"])))
    assert [row["kappa"] for row in data["conditioning"]] == [5.0]
    assert all(math.isfinite(row["value"]) for row in data["training"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no"),
        ("nonsense", "expected a diagnosis as JSON"),
        ("[]", "expected a diagnosis with"),
        ('{"about": "a ViT", "records": []}', "expected a diagnosis with"),
        ('{"about": {}, "records": 3}', "expected a diagnosis with"),
    ],
)
def test_what_is_no_diagnosis(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "some.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_material([path])


@pytest.mark.parametrize(
    ("name", "content", "shown"),
    [
        ("result.json", '{"finished": tr', ["damaged", "whole"]),
        ("result.json", "[]", ["damaged", "whole"]),
        ("environment.json", "\0\0", ["damaged", "whole"]),
        ("diagnosis.json", "nonsense", ["damaged", "whole"]),
        ("recipe.toml", "epochs = ", ["whole"]),
        ("run.jsonl", '{"event": "train", "update": 1}\n{"event": "train", "update": "two"}\n', ["whole"]),
    ],
)
def test_a_damaged_file_is_named_and_hides_no_other_run(
    tmp_path: Path, name: str, content: str, shown: list[str]
) -> None:
    make.write_run(tmp_path / "runs" / "damaged", recipe='graying = "dct"\n')
    make.write_run(tmp_path / "runs" / "whole")
    (tmp_path / "runs" / "damaged" / name).write_text(content)
    material = read_material([tmp_path / "runs"])
    assert [each.name for each in material.subjects] == shown
    (damage,) = material.damage
    assert damage.path == str(tmp_path / "runs" / "damaged" / name)
    page = report_page(material)
    assert "What could not be read" in page
    assert str(tmp_path / "runs" / "damaged" / name) in page
    if shown == ["whole"]:
        with pytest.raises(ValueError, match=rf"damaged/{name}: expected"):
            read_material([tmp_path / "runs" / "damaged"])


def test_torn_lines_of_a_run_are_named(tmp_path: Path) -> None:
    lines = make.write_run(tmp_path / "torn")
    make.write_run(tmp_path / "whole", recipe='graying = "dct"\n')
    path = tmp_path / "torn" / "run.jsonl"
    written = path.read_text().splitlines()
    written[2], written[4] = written[2][:9], "\0"
    path.write_text("\n".join(written) + "\n")
    material = read_material([tmp_path])
    assert list(map(str, material.damage)) == [f"{path}: lines 3, 5 are torn and skipped."]
    assert str(path) in report_page(material)
    assert [each.name for each in material.subjects] == ["torn", "whole"]
    assert len(material.subjects[0].lines) == len(lines)  # two of them say that they are torn


def test_a_torn_record_of_a_study_hides_no_other(tmp_path: Path) -> None:
    told: dict[str, Any] = {"data": "digits", "recipe": {}, "result": {}}
    runs = [RunRecord(label="plain", seed=seed, state="finished", **told, run=str(seed)) for seed in (0, 1)]
    study_records.write(tmp_path, runs)
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"label": "pl')
    (tmp_path / "summary.json").write_text('{"study": ')
    material = read_material([tmp_path])
    assert len(material.subjects) == 2
    assert material.conclusions == ()
    assert [Path(each.path).name for each in material.damage] == ["summary.json", "records.jsonl"]
    assert material.damage[1].what == "line 4 is torn and skipped."
    with pytest.raises(ValueError, match=r"records\.jsonl, lines \[4\] are torn"):  # a study stops there
        study_runner.run(get("density"), tmp_path, out=tmp_path)


def test_an_empty_folder_and_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a run \(run.jsonl\)"):
        read_material([tmp_path])
    with pytest.raises(ValueError, match="got none"):
        read_material([])


def test_a_study_of_another_version(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text('{"label": "plain", "of another": "version"}\n')
    (tmp_path / "summary.json").write_text('{"study": "skip-ablation"}')
    with pytest.raises(ValueError, match=r"none that this version can read .*1 records of another version"):
        read_material([tmp_path])


def test_the_same_name_twice(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        make.write_run(tmp_path / parent / "run", recipe=f'init = "{parent}"\n')
    names = [each.name for each in read_material([tmp_path / "a", tmp_path / "b"]).subjects]
    assert names == ["run", "run (2)"]
