"""The floor of spectral graying: that of the device a run starts on, kept wherever it goes."""

import importlib
import signal
import tomllib
from collections.abc import Iterator

import pytest
import torch

from short_runs import assert_bitwise, recipe, run, signal_at, weights
from wellposed.run_records import read_run
from wellposed.train import fit
from wellposed.train.fitting import with_floors
from wellposed.train.recipe import Recipe

CPU = torch.device("cpu")
PLAN = importlib.import_module("wellposed.linalg.spectral_plan")
ON_CPU, ELSEWHERE = 1e-6, 1e-5


@pytest.fixture
def other_device() -> Iterator[pytest.MonkeyPatch]:
    """The CPU passes for a device with other floors, until the patch is undone."""
    patch = pytest.MonkeyPatch()
    patch.setattr(PLAN, "FLOOR_EIGEN", ELSEWHERE)
    yield patch
    patch.undo()


def saved(folder) -> dict:
    """The graying of the run."""
    (call,) = tomllib.loads((folder / "recipe.toml").read_text())["edits"]
    return call


@pytest.mark.parametrize(
    ("fields", "floor"),
    [
        ({}, None),
        ({"graying": "dct"}, None),
        ({"graying": "svd"}, None),
        ({"graying": "svd", "gray_floor": 0.5}, 0.5),
        ({"graying": "spectral"}, ON_CPU),
        ({"graying": "condition"}, ON_CPU),
        ({"graying": "spectral", "gray_floor": 0.02}, 0.02),
        ({"graying": "spectral", "gray_floor": 1e-5}, 1e-5),
        ({"graying": "spectral", "target_kappa": 5.0}, ON_CPU),
    ],
)
def test_the_floor_on_a_cpu(fields, floor) -> None:
    calls = with_floors(Recipe.from_mapping(fields), CPU, {}).edits
    assert [call.get("floor") for call in calls] == [floor] * bool(fields)


def test_it_is_written_into_the_recipe_and_the_card(tmp_path) -> None:
    result = run(tmp_path, graying="spectral", gray_where="blocks", gray_blocks="0", epochs=1)
    assert saved(tmp_path)["floor"] == ON_CPU
    assert saved(tmp_path / "last") == saved(tmp_path)
    call = f'wp.gray_tokens(model, 0.7, "spectral", where="blocks", blocks=[0], floor={ON_CPU!r})'
    assert call in (tmp_path / "last" / "README.md").read_text()
    assert "floor=1e-06" in result.summary["about"]["edits"]


def test_a_run_that_moves_to_another_device_keeps_it(tmp_path, monkeypatch, other_device) -> None:
    signal_at(monkeypatch, 6, signal.SIGTERM)
    fields = {"graying": "spectral", "gray_where": "pixels", "patch_size": 2}
    assert run(tmp_path / "moved", **fields).status == "terminated"
    other_device.undo()
    assert saved(tmp_path / "moved")["floor"] == ELSEWHERE
    assert run(tmp_path / "moved", **fields).status == "finished"
    assert saved(tmp_path / "moved")["floor"] == ELSEWHERE
    assert run(tmp_path / "stayed", **fields, gray_floor=ELSEWHERE).status == "finished"
    assert_bitwise(weights(tmp_path / "moved"), weights(tmp_path / "stayed"))
    with pytest.raises(ValueError, match=r"edits .*1e-05.* there, .*0\.01.* now"):
        run(tmp_path / "moved", **fields, gray_floor=0.01)


def test_the_usual_folder_is_the_same_on_all_devices(other_device, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = recipe(graying="spectral", epochs=1)
    there = fit(given, quiet=True).folder
    other_device.undo()
    assert fit(given, quiet=True).folder == there
    assert saved(there)["floor"] == ELSEWHERE


def test_a_run_of_an_older_version_goes_on_and_says_so(tmp_path, monkeypatch) -> None:
    signal_at(monkeypatch, 2, signal.SIGTERM)
    fields = {"graying": "spectral", "epochs": 1}
    run(tmp_path, **fields)
    file = tmp_path / "recipe.toml"
    lines = [line for line in file.read_text().splitlines() if not line.startswith("edits")]
    file.write_text("\n".join(['graying = "spectral"', "eps = 0.7", 'gray_where = "embedding"', *lines]))
    assert run(tmp_path, **fields).status == "finished"
    said = [line["text"] for line in read_run(tmp_path) if line["event"] == "note"]
    assert any(text.startswith("the floor of the graying is 1e-06 from here on") for text in said)
    assert saved(tmp_path)["floor"] == ON_CPU


@pytest.mark.parametrize(
    "fields",
    [{"graying": "condition"}, {"graying": "spectral", "target_kappa": 8.0}],
    ids=lambda it: it["graying"],
)
def test_grayings_without_a_power_train(tmp_path, fields) -> None:
    assert run(tmp_path, **fields, epochs=1, limit=32).status == "finished"
    assert saved(tmp_path).get("eps") is None
    assert all(value.isfinite().all() for value in weights(tmp_path).values())
    card = (tmp_path / "last" / "README.md").read_text()
    assert f'wp.gray_tokens(model, None, "{fields["graying"]}", where="embedding"' in card
