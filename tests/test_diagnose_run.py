"""``wellposed diagnose`` of a training run's folder, and of models with options."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import short_runs
import wellposed as wp
from wellposed.cli import app
from wellposed.models import build
from wellposed.train.data import decode_all, open_data
from wellposed.train.runs import open_run

TEST_IMAGES = 400
EDITS = {"graying": "dct", "eps": 0.9, "eps_end": 0.5, "broadcast": "cb_s", "remove_skips": "ffn"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "edited"
    short_runs.run(folder, lr=3e-3, **EDITS)
    return folder


def diagnose(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["diagnose", "--device", "cpu", *map(str, arguments)])


def values(diagnosis: wp.Diagnosis) -> dict[Any, float]:
    """The measurements that float32 tells to 1e-4; larger kappas hang on rounding."""
    found = diagnosis.records
    return {each.key: each.value for each in found if each.value is not None and each.value < 1e4}


def written(out: Path) -> dict[Any, float]:
    return values(wp.Diagnosis.from_json(out / "diagnosis.json"))


def own_pixels(count: int) -> np.ndarray:
    """Test images of the run, evenly, as (count, 8, 8) bytes."""
    every = decode_all(open_data("digits").test, 8, 1)
    return every[np.linspace(0, TEST_IMAGES - 1, count).round().astype(int), 0]


def test_one_line_measures_the_model_as_it_was_trained(trained, tmp_path) -> None:
    out = tmp_path / "out"
    result = diagnose(trained, "--weights", "last", "--max-images", 5, "--out", out)
    assert result.exit_code == 0, result.output
    assert "5 of the 400 test images of the run's own data (digits)" in result.output
    assert re.search(r"last/model\.safetensors, after update 12", result.output.replace("\n", ""))

    by_hand = timm.create_model(
        "test_vit", img_size=8, patch_size=2, in_chans=1, num_classes=10, **short_runs.TINY
    )
    wp.gray_tokens(by_hand, 0.5, "dct")
    wp.broadcast_context(by_hand, scaled=True)
    wp.remove_skips(by_hand, "ffn")
    by_hand.load_state_dict(load_file(trained / "last" / "model.safetensors"))
    images = (torch.from_numpy(own_pixels(5)[:, None]).float() - 127.5) / 127.5
    expected = values(wp.diagnose(by_hand, images))
    assert len(expected) > 20
    assert written(out) == pytest.approx(expected, rel=1e-4)
    about = json.loads((out / "diagnosis.json").read_text())["about"]
    assert (about["model"], about["run"], about["data"], about["seed"]) == ("test_vit", "edited", "digits", 0)


def test_best_weights_are_the_default(trained) -> None:
    outputs = [diagnose(trained, *given).output for given in ((), ("--weights", "best"))]
    assert outputs[0] == outputs[1]
    assert "best/model.safetensors" in outputs[0].replace("\n", "")
    assert "test_vit: 32 images" in outputs[0]


def test_files_are_prepared_as_the_run_prepared_its_images(trained, tmp_path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number, pixels in enumerate(own_pixels(4)):
        Image.fromarray(pixels).save(pictures / f"{number}.png")
    for name, images in (("own", ("--max-images", 4)), ("files", ("--images", pictures))):
        result = diagnose(trained, *images, "--what", "conditioning", "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
    assert written(tmp_path / "files") == pytest.approx(written(tmp_path / "own"), rel=1e-4)


def test_data_that_moved_needs_images(trained, tmp_path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(trained, moved)
    recipe = moved / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('data = "digits"', 'data = "packed:gone.npz"'))
    result = diagnose(moved)
    assert result.exit_code == 1
    assert "cannot open the data of the run, packed:gone.npz" in result.output
    assert "--images DIR" in result.output
    Image.fromarray(own_pixels(1)[0]).save(tmp_path / "one.png")
    assert diagnose(moved, "--images", tmp_path / "one.png").exit_code == 0


def test_a_run_that_was_interrupted_has_its_best_weights(tmp_path, monkeypatch) -> None:
    short_runs.signal_at(monkeypatch, 8, signal.SIGTERM)
    assert short_runs.run(tmp_path / "run", checkpoint_every=4, **EDITS).status == "terminated"
    run = open_run(tmp_path / "run")
    assert run.updates == 12
    assert run.moment("best").update in (4, 8)
    assert diagnose(tmp_path / "run").exit_code == 0
    result = diagnose(tmp_path / "run", "--weights", "last")
    assert result.exit_code == 1
    assert "expected last/model.safetensors" in result.output
    assert "there are best ones" in result.output


def test_weights_that_the_run_did_not_write_are_refused(trained, tmp_path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    file = folder / "best" / "model.safetensors"
    state = load_file(file)
    save_file({name: value + 0 if name != "head.bias" else value + 1 for name, value in state.items()}, file)
    result = diagnose(folder)
    assert result.exit_code == 1
    assert "expected the weights that the run wrote" in result.stderr
    assert "best/model.safetensors holds others" in result.stderr
    assert diagnose(folder, "--weights", "last").exit_code == 0


def test_a_run_without_weights(trained, tmp_path) -> None:
    (tmp_path / "recipe.toml").write_bytes((trained / "recipe.toml").read_bytes())
    result = diagnose(tmp_path)
    assert result.exit_code == 1
    assert "in last or best of" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{runs}/nowhere"], "there is no folder"),
        (["{runs}"], "has no recipe.toml; those in it are edited"),
        (["{runs}/edited/best"], "holds weights alone"),
        (["{runs}/edited", "--weights", "w.safetensors"], "must be best or last"),
        (["{runs}/edited", "--model-option", "depth=3"], "leave --model-option out"),
        (["{runs}/edited", "--image-size", "16"], "leave --image-size out"),
        (["{runs}/edited", "--pretrained"], "leave --pretrained out"),
        (["{runs}/edited", "--seed", "0"], "leave --seed out"),
        (["nonesuch"], "Nor is there a folder nonesuch"),
        (["test_vit"], "--images DIR"),
        (["test_vit", "--weights", "last", "--images", "{runs}"], "--weights last is of a run"),
        (["test_vit", "--model-option", "depht=3", "--images", "{runs}"], "test_vit does not take"),
        (["test_vit", "--model-option", "depth", "--images", "{runs}"], "must be key=value"),
        (
            ["test_vit", "--model-option", "img_size=8", "--image-size", "8", "--images", "{runs}"],
            "got both",
        ),
    ],
)
def test_mistakes_are_one_message(trained, arguments, says) -> None:
    result = diagnose(*(text.format(runs=trained.parent) for text in arguments))
    assert result.exit_code == 1
    assert says in result.output
    assert "Traceback" not in result.output


def test_options_of_a_model(tmp_path) -> None:
    options = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 3, "depth": 2}
    save_file(build("test_vit", seed=7, **options).state_dict(), tmp_path / "mine.safetensors")
    Image.fromarray(own_pixels(1)[0]).save(tmp_path / "one.png")
    flags = [word for name, value in options.items() for word in ("--model-option", f"{name}={value}")]
    common = ("--images", tmp_path / "one.png", *flags)
    loaded = diagnose("test_vit", "--weights", tmp_path / "mine.safetensors", *common)
    assert loaded.exit_code == 0, loaded.output
    seeded = diagnose("test_vit", "--seed", 7, *common)
    rows = [[line for line in each.output.splitlines() if line[:1].isdigit()] for each in (loaded, seeded)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2


def test_a_folder_named_as_a_model_is_not_taken_for_it(trained, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "test_vit")
    assert "expected images to show test_vit" in diagnose("test_vit").output
    assert diagnose("./test_vit", "--max-images", 2).exit_code == 0
