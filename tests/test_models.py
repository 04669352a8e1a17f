"""Models by name: seeded, described, and with weights from files that cannot run code."""

import argparse
import json
import pickle
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from wellposed.models import build, describe_weights, load_weights
from wellposed.train import Recipe
from wellposed.train.model import build_model, start_from

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
TV = {"image_size": 32, "num_classes": 5}
HF = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A transformers model with its weights."""
    path = tmp_path / "vit"
    transformers.ViTForImageClassification(transformers.ViTConfig(**HF)).save_pretrained(path)
    return path


@pytest.fixture
def only_config(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    return folder


def tiny(**options: Any) -> nn.Module:
    return build("vit_tiny_patch16_224", **{**TINY, **options})


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)


# Building


def test_random_weights_follow_the_seed_alone(only_config):
    for name, options in (
        ("vit_tiny_patch16_224", TINY),
        ("tv:vit_b_32", TV),
        (f"hf:{only_config}", {"num_labels": 3}),
    ):
        before = states()
        model = build(name, **options)
        assert states() == before
        torch.rand(3)
        assert same(model, build(name, **options))
        assert not same(model, build(name, seed=1, **options))
        assert not model.training
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert describe_weights(model) == "random weights (seed 0)"
        with torch.no_grad():
            model(torch.randn(1, 3, 32, 32))


def test_a_default_device_does_not_change_the_weights():
    torch.set_default_device("meta")
    try:
        model = tiny()
    finally:
        torch.set_default_device(None)
    assert same(model, tiny())


def test_options_reach_the_library(only_config):
    assert tiny(num_classes=7).head.out_features == 7
    assert build("tv:vit_b_32", **TV).image_size == 32
    assert build(f"hf:{only_config}", num_hidden_layers=1).config.num_hidden_layers == 1
    with pytest.raises(TypeError, match="ViTConfig has no option num_blocks"):
        build(f"hf:{only_config}", num_blocks=1)


def test_names_with_a_tag():
    model = build("vit_tiny_patch16_224.augreg_in21k", **TINY)
    assert model.pretrained_cfg["tag"] == "augreg_in21k"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_tiny_patch16_22", "timm has no model 'vit_tiny_patch16_22'; did you mean vit_tiny_patch16_224"),
        ("vit_tiny_patch16_224.nowhere", "did you mean vit_tiny_patch16_224"),
        ("qqqqqqqq", r"timm has no model 'qqqqqqqq'; timm.list_models\(\) lists all"),
        ("tv:vit_b_17", "torchvision has no model 'vit_b_17'; did you mean vit_b_16"),
        ("keras:vit", r"expected a name of timm, hf-hub:NAME or local-dir:FOLDER"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(ValueError, match=message):
        build(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pretrained": True, "weights": "a.safetensors"}, "weights= or pretrained=True, got both"),
        ({"checkpoint_path": "a.pth"}, "checkpoint_path= is no option.*weights= takes a file that is safe"),
        ({"pretrained_cfg_overlay": {"file": "evil.pth"}}, "pretrained_cfg_overlay= is no option"),
        ({"pretrained_cfg": {"url": "http://there/evil.pth"}}, "pretrained_cfg= is no option"),
        ({"cache_dir": "somewhere"}, "cache_dir= is no option.*HF_HOME"),
        ({"any": {"deep": ["evil.PTH"]}}, r"got any.deep='evil.PTH', which names a file or an address"),
        ({"attn_implementation": "someone/kernel"}, "got attn_implementation='someone/kernel', which names"),
        ({"device": "cuda"}, "device= is no option of build.*use .to"),
    ],
)
def test_options_that_do_not_go(options, message):
    with pytest.raises(ValueError, match=message):
        build("vit_tiny_patch16_224", **options)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("it-ran"),)


@pytest.mark.parametrize("option", ["pretrained_cfg", "pretrained_cfg_overlay"])
def test_a_recipe_cannot_make_timm_load_a_file(option, tmp_path, monkeypatch):
    """Timm up to 1.0.25 unpickles the file that these options name, with all the code in it."""
    monkeypatch.chdir(tmp_path)
    torch.save(Evil(), "evil.pth")
    loaded = []
    monkeypatch.setattr("timm.models._builder.load_state_dict", lambda path, *_, **__: loaded.append(path))
    given = Recipe(
        model="vit_tiny_patch16_224", pretrained=True, model_options={option: {"file": "evil.pth"}}
    )
    with pytest.raises(ValueError, match=f"{option}= is no option of build: it can name what to load"):
        build_model(given, 10, 3)
    assert not loaded
    assert not Path("it-ran").exists()


@pytest.mark.parametrize(
    ("library", "name", "install"),
    [
        ("transformers", "hf:google/vit", r"pip install 'wellposed\[transformers\]'"),
        ("torchvision.models", "tv:vit_b_16", "pip install torchvision"),
    ],
)
def test_a_missing_library(library, name, install, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=f"is not installed; install it with: {install}"):
        build(name)


# Pretrained weights, without a network


def test_pretrained_weights_are_described_and_unreachable_ones_explained(monkeypatch):
    model = timm.create_model("vit_tiny_patch16_224", **TINY)
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: model if pretrained else None)
    built = build("vit_tiny_patch16_224", pretrained=True)
    assert describe_weights(built) == "timm's pretrained weights (augreg_in21k_ft_in1k)"

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(timm, "create_model", unreachable)
    with pytest.raises(OSError, match=r"timm's weights of vit_tiny.*\(no route to host\); without a network"):
        build("vit_tiny_patch16_224", pretrained=True)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", unreachable)
    with pytest.raises(OSError, match=r"torchvision's weights of vit_b_16 \(no route"):
        build("tv:vit_b_16", pretrained=True)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(OSError, match=r"the model google/vit \(no route"):
        build("hf:google/vit")


def test_torchvision_weights_are_read_without_unpickling(monkeypatch):
    asked = {}

    def fetch(url: str, **options: Any) -> dict[str, Any]:
        asked.update(options)
        return torchvision.models.vit_b_32().state_dict()

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetch)
    built = build("tv:vit_b_32", pretrained=True)
    assert asked["weights_only"] is True
    assert describe_weights(built) == "torchvision's pretrained weights"
    with pytest.raises(ValueError, match=r"do not fit these options.*heads\.head\.weight"):
        build("tv:vit_b_32", pretrained=True, num_classes=3)


# Folders of transformers


def test_a_folder_with_weights_loads_them(folder):
    model = build(f"hf:{folder}")
    assert type(model) is transformers.ViTForImageClassification
    assert same(model, transformers.ViTForImageClassification.from_pretrained(folder))
    assert describe_weights(model) == f"weights from {folder}"
    assert not model.training


def test_the_file_in_a_folder_is_a_file_of_weights_too(folder, tmp_path):
    """Though its names are those of older versions of transformers."""
    file = (folder / "model.safetensors").rename(tmp_path / "moved.safetensors")
    source = build(f"hf:{folder}", weights=file)
    shutil.copy(file, folder / "model.safetensors")
    assert same(source, build(f"hf:{folder}"))

    state = load_file(file)
    (query,) = [name for name in state if name.endswith("0.attention.attention.query.bias")]
    del state[query]
    state |= {"extra": torch.zeros(1), "classifier.bias": torch.zeros(9)}
    save_file(state, file)
    model = build(f"hf:{folder}")
    before = states()
    with pytest.raises(ValueError, match="do not fit ViTForImageClassification") as caught:
        load_weights(model, file)
    assert states() == before
    assert same(model, source)
    assert re.search(r"1 missing \(vit\..*\); 1 unexpected \(extra\); 1 of another shape", str(caught.value))
    assert "classifier.bias: (9,) in the file, (5,) in the model" in str(caught.value)


def test_the_architecture_is_that_of_the_configuration_if_transformers_has_it(only_config):
    for named, want in (
        (["ViTForMaskedImageModeling"], transformers.ViTForMaskedImageModeling),
        (["ViTOfOnesOwn"], transformers.ViTModel),
        (["pipeline"], transformers.ViTModel),  # something else of that name
        (["BeitModel"], transformers.ViTModel),  # of another configuration
        (None, transformers.ViTModel),
    ):
        config = json.loads((only_config / "config.json").read_text())
        (only_config / "config.json").write_text(json.dumps(config | {"architectures": named}))
        assert type(build(f"hf:{only_config}")) is want


def test_tensors_that_a_folder_lacks_are_named(folder):
    model = build(f"hf:{folder}", architectures=["ViTModel"])
    described = r"but 2 of \d+ tensors random, not in it \(pooler.dense.bias, pooler.dense.weight\)"
    assert re.fullmatch(f"weights from {folder}, {described}", describe_weights(model))
    assert same(model, build(f"hf:{folder}", architectures=["ViTModel"]))
    save_file({"other": torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"holds none of the \d+ tensors of ViTForImage"):
        build(f"hf:{folder}")


def test_folders_that_do_not_go(folder, tmp_path):
    with pytest.raises(ValueError, match=r"2 of another shape \(classifier.bias: \(5,\), not \(9,\)"):
        build(f"hf:{folder}", num_labels=9)
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere"):
        build(f"hf:{tmp_path / 'nowhere'}")
    with pytest.raises(FileNotFoundError, match=r"expected a config.json in"):
        build(f"hf:{tmp_path}")
    shutil.copytree(folder, tmp_path / "cut")
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[:-50])
    with pytest.raises(ValueError, match=r"cannot read those in .*cut.*copy them again"):
        build(f"hf:{tmp_path / 'cut'}")


def test_a_folder_without_safetensors(only_config):
    with pytest.raises(ValueError, match=r"there is no model.safetensors; leave pretrained out"):
        build(f"hf:{only_config}", pretrained=True)
    (only_config / "training_args.bin").write_bytes(b"")
    assert describe_weights(build(f"hf:{only_config}")) == "random weights (seed 0)"
    (only_config / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"(?s)got .*pytorch_model.bin: a pickle.*model.safetensors'"):
        build(f"hf:{only_config}")


# Files of weights


def test_weights_from_a_file(tmp_path):
    file = tmp_path / "w.safetensors"
    source = tiny(seed=3)
    save_file(source.state_dict(), file)
    model = tiny(weights=file)
    assert same(model, source)
    assert describe_weights(model) == f"weights from {file}"
    assert describe_weights(torch.compile(model)) == f"weights from {file}"
    assert describe_weights(nn.Linear(2, 2)) == "weights as they were given"


def test_weights_for_a_folder_of_transformers(only_config, tmp_path):
    (only_config / "pytorch_model.bin").write_bytes(b"")  # not asked for
    file = tmp_path / "w.safetensors"
    source = transformers.ViTForImageClassification(transformers.ViTConfig(**HF))
    save_file(source.state_dict(), file)
    assert same(build(f"hf:{only_config}", weights=file), source)


def test_weights_of_another_dtype_and_in_a_wrapper(tmp_path):
    source = tiny(seed=3)
    file = tmp_path / "half.safetensors"
    save_file({name: value.half() for name, value in source.state_dict().items()}, file)
    model = tiny()
    load_weights(nn.DataParallel(model), file)
    assert model.head.weight.dtype == torch.float32
    assert torch.equal(model.head.weight, source.head.weight.half().float())


def test_keys_that_do_not_fit_are_listed_and_nothing_is_loaded(tmp_path):
    state = tiny(seed=3, num_classes=9).state_dict()
    del state["cls_token"]
    state |= {f"extra.{i}": torch.zeros(1) for i in range(6)}
    save_file(state, tmp_path / "w.safetensors")
    model = tiny()
    with pytest.raises(ValueError, match="do not fit VisionTransformer") as caught:
        load_weights(model, tmp_path / "w.safetensors")
    message = str(caught.value)
    assert "1 missing (cls_token); " in message
    assert "6 unexpected (extra.0, extra.1, extra.2, extra.3, and 2 more); " in message
    assert "2 of another shape (head.weight: (9, 32) in the file, (5, 32) in the model, head.bias:" in message
    assert "Nothing was loaded" in message
    assert same(model, tiny())
    assert describe_weights(model) == "random weights (seed 0)"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)


@pytest.mark.parametrize("held", ["embedding.weight", "head.weight"])
def test_of_tied_parameters_one_is_enough(held, tmp_path):
    save_file({held: torch.full((4, 3), 7.0)}, tmp_path / "w.safetensors")
    model = Tied()
    load_weights(model, tmp_path / "w.safetensors")
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.unique().tolist() == [7]
    assert model.scratch.tolist() == [1, 1]
    save_file({held: torch.zeros(4, 3), "scratch": torch.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"1 unexpected \(scratch\)"):
        load_weights(model, tmp_path / "w.safetensors")


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("unpickled",))


@pytest.mark.parametrize("name", ["w.pth", "w.pt", "w.bin", "w.ckpt", "w"])
def test_pickles_are_refused_unread(name, tmp_path, capsys):
    (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="a pickle can run code") as caught:
        tiny(weights=tmp_path / name)
    assert "unpickled" not in capsys.readouterr().out
    assert "torch.load(" in str(caught.value)


class Own:
    """What a training script may put into its checkpoints, and unpickling may run."""


def test_the_refusal_tells_how_to_convert(tmp_path):
    source = tiny(seed=3)
    torch.save({"model": source.state_dict(), "config": Own()}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"got .*w.pth") as caught:
        tiny(weights=tmp_path / "w.pth")
    lines = [line.strip() for line in str(caught.value).splitlines() if line.startswith("    ")]
    assert len(lines) == 2
    assert "state['model'] or where else" in str(caught.value)
    exec(
        "\n".join([lines[0], "state = state['model']", lines[1]]),
        {"torch": torch, "safetensors": safetensors},
    )
    assert same(tiny(weights=tmp_path / "w.safetensors"), source)


@pytest.mark.parametrize(
    ("name", "wrapped", "taken"),
    [
        ("w.pth", lambda state: state, ""),
        ("w.pt", lambda state: {"model": state, "epoch": 3}, "its model"),
        (
            "w.pth.tar",
            lambda state: {"state_dict": state, "args": argparse.Namespace(lr=1.0), "optimizer": {}},
            "its state_dict",
        ),
        (
            "w.ckpt",
            lambda state: {"state_dict": {}, "state_dict_ema": {f"module.{k}": v for k, v in state.items()}},
            "its state_dict_ema, without the prefix module.",
        ),
        (
            "w.bin",
            lambda state: {"model_ema": {f"_orig_mod.module.{k}": v for k, v in state.items()}, "model": {}},
            "its model_ema, without the prefix _orig_mod., without the prefix module.",
        ),
    ],
)
def test_checkpoints_of_tensors_are_loaded_and_it_is_said_what_was_taken(name, wrapped, taken, tmp_path):
    source = tiny(seed=3)
    torch.save(wrapped(source.state_dict()), tmp_path / name)
    model = tiny(weights=tmp_path / name)
    assert same(model, source)
    said = f"weights from {tmp_path / name}" + (f" ({taken})" if taken else "")
    assert describe_weights(model) == said
    fresh = tiny(seed=4)
    assert start_from(fresh, tmp_path / name)[0].startswith(f"W{said[1:]}: ")
    assert same(fresh, source)


def test_a_checkpoint_without_weights_names_what_it_holds(tmp_path):
    torch.save({"teacher": {"a": torch.zeros(1)}, "epoch": 1}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"or under state_dict_ema.*got the keys teacher, epoch; save the"):
        tiny(weights=tmp_path / "w.pth")


def test_a_folder_of_transformers_with_a_pickle_alone(folder):
    source = build(f"hf:{folder}")
    torch.save(source.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    model = build(f"hf:{folder}", pretrained=True)
    assert same(model, source)
    assert describe_weights(model) == f"weights from {folder / 'pytorch_model.bin'}"


@pytest.mark.parametrize("content", [b"", b"abc", pickle.dumps(Trap()), b"\x10" + bytes(200)])
def test_corrupt_files(content, tmp_path):
    file = tmp_path / "w.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot read those in .*w.safetensors"):
        load_weights(tiny(), file)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*w.safetensors"):
        load_weights(tiny(), tmp_path / "w.safetensors")


@pytest.fixture
def timm_folder(tmp_path):
    """As timm's push_to_hf_hub writes it, and as the one who wants to run code would."""
    source = tiny(seed=3)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    save_file(source.state_dict(), folder / "model.safetensors")
    torch.save(Evil(), folder / "evil.pth")
    evil = {"file": str(folder / "evil.pth"), "url": "http://there/evil.pth", "custom_load": True}
    facts = {"mean": [0.1, 0.2, 0.3], "num_classes": 5, "classifier": "head", "hf_hub_filename": "evil.pth"}
    config = {
        "architecture": "vit_tiny_patch16_224",
        "model_args": {name: value for name, value in TINY.items() if name != "num_classes"},
        "pretrained_cfg": {**facts, **evil},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return source, folder


def test_a_folder_of_timm(timm_folder, monkeypatch):
    source, folder = timm_folder
    monkeypatch.chdir(folder)
    model = build(f"local-dir:{folder}")
    assert same(model, source)
    assert describe_weights(model) == f"weights from {folder / 'model.safetensors'}"
    assert model.pretrained_cfg["mean"] == [0.1, 0.2, 0.3]
    assert not {"file", "url", "state_dict"} & {key for key, value in model.pretrained_cfg.items() if value}
    assert build(f"local-dir:{folder}", num_classes=3).head.out_features == 3
    assert not same(build(f"local-dir:{folder}", pretrained=False), source)
    assert not Path("it-ran").exists()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_args": {"pretrained_cfg": "x"}}))
    with pytest.raises(ValueError, match="pretrained_cfg= is no option"):
        build(f"local-dir:{folder}")
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"expected a JSON object in .*config.json"):
        build(f"local-dir:{folder}")


def test_a_model_of_timm_on_the_hub(timm_folder, monkeypatch):
    source, folder = timm_folder
    asked = []

    def download(repository, file, revision):
        asked.append((repository, file, revision))
        return str(folder / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert not same(build("hf-hub:me/vit"), source)
    assert asked == [("me/vit", "config.json", None)]
    model = build("hf-hub:me/vit@v2", pretrained=True)
    assert same(model, source)
    assert asked[1:] == [("me/vit", "config.json", "v2"), ("me/vit", "model.safetensors", "v2")]
    assert describe_weights(model) == "weights from hf-hub:me/vit@v2/model.safetensors"

    def unreachable(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    with pytest.raises(OSError, match=r"timm's model me/vit \(no route to host\)"):
        build("hf-hub:me/vit")
