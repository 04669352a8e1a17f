"""The command line."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from typer.testing import CliRunner

import wellposed as wp
import wellposed.targets
import wellposed.train.sweep
from wellposed.cli import app
from wellposed.commands.app import in_flags
from wellposed.errors import SeamError
from wellposed.models import build
from wellposed.train.recipe import Recipe
from wellposed.train.screen import LINE_SECONDS

MODEL = ["vit_tiny_patch16_224", "--image-size", "32"]


@pytest.fixture
def folder(tmp_path):
    """A folder with three small images and one file that is none."""
    where = tmp_path / "images"
    where.mkdir()
    generator = np.random.default_rng(0)
    for index in range(3):
        pixels = generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(where / f"{index}.png")
    (where / "broken.jpg").write_bytes(b"not an image")
    return where


def diagnose(*arguments: object):
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)])


def test_diagnose(folder, tmp_path) -> None:
    out = tmp_path / "out"
    result = diagnose(*MODEL, "--images", folder, "--out", out, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "vit_tiny_patch16_224: 3 images" in result.output
    assert "broken.jpg" in result.output
    assert "random weights (seed 0)" in result.output
    assert sorted(path.name for path in out.iterdir()) == [
        "diagnosis.csv",
        "diagnosis.html",
        "diagnosis.json",
    ]
    about = json.loads((out / "diagnosis.json").read_text())["about"]
    assert about["model"] == "vit_tiny_patch16_224"
    assert any("broken.jpg" in note for note in about["notes"])


def test_json_is_what_out_writes(folder, tmp_path) -> None:
    common = (*MODEL, "--images", folder, "--blocks", "0", "--what", "conditioning", "--device", "cpu")
    result = diagnose(*common, "--json", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    printed, written = (
        json.loads(result.stdout),
        json.loads((tmp_path / "out" / "diagnosis.json").read_text()),
    )
    assert printed == written
    assert {record["measure"] for record in printed["records"]} >= {"kappa", "effective rank"}
    both = diagnose(*common, "--json", "--compare", "vit_tiny_patch16_224")
    assert both.exit_code == 1
    assert "expected --json or --compare, got both" in both.output


def test_the_table_fits_in_80_columns(folder) -> None:
    for name in ("vit_tiny_patch16_224", "hf:" + str(_hugging_face_folder(folder.parent))):
        size = ("--image-size", "32") if name.startswith("vit") else ()
        result = diagnose(name, *size, "--images", folder, "--blocks", "0,1", "--device", "cpu")
        assert result.exit_code == 0, result.output
        table = result.stdout.partition("\n\n")[2].partition("\n\n")[0].splitlines()
        assert "attention" in table[0]
        assert "entropy" in table[1]
        assert max(map(len, table)) <= 80, result.stdout


def _hugging_face_folder(parent: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    tiny = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **tiny)).save_pretrained(
        parent / "vit"
    )
    return parent / "vit"


def test_weights_and_choices(folder, tmp_path) -> None:
    model = build("vit_tiny_patch16_224", img_size=32, seed=7)
    file = tmp_path / "w.safetensors"
    safetensors.torch.save_file({name: t.contiguous() for name, t in model.state_dict().items()}, file)
    common = (*MODEL, "--images", folder, "--what", "conditioning,density", "--blocks", "0,2-3")
    loaded = diagnose(*common, "--weights", file)
    assert loaded.exit_code == 0, loaded.output
    assert "w.safetensors" in loaded.output
    seeded = diagnose(*common, "--seed", 7)
    rows = [
        [line for line in result.output.splitlines() if line[:1].isdigit()] for result in (loaded, seeded)
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["vit_tinny_patch16_224"], "vit_tiny_patch16_224"),
        ([*MODEL, "--what", "speed"], "what must be"),
        ([*MODEL, "--blocks", "first"], "blocks must be indices"),
        ([*MODEL, "--blocks", "99"], "within 0 and 11"),
        ([*MODEL, "--weights", "w.pth"], "there is no w.pth"),
        (
            [*MODEL, "--weights", "w.pth", "--pretrained"],
            "error: expected --weights or --pretrained, got both",
        ),
        ([*MODEL, "--what", "speed"], "error: --what must be"),
        ([*MODEL, "--device", "cuda:77"], "error: --device cuda:77 is none that torch sees here"),
        (["tv:resnet18"], "found no transformer block"),
    ],
)
def test_mistakes_are_one_message(folder, arguments, says) -> None:
    result = diagnose(*arguments, "--images", folder)
    assert result.exit_code == 1
    assert says in result.output
    assert "Traceback" not in result.output


def test_a_checkpoint_is_diagnosed_with_the_edits_that_were_saved_with_it(folder, tmp_path) -> None:
    options = {"img_size": 32, "depth": 1}
    model = build("vit_tiny_patch16_224", **options)
    wp.broadcast_context(model, scaled=True)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "best.pth.tar")
    wp.save_edits(model, tmp_path)
    common = ["vit_tiny_patch16_224", "--images", folder, "--weights", tmp_path / "best.pth.tar"]
    result = diagnose(*common, "--model-option", "img_size=32", "--model-option", "depth=1")
    assert result.exit_code == 0, result.output
    assert "edited: broadcast_context mlp.end blocks.0.mlp" in result.output


def test_python_in_an_error_stays_python() -> None:
    said = "got blocks=7: wp.gray_tokens(model, 0.7, blocks=[0, 1]) makes it; leave blocks=9 out."
    expected = "got --blocks 7: wp.gray_tokens(model, 0.7, blocks=[0, 1]) makes it; leave --blocks 9 out."
    assert in_flags(said, {"blocks": "--blocks"}) == expected


def test_no_images(tmp_path) -> None:
    result = diagnose(*MODEL, "--images", tmp_path / "nowhere")
    assert result.exit_code == 1
    assert "nowhere" in result.output
    result = diagnose(*MODEL, "--images", tmp_path)
    assert result.exit_code == 1
    assert "expected images in" in result.output


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    for command in (
        "demo",
        "diagnose",
        "report",
        "study",
        "train",
        "sweep",
        "pack",
        "push",
        "bench",
        "doctor",
    ):
        assert f"│ {command} " in result.output
    groups = [result.output.index(f"─ {name} ─") for name in ("First steps", "Measure", "Train", "Reproduce")]
    assert groups == sorted(groups)


def test_train_shows_the_usual_options_and_all_on_demand() -> None:
    usual, every = (
        CliRunner(env={"COLUMNS": "200"}).invoke(app, ["train", flag]) for flag in ("--help", "--help-all")
    )
    assert usual.exit_code == every.exit_code == 0
    fields = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Recipe)}
    fields = fields - {"--model-options", "--edits"} | {"--model-option", "--edit"}
    shown = {name for name in fields if re.search(rf"│ {name}\s", usual.output)}
    assert len(shown) == 10
    assert {"--data", "--model", "--edit"} <= shown
    assert {name for name in fields if re.search(rf"│ {name}\s", every.output)} == fields


def test_torchvision_and_transformers_names(folder, tmp_path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    torch.manual_seed(0)
    ViTForImageClassification(config).save_pretrained(tmp_path / "hf")
    result = diagnose(f"hf:{tmp_path / 'hf'}", "--images", folder, "--what", "density")
    assert result.exit_code == 0, result.output
    result = diagnose(
        "tv:vit_b_32", "--image-size", "32", "--images", folder, "--blocks", "0", "--max-images", 1
    )
    assert result.exit_code == 0, result.output


def invoke(*arguments: object, **options):
    return CliRunner().invoke(app, list(map(str, arguments)), **options)


def test_what_needs_no_torch_does_not_load_it() -> None:
    code = """
import sys
from wellposed.cli import app
from wellposed.commands.app import in_flags
for arguments in (["--help"], ["train", "--help"], ["sweep", "--help"], ["train", "--dry-run"]):
    try:
        app(arguments)
    except SystemExit as ended:
        assert not ended.code
import wellposed.train.sweep
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_it_is_a_module_too_and_quick() -> None:
    began = time.monotonic()
    command = [sys.executable, "-m", "wellposed", "train", "--epochs", "none", "--dry-run"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert time.monotonic() - began < 2
    assert ended.returncode == 1
    assert ended.stderr == "error: --epochs must be a whole number, got 'none'.\n"


@pytest.fixture
def fit(monkeypatch):
    """Stands for wellposed.train.fit: notes the call, and ends as its ``ends`` says."""

    def fake(recipe, *, out, overwrite):
        fake.called = (recipe, out, overwrite)
        if isinstance(fake.ends, Exception):
            raise fake.ends
        return SimpleNamespace(status=fake.ends)

    fake.ends = "finished"
    monkeypatch.setitem(vars(wellposed.train), "fit", fake)
    return fake


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("terminated", 143), ("nonfinite", 3)])
def test_train_ends_with_the_code_of_its_status(fit, status, code) -> None:
    fit.ends = status
    assert invoke("train").exit_code == code


def test_train_passes_the_recipe_on(fit, tmp_path) -> None:
    (tmp_path / "mine.toml").write_text("epochs = 3\nlr = 0.5\n")
    result = invoke("train", tmp_path / "mine.toml", "--lr", 0.25, "--out", tmp_path / "run", "--overwrite")
    assert result.exit_code == 0, result.output
    assert fit.called == (Recipe(epochs=3, lr=0.25), tmp_path / "run", True)
    invoke("train")
    assert fit.called == (Recipe(), None, False)


@pytest.mark.parametrize("error", [SeamError("of ours"), ValueError("of ours"), OSError("of ours")])
def test_an_error_for_the_user_is_one_message(fit, error) -> None:
    fit.ends = error
    result = invoke("train")
    assert result.exit_code == 1
    assert result.output == "error: of ours\n"


def test_an_error_of_the_program_is_not_hidden(fit) -> None:
    fit.ends = RuntimeError("CUDA error")
    assert isinstance(invoke("train").exception, RuntimeError)


def test_sweep_passes_its_options_on(monkeypatch, tmp_path) -> None:
    called = {}

    def fake(recipes, **options):
        called.update(options, recipes=recipes)
        return SimpleNamespace(exit_code=143)

    monkeypatch.setattr(wellposed.train.sweep, "run", fake)
    arguments = ("a.toml", "more", "--jobs", 3, "--seeds", "0-2", "--seeds", "7", "--out", tmp_path)
    result = invoke("sweep", *arguments, "--set", "data=cifar10:DIR", "--set", "epochs=2")
    assert result.exit_code == 143
    assert called == {
        "recipes": [Path("a.toml"), Path("more")],
        "jobs": 3,
        "seeds": [0, 1, 2, 7],
        "out": tmp_path,
        "changes": {"data": "cifar10:DIR", "epochs": 2},
    }
    result = invoke("sweep", "a.toml", "--seeds", "one")
    assert result.exit_code == 1
    assert "seeds must be indices" in result.output
    assert invoke("sweep").exit_code == 2


def test_a_sweep_without_recipes_is_told(tmp_path) -> None:
    result = invoke("sweep", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "expected recipes in" in result.output


def test_pack(folder, tmp_path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "set" / label).mkdir(parents=True)
        for index in range(3):
            shutil.copy(folder / f"{index}.png", tmp_path / "set" / label / f"{index}.png")
    out = tmp_path / "set.npz"
    result = invoke("pack", tmp_path / "set", "-o", out, "--holdout", 0.34)
    assert result.exit_code == 0, result.output
    assert "4 training and 2 test images of 2 classes written to" in result.output
    assert out.exists()
    shutil.copy(folder / "broken.jpg", tmp_path / "set" / "cat")
    result = invoke("pack", tmp_path / "set", "-o", out)
    assert result.exit_code == 1
    assert "broken.jpg" in result.output
    result = invoke("pack", tmp_path / "set", "-o", out, "--skip-unreadable")
    assert result.exit_code == 0
    assert "broken.jpg" in result.output


def test_bench_says_where_the_benchmarks_are() -> None:
    result = invoke("bench")
    assert (result.exit_code, "python -m benchmarks" in result.output) == (0, True)
    result = invoke("bench", "train", "--model", "vit_tiny_patch16_224")
    assert result.exit_code == 2
    assert result.output.endswith("python -m benchmarks trainer --model vit_tiny_patch16_224\n")


def test_help_tells_the_defaults() -> None:
    text = invoke("diagnose", "--help", env={"COLUMNS": "200"}).output
    assert "Indices such as 0,3,11 or 0-5. [default: all]" in text
    text = invoke("sweep", "--help", env={"COLUMNS": "200"}).output
    assert "[default: 6 on a GPU, else 1]" in text


def test_the_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"wellposed {wellposed.__version__}\n")


def test_errors_of_training_name_flags_where_there_is_no_file(tmp_path) -> None:
    result = CliRunner().invoke(app, ["train", "--batch-size", "33", "--accumulate", "2"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: --batch-size must be a multiple of ")
    (tmp_path / "r.toml").write_text("batch_size = 33\naccumulate = 2")
    result = CliRunner().invoke(app, ["train", str(tmp_path / "r.toml")])
    assert result.stderr.startswith("error: batch_size must be a multiple of ")


@pytest.mark.parametrize("images", ["nowhere", "empty"])
def test_images_are_looked_for_before_anything_is_downloaded(images, tmp_path, monkeypatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(wellposed.targets, "build", lambda *_, **__: pytest.fail("it was built"))
    result = diagnose(*MODEL, "--images", tmp_path / images, "--pretrained")
    assert result.exit_code == 1
    assert str(tmp_path / images) in result.output


def test_progress_where_there_is_no_terminal(folder, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["wellposed.probes.diagnose"], "LINE_SECONDS", 0.0)
    result = diagnose(*MODEL, "--images", folder, "--batch-size", "2", "--what", "conditioning")
    assert "forward passes, 1 batches\nforward passes, 2 batches\n" in result.stderr
    assert LINE_SECONDS <= 15


def test_edits_and_a_comparison(folder, tmp_path) -> None:
    common = [*MODEL, "--images", folder, "--blocks", "0", "--device", "cpu", "--model-option", "depth=2"]
    plain = diagnose(*common, "--out", tmp_path / "plain")
    assert plain.exit_code == 0, plain.output
    edits = ("--edit", "gray_tokens method=dct eps=0.5 where=blocks")
    for other in (tmp_path / "plain", MODEL[0]):
        edited = diagnose(*common, *edits, "--compare", other)
        assert edited.exit_code == 0, edited.output
        table = edited.output.partition("measure")[2].splitlines()
        assert table[0].split() == ["where", MODEL[0], str(other), "ratio"]
        assert not any(".skip" in line for line in table)
        rows = [line.split() for line in table if line.startswith("kappa")]
        assert any(row[-1] not in ("1", "-") for row in rows)
    assert edited.output.count("edited: gray_tokens") == 2
    wrong = diagnose(*common, "--edit", "epochs=3")
    assert "error: expected an edit such as 'gray_tokens eps=0.7', got 'epochs=3'" in wrong.output
