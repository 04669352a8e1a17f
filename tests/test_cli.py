"""The command line."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from typer.testing import CliRunner

from wellposed.cli import app
from wellposed.models import build

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
        ([*MODEL, "--weights", "w.pth"], "safetensors"),
        (["tv:resnet18"], "found no transformer block"),
    ],
)
def test_mistakes_are_one_message(folder, arguments, says) -> None:
    result = diagnose(*arguments, "--images", folder)
    assert result.exit_code == 1
    assert says in result.output
    assert "Traceback" not in result.output


def test_no_images(tmp_path) -> None:
    result = diagnose(*MODEL, "--images", tmp_path / "nowhere")
    assert result.exit_code == 1
    assert "nowhere" in result.output
    result = diagnose(*MODEL, "--images", tmp_path)
    assert result.exit_code == 1
    assert "expected images in" in result.output


def test_help_is_quick_and_names_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert "diagnose" in result.output
    assert "demo" in result.output


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
