"""The command: files, tables, picture."""

import csv
import io
import json
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import graying as files
from benchmarks.__main__ import app_of
from benchmarks.graying import (
    growth_notes,
    growth_tables,
    run,
    show_saved,
    steps_table,
    usual_growth,
    usual_steps,
    wide,
)
from benchmarks.graying_growth import GrowthRow
from benchmarks.graying_steps import StepRow

TINY = ("--tokens", "4,8", "--channels", "8", "--batches", "1,2", "--methods", "spectral,dct,svd-gesvda")
STEPS = ("--model", "test_vit", "--image-size", "32", "--batch-size", "2", "--rounds", "2", "--updates", "1")


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.graying_growth._BUDGET", 0.005)
        yield


def invoke(*arguments: object):
    return CliRunner().invoke(app_of("graying"), ["--device", "cpu", *map(str, arguments)])


def table(path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def shown(*renderables: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    for each in renderables:
        console.print(each)
    return " ".join(console.file.getvalue().split())  # titles are folded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench")
    result = invoke(*TINY, *STEPS, "--edits", "cb", "--edits", "dct-pixels", "--out", path)
    assert result.exit_code == 0, result.output
    (path / "output.txt").write_text(result.output)
    return path


def test_growth_file(folder) -> None:
    rows = table(folder / "graying-growth.csv")
    assert len(rows) == 3 * 2 * (2 + 1 + 2)
    done = [row for row in rows if row["status"] == "ok"]
    assert {row["method"] for row in done} == {"spectral", "dct"}
    assert all(float(row["low"]) <= float(row["microseconds"]) <= float(row["high"]) for row in done)
    assert all(row["floor"] == row["peak_mib"] == "" for row in done)
    failed = [row for row in rows if row["method"] == "svd-gesvda"]
    assert {row["status"] for row in failed} == {"failed"}
    assert all("NVIDIA GPU" in row["note"] for row in failed)


def test_steps_file(folder) -> None:
    rows = table(folder / "graying-steps.csv")
    assert [row["edit"] for row in rows] == ["plain", "cb", "dct-pixels"]
    for row in rows:
        assert (row["status"], row["rounds"], len(row["each_round"].split())) == ("ok", "2", 2)
        assert float(row["ratio_low"]) <= float(row["ratio"]) <= float(row["ratio_high"])


def test_environment_beside_each_file(folder) -> None:
    for name, field in (("graying-steps", "edits"), ("graying-growth", "methods")):
        content = json.loads((folder / f"{name}.json").read_text())
        assert content["packages"]["torch"]
        assert content["about"]["device"] == "CPU"
        assert content["about"][field]
        assert content["about"]["spectral_is"]


def test_screen_has_tables_crossovers_and_reasons(folder) -> None:
    text = (folder / "output.txt").read_text()
    for part in ("Graying over tokens", "Graying over batch", "A training step of test_vit", "ratio"):
        assert part in text
    assert "tokens, forward: " in text
    assert "svd-gesvda: failed, ValueError" in text
    assert "spectral is " in text


def test_saved_results_come_back(folder) -> None:
    picture = folder / "graying-growth.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    result = invoke("--from", folder)
    assert result.exit_code == 0, result.output
    assert picture.is_file()
    assert "A training step of test_vit" in result.output


def test_without_matplotlib_the_tables_are_there(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke(*TINY, "--what", "growth", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "pip install 'wellposed[plot]'" in result.output
    assert not (tmp_path / "graying-growth.png").exists()
    result = invoke("--from", tmp_path)
    assert result.exit_code == 1
    assert "pip install 'wellposed[plot]'" in result.output


def test_rows_survive_the_file(tmp_path) -> None:
    growth = [
        GrowthRow(axis="batch", tokens=4, channels=8, batch=2, method="dct", passes="forward", floor=0.25),
        GrowthRow(
            axis="tokens",
            tokens=4,
            channels=8,
            batch=2,
            method="svd",
            passes="forward",
            status="skipped",
            note='too, "slow"',
        ),
    ]
    step = [StepRow(edit="plain", rounds=1, milliseconds=1.5, each_round="1.500")]
    files.write_rows(growth, tmp_path, files.GROWTH)
    files.write_rows(step, tmp_path, files.STEPS)
    assert files.read_growth(tmp_path) == growth
    assert files.read_steps(tmp_path) == step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graying-growth.csv", "graying-steps.csv"]


def test_tables_tell_floors_fewer_images_and_failures() -> None:
    where = {"axis": "tokens", "channels": 768, "passes": "forward", "tokens": 576}
    rows = [
        GrowthRow(method="spectral", batch=87, microseconds=50.0, floor=7.0, peak_mib=3.0, **where),
        GrowthRow(method="svd", batch=16, microseconds=9000.0, peak_mib=2.0, **where),
        GrowthRow(method="eigh", batch=87, status="failed", note="no room", **where),
    ]
    text = shown(*growth_tables(rows, {"device": "NVIDIA H200"}))
    for part in ("50 (7)", "9,000 x 16", "failed", "3.00", "peak memory", "NVIDIA H200"):
        assert part in text
    assert growth_notes(rows * 2) == ["eigh: failed, no room"]
    failed = StepRow(edit="cb", rounds=0, status="failed", note="no room")
    assert "failed: no room" in shown(steps_table([failed], {}))


def test_without_a_gpu_the_sizes_are_small_and_can_be_set() -> None:
    import torch

    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert usual_steps(cpu, {}).batch_size < usual_steps(gpu, {}).batch_size == 256
    assert max(usual_growth(cpu, {}).tokens) < max(usual_growth(gpu, {}).tokens) == 4096
    assert usual_steps(cpu, {"batch_size": 9, "model": None}).batch_size == 9
    assert "svd-gesvda" not in usual_growth(cpu, {}).methods


def test_mistakes_are_told(tmp_path) -> None:
    with pytest.raises(ValueError, match="what must be some of steps, growth, peers, got 'step'"):
        run(["step"])
    with pytest.raises(ValueError, match=r"expected graying-steps\.csv or graying-growth\.csv"):
        show_saved(tmp_path)
    assert "methods must be some of" in invoke("--what", "growth", "--methods", "lu").output
    assert "sizes must be positive" in invoke("--what", "growth", "--tokens", "0").output
    (tmp_path / "graying-steps.csv").write_text("edit,speed\nplain,3\n")
    with pytest.raises(ValueError, match="unknown columns speed"):
        show_saved(tmp_path)


def test_a_file_is_wide_enough() -> None:
    assert wide(Console(file=io.StringIO())).width == 150
