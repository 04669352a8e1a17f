"""Runs from a recipe to weights: models, edits, tasks, folders."""

import itertools
import json
import os
import pickle
import re
import shutil
import tomllib

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import wellposed as wp
from short_runs import TINY, recipe, run, weights
from wellposed.run_records import read_run
from wellposed.train import Recipe, fit
from wellposed.train import loop as saving
from wellposed.train import model as builder
from wellposed.train.data import open_data
from wellposed.train.fitting import from_data
from wellposed.train.model import build_model
from wellposed.train.recipe import read_recipe

SMALL_MODELS = {
    "vit_tiny_patch16_224": TINY,
    "deit_tiny_distilled_patch16_224": TINY,
    "swin_tiny_patch4_window7_224": {"depths": [1, 1], "embed_dim": 16, "num_heads": [1, 2]},
    "cait_xxs24_224": {"depth": 2, "embed_dim": 32, "num_heads": 2},
    "pvt_v2_b0": {"depths": [1, 1, 1, 1], "embed_dims": [8, 8, 16, 16], "num_heads": [1, 1, 2, 2]},
    "convmixer_768_32": {},
}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Two classes of 32 x 32 pictures that differ in their colour."""
    folder = tmp_path_factory.mktemp("photographs")
    generator = np.random.default_rng(0)
    for label, colour in (("red", 0), ("blue", 2)):
        (folder / label).mkdir()
        for index in range(24):
            pixels = generator.integers(0, 120, (32, 32, 3), dtype=np.uint8)
            pixels[..., colour] += 100
            Image.fromarray(pixels).save(folder / label / f"{index}.png")
    return folder


@pytest.mark.parametrize("model", SMALL_MODELS)
def test_models_of_every_kind_train(model, photographs, tmp_path) -> None:
    options = SMALL_MODELS[model]
    result = run(
        tmp_path, data=str(photographs), limit=16, holdout=0.34, model=model, model_options=options, epochs=2
    )
    assert result.status == "finished"
    config = json.loads((tmp_path / "best" / "config.json").read_text())
    built = timm.create_model(model, **config["model_args"])
    built.load_state_dict(load_file(tmp_path / "best" / "model.safetensors"))
    assert built.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 2)


def test_a_model_without_known_blocks_trains_unmeasured(photographs, tmp_path) -> None:
    fields = {"data": str(photographs), "limit": 32, "model": "test_resnet", "model_options": {}, "epochs": 1}
    assert run(tmp_path / "run", **fields, monitor_every=None).status == "finished"
    said = [line["text"] for line in read_run(tmp_path / "run") if line["event"] == "note"]
    assert "kappa and density are not measured: no block of test_resnet is known." in said
    with pytest.raises(wp.UnknownModelError):
        run(tmp_path / "other", **fields, monitor_every=5)
    assert not (tmp_path / "other").exists()


def test_what_was_left_open_stands_in_the_folder(photographs, tmp_path) -> None:
    run(tmp_path, data=str(photographs), limit=None, model="vit_tiny_patch16_224", graying="dct", epochs=1)
    written = tomllib.loads((tmp_path / "recipe.toml").read_text())
    expected = {"image_size": 32, "patch_size": 4, "flip": 0.5, "crop_padding": 4}
    assert {name: written[name] for name in expected} == expected
    assert [edit["eps"] for edit in written["edits"]] == [0.95]
    assert written["lr"] == pytest.approx(3e-3)
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    again = Recipe.from_mapping(written)
    assert fit(again, out=tmp_path, quiet=True).status == "finished"  # the same run: finished already


def test_edits_of_the_recipe_are_in_the_model(tmp_path) -> None:
    fields = {
        "graying": "svd",
        "gray_where": "blocks",
        "gray_blocks": "0,1",
        "eps_per_block": (0.5, 0.8),
        "broadcast": "cb_s",
        "broadcast_where": "attention.end",
        "broadcast_blocks": "1",
        "remove_skips": "ffn",
        "skip_blocks": "0",
        "uniform_heads": 1,
        "uniform_blocks": "1",
        "init": "xavier",
    }
    run(tmp_path, **fields, epochs=1)
    config = json.loads((tmp_path / "last" / "config.json").read_text())
    edits = config["wellposed"]["edits"]
    told = ((edit["edit"], edit.get("where") or edit.get("which"), edit["blocks"]) for edit in edits)
    assert sorted(told, key=str) == [
        ("broadcast_context", "attention.end", [1]),
        ("gray_tokens", "blocks", [0]),
        ("gray_tokens", "blocks", [1]),
        ("remove_skips", "ffn", [0]),
        ("uniform_heads", None, [1]),
    ]
    grayed = [edit for edit in edits if edit["edit"] == "gray_tokens"]
    assert [(edit["eps"], edit["method"], edit["blocks"]) for edit in grayed] == [
        (0.5, "svd", [0]),
        (0.8, "svd", [1]),
    ]


def test_eps_follows_its_schedule(tmp_path, monkeypatch) -> None:
    seen = []
    forward = wp.nn.TokenGraying.forward

    def watching(self, x):
        if self.training:
            seen.append(float(self.eps))
        return forward(self, x)

    monkeypatch.setattr(wp.nn.TokenGraying, "forward", watching)
    run(tmp_path, graying="dct", eps=0.5, eps_end=1.0, epochs=1)
    assert seen == pytest.approx([0.5, 0.5 + 1 / 6, 0.5 + 2 / 6, 1.0])


def test_the_best_weights_keep_the_eps_they_were_tested_with(tmp_path, monkeypatch) -> None:
    worse = itertools.count(0, -1)
    monkeypatch.setattr(saving, "score", lambda tested: float(next(worse)))  # the first test is the best
    run(tmp_path, graying="dct", eps=0.5, eps_end=1.0)
    cards = {name: (tmp_path / name / "README.md").read_text() for name in ("best", "last")}
    assert "update 4" in cards["best"]
    # 12 updates, of which the fourth has 3 / 11 of the way behind it.
    (eps,) = re.findall(r"wp.gray_tokens\(model, ([0-9.]+)", cards["best"])
    assert float(eps) == pytest.approx(0.5 + 0.5 * 3 / 11, abs=1e-4)
    assert "wp.gray_tokens(model, 1.0" in cards["last"]


def test_xavier_is_another_start(tmp_path) -> None:

    data = open_data("digits")
    models = {
        init: build_model(from_data(recipe(init=init), data), 10, 1).model for init in ("timm", "xavier")
    }
    weight = models["xavier"].blocks[0].mlp.fc1.weight
    bound = (6 / sum(weight.shape)) ** 0.5
    assert 0.9 * bound < weight.abs().max() <= bound
    assert not torch.equal(weight, models["timm"].blocks[0].mlp.fc1.weight)
    # What is no linear layer stays as it was.
    assert torch.equal(models["xavier"].patch_embed.proj.weight, models["timm"].patch_embed.proj.weight)


def test_pretraining_then_fine_tuning_and_a_probe(tmp_path) -> None:
    small = {"mask_ratio": 0.5, "decoder_depth": 1, "monitor_every": 4, "image_size": 8, "patch_size": 2}
    edit = {"graying": "dct", "gray_where": "blocks", "gray_blocks": "0"}
    result = run(tmp_path / "mae", task="mae", **small, **edit)
    assert result.status == "finished"
    assert result.accuracy is None
    assert result.summary["test"]["loss"] > 0
    measured = [line for line in read_run(tmp_path / "mae") if line["event"] == "monitor"]
    assert {key for key in measured[0] if key.startswith("kappa") and key.endswith("input")} == {
        "kappa/0/input",
        "kappa/1/input",
    }
    encoder = load_file(tmp_path / "mae" / "last" / "model.safetensors")

    tuned = run(
        tmp_path / "tuned", start_from=str(tmp_path / "mae"), layer_decay=0.7, epochs=1, lr=1e-3, min_lr=1e-3
    )
    logged = [line["lr"] for line in read_run(tmp_path / "tuned") if line["event"] == "train"]
    assert logged[-1] == pytest.approx(1e-3)  # the head's; the layers before it have less
    assert tuned.status == "finished"
    said = " ".join(line["text"] for line in read_run(tmp_path / "tuned") if line["event"] == "note")
    assert "Weights from" in said

    probed = run(tmp_path / "probe", task="probe", start_from=str(tmp_path / "mae" / "last"), drop_path=0.5)
    assert probed.accuracy is not None
    trained = load_file(tmp_path / "probe" / "last" / "model.safetensors")
    trunk = [name for name in trained if not name.startswith("head.")]
    assert all(torch.equal(trained[name], encoder[name]) for name in trunk)
    assert not torch.equal(trained["head.weight"], encoder["head.weight"])


def test_test_images_that_the_first_run_was_trained_on_are_told(photographs, tmp_path) -> None:
    apart = tmp_path / "apart"
    for split in ("train", "val"):
        shutil.copytree(photographs, apart / split)
    first = {"model": "vit_tiny_patch16_224", "limit": 16, "epochs": 1, "holdout": 0.3, "seed": 1}

    def told(name: str, data: str, source: str, **fields: object) -> list[str]:
        run(tmp_path / name, **first | {"data": data, "start_from": str(tmp_path / source)} | fields)
        notes = [line["text"] for line in read_run(tmp_path / name) if line["event"] == "note"]
        return [note for note in notes if "not new to these weights" in note]

    run(tmp_path / "a", **first, data=str(photographs))
    (sentence,) = told("b", f"folder:{photographs}", "a", seed=2)
    assert "seed 1 and holdout 0.3 drew" in sentence
    assert "seed 2 and holdout 0.3 draws" in sentence
    assert told("c", str(photographs), "a/best/model.safetensors", holdout=0.4)
    assert not told("d", str(photographs), "a", holdout=0.2)  # a part of what was held out before
    assert not told("e", str(apart), "a", seed=2)
    run(tmp_path / "f", epochs=1)
    (sentence,) = told("g", "digits", "f", seed=3, model="test_vit", limit=64)
    assert "seed 0 drew" in sentence
    assert not told("h", "digits", "f", seed=0, model="test_vit", limit=64, holdout=0.5)


def test_the_monitor_changes_nothing(tmp_path) -> None:
    run(tmp_path / "with", monitor_every=2, drop_path=0.3)
    run(tmp_path / "without", monitor_every=0, drop_path=0.3)
    a, b = weights(tmp_path / "with"), weights(tmp_path / "without")
    assert all(torch.equal(a[name], b[name]) for name in a)
    measured = [line for line in read_run(tmp_path / "with") if line["event"] == "monitor"]
    assert [line["update"] for line in measured] == [0, 2, 4, 6, 8, 10, 12]
    assert measured[-1]["entropy/mean"] <= 1


def test_a_folder_of_another_run_is_refused(tmp_path) -> None:
    run(tmp_path, epochs=1)
    with pytest.raises(ValueError, match=r"another recipe \(batch_size 16 there, 32 now\)"):
        run(tmp_path, epochs=1, batch_size=32)
    assert run(tmp_path, epochs=1, workers=0, log_every=7).status == "finished"
    result = fit(recipe(epochs=1, batch_size=32), out=tmp_path, overwrite=True, quiet=True)
    assert result.summary["updates"] == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years")
    with pytest.raises(ValueError, match=r"holds 'thesis.tex' and no recipe.toml"):
        fit(recipe(), out=tmp_path / "other", overwrite=True, quiet=True)
    assert (tmp_path / "other" / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "vit_tinny_patch16_224"}, "vit_tiny_patch16_224"),
        ({"model": "resnet18", "model_options": {}, "graying": "dct", "image_size": 32}, "block"),
        ({"remove_skips": "attention", "skip_blocks": "7"}, "7"),
        ({"optimizer": "adammw"}, "did you mean 'adamw'"),
        ({"schedule": "plateau"}, "schedule must be one of timm's"),
        ({"warmup_epochs": 3.0}, "warmup_epochs must be less than epochs"),
        ({"data": "nowhere"}, "nowhere"),
        ({"limit": 1, "mixup": 0.2}, "training images"),
        ({"task": "mae", "model": "swin_tiny_patch4_window7_224", "model_options": {}}, "needs a plain ViT"),
        ({"model_options": {"widht": 3}}, "widht"),
        ({"device": "tpu"}, "device must be cpu or cuda"),
        ({"trackers": ("tensorbord",)}, "did you mean 'tensorboard'"),
        ({"task": "mae", "layer_decay": 0.5}, "layer_decay is for fine-tuning"),
        ({"start_from": "nothing.safetensors"}, "nothing.safetensors"),
        ({"patch_size": 3}, "patch_size must divide .* 8 pixels, got 3; take one of 1, 2, 4, 8,"),
        ({"patch_size": 16, "model": "vit_tiny_patch16_224"}, "patch_size must divide .* got 16"),
        ({"image_size": 3}, "image_size must be at least 4, .* got 3"),
        ({"model_options": {"num_classes": 20}}, "num_classes must be 10, .* got 20 in model_options"),
        ({"model_options": {"in_chans": 3}}, "in_chans must be 1, .* got 3 in model_options"),
    ],
)
def test_bad_input_is_told_before_a_folder_is_made(fields, message, tmp_path) -> None:
    with pytest.raises((ValueError, TypeError, IndexError, OSError), match=message):
        run(tmp_path / "run", **fields)
    assert not (tmp_path / "run").exists()


def test_one_class_can_be_pretrained_on_and_not_told_apart(photographs, tmp_path) -> None:
    shutil.copytree(photographs / "red", tmp_path / "data" / "red")
    fields = {"data": str(tmp_path / "data"), "limit": 16, "model": "vit_tiny_patch16_224", "epochs": 1}
    with pytest.raises(ValueError, match=r"at least two classes .* got 1 \(red\); .* task=mae"):
        run(tmp_path / "run", **fields)
    assert not (tmp_path / "run").exists()
    assert run(tmp_path / "mae", **fields, task="mae", decoder_depth=1).status == "finished"


def test_a_damaged_result_is_named(tmp_path) -> None:
    run(tmp_path, epochs=1)
    for damage in ('{"fin', "[]"):
        (tmp_path / "result.json").write_text(damage)
        with pytest.raises(ValueError, match=r"JSON object in .*result\.json, which is damaged .* delete"):
            run(tmp_path, epochs=1)
    (tmp_path / "result.json").unlink()
    assert run(tmp_path, epochs=1).status == "finished"


def test_a_pickle_is_refused_and_does_not_run(tmp_path) -> None:
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    for name in ("weights.pt", "weights.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Evil()))
        with pytest.raises(ValueError, match="weights"):
            run(tmp_path / "run", start_from=str(tmp_path / name))
    assert not (tmp_path / "ran").exists()


def test_digits_by_default(tmp_path) -> None:
    """The default recipe, but for the tracker and a third of the epochs: over 95% of the test images."""
    result = fit(Recipe(trackers=(), device="cpu", epochs=40), out=tmp_path, quiet=True)  # seen: 97%
    assert result.summary["about"]["test_images"] == 400
    assert result.accuracy is not None
    assert result.accuracy > 0.95


def test_pretrained_weights(tmp_path, monkeypatch) -> None:
    """What the hub would give is made here: the model of another seed."""
    asked = []

    def build(name, *, seed, pretrained, **options):
        asked.append(pretrained)
        return wp.models.build(name, seed=7 if pretrained else seed, **options)

    monkeypatch.setattr(builder, "build", build)
    run(tmp_path / "a", pretrained=True, epochs=1, broadcast="cb_s")
    run(tmp_path / "b", epochs=1, broadcast="cb_s")
    assert asked == [True, False]
    config = json.loads((tmp_path / "a" / "last" / "config.json").read_text())
    assert "pretrained" not in config["model_args"]
    a, b = (load_file(tmp_path / name / "last" / "model.safetensors") for name in "ab")
    assert not torch.equal(a["blocks.0.attn.qkv.weight"], b["blocks.0.attn.qkv.weight"])
    (scale,) = {key for key in a if key.startswith("blocks.0") and key.endswith("scale")}
    # Into trained weights they go as if they were not there, into fresh ones as CB.
    assert a[scale].abs().max() < 0.1
    assert (b[scale] - 0.5).abs().max() < 0.1


def test_fewer_images_than_a_batch_lower_it_and_it_is_said(tmp_path) -> None:
    result = run(tmp_path, limit=27, batch_size=64, accumulate=2, epochs=1, mixup=0.2)
    assert result.status == "finished"
    assert read_recipe(tmp_path / "recipe.toml")["batch_size"] == 24
    notes = [line["text"] for line in read_run(tmp_path) if line["event"] == "note"]
    assert "batch_size is 24, not 64: there are 27 training images." in notes
    with pytest.raises(ValueError, match=r"expected at least 8 training images.*got 7"):
        run(tmp_path / "few", limit=7, batch_size=64, accumulate=4, mixup=0.2)


def test_a_model_of_a_folder(tmp_path) -> None:
    """Its weights are taken where the recipe says pretrained, and plain timm loads what comes out."""
    source = wp.models.build("test_vit", seed=7, img_size=32, patch_size=8, **TINY)
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(source.state_dict(), folder / "model.safetensors")
    arguments = {"img_size": 32, "patch_size": 8, **TINY}
    facts = {"mean": [0.1, 0.2, 0.3], "std": [0.5] * 3, "num_classes": 1000}
    facts |= {"classifier": "head", "first_conv": "patch_embed.proj"}
    config = {"architecture": "test_vit", "model_args": arguments, "pretrained_cfg": facts}
    (folder / "config.json").write_text(json.dumps(config))
    name, fields = f"local-dir:{folder}", {"epochs": 1, "lr": 1e-9, "model_options": {}}
    run(tmp_path / "a", model=name, pretrained=True, **fields)
    run(tmp_path / "b", model=name, **fields)
    a, b = (load_file(tmp_path / each / "last" / "model.safetensors") for each in "ab")
    key = "blocks.0.attn.qkv.weight"
    torch.testing.assert_close(a[key], source.state_dict()[key], rtol=0, atol=1e-3)
    assert (a[key] - b[key]).abs().max() > 0.01
    assert read_recipe(tmp_path / "a" / "recipe.toml")["patch_size"] == 2
    told = json.loads((tmp_path / "a" / "last" / "config.json").read_text())
    assert told["architecture"] == "test_vit"
    assert told["model_args"]["depth"] == 2
    assert told["pretrained_cfg"]["mean"] == [pytest.approx(0.2)]
    shutil.rmtree(folder)
    again = timm.create_model(told["architecture"], **told["model_args"])
    again.load_state_dict(a)
    assert 'create_model("test_vit"' in (tmp_path / "a" / "last" / "README.md").read_text()


@pytest.mark.parametrize("name", ["tv:vit_b_16", "hf:google/vit"])
def test_other_libraries_are_not_trained(name, tmp_path) -> None:
    with pytest.raises(ValueError, match="expected a model of timm to train, got"):
        run(tmp_path / "run", model=name)
