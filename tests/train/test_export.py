"""Exported weights: loaded by plain timm, by the card's own code, and whole at any moment."""

import contextlib
import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

import wellposed as wp
from wellposed.image_files import decode
from wellposed.train import durable
from wellposed.train import durable as folder_swap
from wellposed.train.export import FIRST_LOCAL_DIR, Exported, export_weights
from wellposed.train.recipe import Recipe, combine, read_recipe

SIDE = 32
VIT = {"img_size": SIDE, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
SWIN = {"img_size": SIDE, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)}
LOADS_FOLDERS = tuple(map(int, timm.__version__.split(".")[:3])) >= tuple(
    map(int, FIRST_LOCAL_DIR.split("."))
)
CLASSES = ("zero", "one | two", "three\nfour", "ä", "five")

PLAIN = {
    "vit": ("vit_tiny_patch16_224", VIT),
    "vit, grey": ("vit_tiny_patch16_224", {**VIT, "in_chans": 1}),
    "vit, two channels": ("vit_tiny_patch16_224", {**VIT, "in_chans": 2}),
    "vit with a tag": ("vit_tiny_patch16_224.augreg_in21k", VIT),
    "deit distilled": ("deit_tiny_distilled_patch16_224", VIT),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
    "cait": ("cait_xxs24_224", VIT),
    "pvt_v2": ("pvt_v2_b0", {}),
}


def edited(*edits) -> Recipe:
    return Recipe(model="vit_tiny_patch16_224", edits=edits)


EDITED = {
    "everything": (
        edited(
            "gray_tokens method=dct eps=0.9",
            "broadcast_context scaled=true blocks=0,2-3",
            "remove_skips which=ffn blocks=1",
            "uniform_heads heads=2 blocks=0,3",
        ),
        lambda model: (
            wp.gray_tokens(model, 0.9, "dct"),
            wp.broadcast_context(model, scaled=True, blocks=[0, 2, 3]),
            wp.remove_skips(model, "ffn", blocks=[1]),
            wp.uniform_heads(model, 2, blocks=[0, 3]),
        ),
    ),
    "a power for each block": (
        edited(
            "gray_tokens method=svd where=blocks eps=0.5 blocks=0",
            "gray_tokens method=svd where=blocks eps=0.7 blocks=2",
            "gray_tokens method=svd where=blocks eps=0.5 blocks=3",
        ),
        lambda model: (
            wp.gray_tokens(model, 0.5, "svd", "blocks", blocks=[0, 3]),
            wp.gray_tokens(model, 0.7, "svd", "blocks", blocks=[2]),
        ),
    ),
    "a power that changed": (
        edited("gray_tokens eps=1.0 eps_end=0.5 where=pixels"),
        lambda model: wp.gray_tokens(model, 0.625, "spectral", "pixels"),
    ),
    "a floor": (
        edited({"edit": "gray_tokens", "eps": 0.6, "floor": 1 / 30}),
        lambda model: wp.gray_tokens(model, 0.6, floor=1 / 30),
    ),
    "a target for kappa": (
        edited("gray_tokens where=blocks blocks=1-2 target_kappa=7.5 floor=1e-4"),
        lambda model: wp.gray_tokens(model, where="blocks", blocks=[1, 2], target_kappa=7.5, floor=1e-4),
    ),
    "no power": (
        edited("gray_tokens method=condition floor=1e-4"),
        lambda model: wp.gray_tokens(model, method="condition", floor=1e-4),
    ),
    "all blocks": (
        edited(
            "gray_tokens method=dct where=blocks",
            "broadcast_context where=attention.end",
            "remove_skips which=both",
            "uniform_heads",
        ),
        lambda model: (
            wp.gray_tokens(model, None, "dct", "blocks"),
            wp.broadcast_context(model, "attention.end"),
            wp.remove_skips(model, "both"),
            wp.uniform_heads(model),
        ),
    ),
}


def make(name, options, seed=0):
    torch.manual_seed(seed)
    model = timm.create_model(name.partition(".")[0], num_classes=5, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def export(folder, model, recipe, options, **more):
    channels = options.get("in_chans", 3)
    given = {
        "recipe": recipe,
        "model_kwargs": options,
        "classes": CLASSES,
        "mean": [0.25] * channels,
        "std": [0.5] * channels,
        "image_size": SIDE,
        "accuracy": 0.9512,
        "update": 1234,
        "edits": wp.edits(model),
        "environment": {"python": "3.11.7", "packages": {"torch": "2.11"}, "cpu": "a CPU", "processes": 1},
        "train_images": 50_000,
        "test_images": 10_000,
    }
    export_weights(folder, model.state_dict(), Exported(**{**given, **more}))


def from_folder(folder, **options):
    """The model as ``timm.create_model("local-dir:...", pretrained=True)`` gives it."""
    if LOADS_FOLDERS:
        return timm.create_model(f"local-dir:{folder}", pretrained=True, **options).eval()
    with pytest.raises(pickle.UnpicklingError):
        timm.create_model(f"local-dir:{folder}", pretrained=True, **options)
    model = timm.create_model(f"local-dir:{folder}", **options).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def images(options, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, options.get("in_chans", 3), SIDE, SIDE, generator=generator)


def run_card(folder, monkeypatch, options, picture=None) -> list[dict]:
    """Run the card's Python in its folder; the names that are there after each block."""
    monkeypatch.chdir(folder)
    mode = "L" if options.get("in_chans") == 1 else "RGB"
    (picture or Image.effect_noise((50, 40), 64).convert(mode)).save("picture.png")
    names: dict = {}
    after = []
    for block in re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL):
        if "local-dir" in block and not LOADS_FOLDERS:
            continue
        exec(compile(block, "<card>", "exec"), names)
        after.append(dict(names))
    return after


@pytest.mark.parametrize("case", PLAIN)
def test_plain_timm_loads_it(tmp_path, case) -> None:
    name, options = PLAIN[case]
    model, x = make(name, options), images(options)
    export(tmp_path / "best", model, Recipe(model=name), options)
    with torch.no_grad():
        expected = model(x)
        by_folder = from_folder(tmp_path / "best")
        assert torch.equal(by_folder(x), expected)
        by_name = timm.create_model(name.partition(".")[0], num_classes=5, **options).eval()
        by_name.load_state_dict(load_file(tmp_path / "best" / "model.safetensors"))
        assert torch.equal(by_name(x), expected)
    config = by_folder.pretrained_cfg
    assert config["label_names"] == list(CLASSES)
    assert tuple(config["mean"]) == (0.25,) * len(config["mean"])
    assert list(config["input_size"]) == [x.shape[1], SIDE, SIDE]


def test_another_head_and_size_for_fine_tuning(tmp_path) -> None:
    model = make("vit_tiny_patch16_224", VIT)
    export(tmp_path / "best", model, Recipe(model="vit_tiny_patch16_224"), VIT)
    state = load_file(tmp_path / "best" / "model.safetensors")
    config = json.loads((tmp_path / "best" / "config.json").read_text())["pretrained_cfg"] | {
        "state_dict": state
    }
    tuned = timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=True,
        pretrained_cfg=config,
        **{**VIT, "num_classes": 7, "img_size": 64},
    )
    assert tuned.head.weight.shape[0] == 7
    assert torch.equal(tuned.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize("case", ["vit", "vit, grey"])
def test_the_card_loads_an_unedited_model(tmp_path, monkeypatch, case) -> None:
    name, options = PLAIN[case]
    model = make(name, options)
    export(tmp_path, model, Recipe(model=name), options)
    expected = model(images(options))
    *loaded, predicted = run_card(tmp_path, monkeypatch, options)
    assert len({id(names["model"]) for names in loaded}) == (2 if LOADS_FOLDERS else 1)
    for names in loaded:
        assert torch.equal(names["model"](images(options)), expected)
    assert predicted["image"].shape == (options.get("in_chans", 3), SIDE, SIDE)
    assert 0 <= predicted["label"] < 5


@pytest.mark.parametrize("case", ["vit", "vit, grey"])
def test_the_card_reads_16_bits_as_training_does(tmp_path, monkeypatch, case) -> None:
    name, options = PLAIN[case]
    channels = options.get("in_chans", 3)
    export(tmp_path, make(name, options), Recipe(model=name), options)
    values = np.random.default_rng(0).integers(0, 2**16, (SIDE, SIDE), dtype=np.uint16)
    image = run_card(tmp_path, monkeypatch, options, Image.fromarray(values))[-1]["image"]
    picture = decode(tmp_path / "picture.png", "L" if channels == 1 else "RGB", any_depth=False)
    expected = torch.from_numpy(np.array(picture).reshape(SIDE, SIDE, channels)).permute(2, 0, 1) / 255
    torch.testing.assert_close(image, (expected - 0.25) / 0.5)


def test_the_card_of_a_model_that_timm_has_not_alone(tmp_path, monkeypatch) -> None:
    options = {"dim": 16, "depth": 2}
    model = make("convmixer_256_8", options)
    export(tmp_path, model, Recipe(model="convmixer_256_8"), options)
    card = (tmp_path / "README.md").read_text()
    assert "wellposed's `convmixer_256_8`" in card
    assert "local-dir" not in card
    assert "import timm\nimport wellposed\n" in card
    loaded = run_card(tmp_path, monkeypatch, options)[0]["model"]
    assert torch.equal(loaded(images(options)), model(images(options)))


@pytest.mark.parametrize("case", EDITED)
def test_the_card_loads_an_edited_model(tmp_path, monkeypatch, case) -> None:
    recipe, edit = EDITED[case]
    model = make(recipe.model, VIT)
    before = model(images(VIT))
    edit(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("scale"):
                parameter.uniform_(0.2, 0.8)
    expected = model(images(VIT))
    assert not torch.allclose(before, expected, atol=1e-3)
    export(tmp_path, model, recipe, VIT)
    loaded = run_card(tmp_path, monkeypatch, VIT)[-1]["model"]
    assert torch.equal(loaded(images(VIT)), expected)
    assert wp.edits(loaded) == wp.edits(model)
    card = (tmp_path / "README.md").read_text()
    assert "another function" in card


def test_what_the_card_says_about_cb_s_is_true(tmp_path) -> None:
    recipe, edit = EDITED["everything"]
    model = make(recipe.model, VIT)
    edit(model)
    export(tmp_path, model, recipe, VIT)
    assert "strict=False" in (tmp_path / "README.md").read_text()
    state = load_file(tmp_path / "model.safetensors")
    missing, unexpected = make(recipe.model, VIT).load_state_dict(state, strict=False)
    assert (missing, len(unexpected)) == ([], 3)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        from_folder(tmp_path)


def test_what_the_card_says(tmp_path) -> None:
    recipe = Recipe(
        model="vit_tiny_patch16_224",
        data="wds:https://me:pw@host/a.tar",
        lr=0.003,
        mixup=0.8,
        epochs=7,
        seed=3,
    )
    export(tmp_path, make(recipe.model, VIT), recipe, VIT, note="They are an average.")
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: timm\n")
    for part in (
        "**Test accuracy: 95.12%** on 10,000 test images. This is one run (seed 3)",
        "(50,000 training images) for 7 epochs",
        "after update 1,234. They are an average.",
        "| lr | 0.003 |",
        "| mixup | 0.8 |",
        "minus the mean (0.25, 0.25, 0.25)",
        "1: one \\| two, 2: three four, 3: ä",
        "wellposed train recipe.toml",
        "Python 3.11.7, torch 2.11, 1 process on a CPU",
    ):
        assert part in card, part
    assert "license" not in card
    for file in tmp_path.glob("*.[jmt]*"):
        assert "pw@" not in file.read_bytes().decode(errors="replace")
    again = combine(read_recipe(tmp_path / "recipe.toml"), {})
    assert (again.lr, again.mixup, again.data) == (0.003, 0.8, "wds:https://[hidden]@host/a.tar")


def test_an_encoder_without_a_head(tmp_path, monkeypatch) -> None:
    options = {**VIT, "num_classes": 0}
    model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    recipe = Recipe(model="vit_tiny_patch16_224", task="mae")
    export(tmp_path, model, recipe, options, classes=(), accuracy=None)
    *_, last = run_card(tmp_path, monkeypatch, options)
    assert torch.equal(last["model"](images(options)), model(images(options)))
    assert last["features"].shape == (1, 32)
    card = (tmp_path / "README.md").read_text()
    assert "no test accuracy" in card
    assert "without labels" in card


def test_many_classes_are_in_the_configuration(tmp_path) -> None:
    options = {**VIT, "num_classes": 100}
    model = timm.create_model("vit_tiny_patch16_224", **options)
    export(
        tmp_path, model, Recipe(model="vit_tiny_patch16_224"), options, classes=[f"c{i}" for i in range(100)]
    )
    assert "29: c29 and 70 more" in (tmp_path / "README.md").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["label_names"][99] == "c99"


def test_options_that_no_file_can_hold(tmp_path) -> None:
    model = make("vit_tiny_patch16_224", VIT)
    with pytest.raises(ValueError, match="options for timm that JSON can hold"):
        export(tmp_path / "best", model, Recipe(), {**VIT, "norm_layer": torch.nn.LayerNorm})
    assert not (tmp_path / "best").exists()


def can_exchange(folder) -> bool:
    """Whether the system can swap two folders at once."""
    one, other = folder / "one", folder / "other"
    one.mkdir()
    other.mkdir()
    return folder_swap._exchange(one, other)


class KilledError(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


@pytest.mark.parametrize("wanted", [True, False], ids=["exchange", "two renames"])
def test_a_kill_after_any_step_leaves_old_or_new_weights_whole(tmp_path, monkeypatch, wanted) -> None:
    exchanges = wanted and can_exchange(tmp_path)
    if not exchanges:
        monkeypatch.setattr(folder_swap, "_exchange", lambda one, other: False)
    old, new = (make("vit_tiny_patch16_224", VIT, seed) for seed in (0, 1))
    recipe = Recipe(model="vit_tiny_patch16_224")
    steps = ("write_tensors", "write_bytes", "sync_folder", "rename", "discard")
    whole = []
    for kill_at in range(20):
        folder = tmp_path / str(kill_at) / "best"
        export(folder, old, recipe, VIT, update=1)
        done = 0

        def step(original, kill_at=kill_at):
            def run(*arguments):
                nonlocal done
                if done == kill_at:
                    raise KilledError
                done += 1
                return original(*arguments)

            return run

        with monkeypatch.context() as patch:
            for name in steps:
                patch.setattr(durable, name, step(getattr(durable, name)))
            with contextlib.suppress(KilledError):
                export(folder, new, recipe, VIT, update=2)
        if done < kill_at:
            break
        if exchanges:
            assert folder.exists(), "never away, not even before anything is cleared up"
        folder_swap.recover(folder)
        assert os.listdir(folder.parent) == ["best"]
        update = json.loads((folder / "config.json").read_text())["wellposed"]["update"]
        expected = old if update == 1 else new
        state = load_file(folder / "model.safetensors")
        assert all(torch.equal(state[key], value) for key, value in expected.state_dict().items())
        whole.append(update)
    assert whole == sorted(whole)
    assert set(whole) == {1, 2}
    assert len(whole) >= 7


def test_two_folders_swap_or_stay(tmp_path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / folder.name).touch()
    swapped = folder_swap._exchange(one, other)
    inside = [path.name for folder in (one, other) for path in folder.iterdir()]
    assert inside == (["other", "one"] if swapped else ["one", "other"])
    assert not folder_swap._exchange(one, tmp_path / "none")


def test_a_full_disk_leaves_the_old_weights(tmp_path, monkeypatch) -> None:
    model = make("vit_tiny_patch16_224", VIT)
    export(tmp_path / "best", model, Recipe(), VIT, update=1)

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        export(tmp_path / "best", model, Recipe(), VIT, update=2)
    assert json.loads((tmp_path / "best" / "config.json").read_text())["wellposed"]["update"] == 1
    assert os.listdir(tmp_path) == ["best"]


def test_names_in_the_card_are_text(tmp_path) -> None:
    """Names of classes and data are somebody else's."""
    hostile = "[x](http://y) <img src=z>`|\n# *b*"
    recipe = Recipe(model="vit_tiny_patch16_224", data=f"wds:{hostile}")
    export(tmp_path, make(recipe.model, VIT), recipe, VIT, classes=(hostile, "b"))
    card = (tmp_path / "README.md").read_text()
    text = re.sub(r"(`+)[^`].*?\1", "", card.replace("\\`", ""))  # without code
    assert "<img" not in text
    assert "\n# *b*" not in card
    assert "[x](" not in text.replace("\\[x\\](", "")
    assert r"0: \[x\](http://y) &lt;img src=z&gt;\`\| # \*b\*, 1: b" in card
