"""Checkpoints come back bit for bit; damaged ones are named and passed over; nothing is unpickled."""

import json
import os
import pickle
import shutil
import stat
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wellposed.train import checkpoint as manifest
from wellposed.train.checkpoint import Store

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def tensors(update: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(update)
    weights = {
        "a": torch.randn(3, 4, generator=generator),
        "b": torch.tensor(update),
    }
    return {"model": weights, "optimizer": {"a/exp_avg": torch.randn(3, 4, generator=generator)}}


def save(store: Store, update: int) -> Path:
    return store.save(update, tensors(update), {"update": update, "betas": (0.9, 0.999)})


def check(checkpoint, update: int) -> None:
    assert checkpoint.update == update
    assert checkpoint.state == {"update": update, "betas": (0.9, 0.999)}
    for stem, expected in tensors(update).items():
        got = checkpoint.tensors(stem)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value)


def test_a_new_folder_has_none(tmp_path: Path) -> None:
    store = Store(tmp_path / "not there")
    assert store.newest() is None
    assert store.passed_over == []


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_tensors_of_all_kinds_come_back_bit_for_bit(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    not_numbers = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    not_numbers.view(torch.int32)[0] = 0x7FC12345  # a NaN with a payload
    given = {
        "bool": torch.tensor([True, False, True]),
        "int64": torch.tensor([-(2**63), 2**63 - 1]),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "bfloat16": torch.randn(7).bfloat16(),
        "float16": torch.randn(7).half(),
        "float64": torch.randn(2, 2, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "scalar int": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "transposed": base.t(),
        "every other": base[:, ::2],
        "expanded": torch.tensor([1.0]).expand(3),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "shared one": base,
        "shared two": base,
        "overlap": base[1:3],
        "not numbers": not_numbers,
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "a name with / and ü": torch.zeros(1),
    }
    store = Store(tmp_path)
    store.save(0, {"model": given, "nothing": {}}, {})
    newest = store.newest()
    got = newest.tensors("model")
    assert got.keys() == given.keys()
    for name, value in given.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
        assert bits(got[name]) == bits(value.detach()), name
    assert newest.tensors("nothing") == {}
    with pytest.raises(ValueError, match="holds model, nothing, not 'ema'"):
        newest.tensors("ema")


def test_loaded_tensors_outlive_their_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = save(store, 1)
    got = store.newest().tensors("model")["a"]
    (path / "model.safetensors").write_bytes(bytes(8))
    assert torch.equal(got, tensors(1)["model"]["a"])


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_so_many_are_kept_and_no_more(tmp_path: Path, keep: int) -> None:
    store = Store(tmp_path, keep)
    for update in (5, 10, 99_999_999, 100_000_000, 100_000_001):
        save(store, update)
        check(store.newest(), update)
    expected = [
        "update-00000005",
        "update-00000010",
        "update-99999999",
        "update-100000000",
        "update-100000001",
    ]
    assert sorted(os.listdir(tmp_path)) == sorted(expected[-keep:])


def test_the_files_are_those_of_any_other_program(tmp_path: Path) -> None:
    path = save(Store(tmp_path), 1)
    assert sorted(os.listdir(path)) == sorted(FILES)
    (tmp_path / "plain").touch()
    expected = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert {stat.S_IMODE((path / name).stat().st_mode) for name in FILES} == {expected}


def test_the_same_update_again_replaces_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, 1)
    store.save(1, {"model": {"w": torch.ones(2)}}, {"again": True})
    assert os.listdir(tmp_path) == ["update-00000001"]
    newest = store.newest()
    assert newest.state == {"again": True}
    assert newest.stems == ("model",)


def test_a_whole_later_one_is_not_overrun(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, 20)
    with pytest.raises(
        ValueError, match=r"expected an update of at least 20, that of .*update-00000020, got 10"
    ):
        save(store, 10)
    assert os.listdir(tmp_path) == ["update-00000020"]


def test_a_damaged_later_one_gives_way(tmp_path: Path) -> None:
    """Else, with keep=1, the damaged one would be kept and the new one deleted."""
    store = Store(tmp_path, keep=1)
    save(store, 10)
    shutil.copytree(tmp_path / "update-00000010", tmp_path / "update-00000030")
    check(store.newest(), 10)
    save(store, 20)
    assert os.listdir(tmp_path) == ["update-00000020"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((-1, {}, {}), "update must be at least 0, got -1"),
        (
            (1, {"../model": {}}, {}),
            "expected names of letters, digits, - and _ for the files, got '../model'",
        ),
        ((1, {"model": {}}, {"when": object()}), r"state\['when'\] must be made of numbers"),
    ],
)
def test_wrong_arguments_write_nothing(tmp_path: Path, arguments: tuple, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        Store(tmp_path / "runs").save(*arguments)
    assert not (tmp_path / "runs").exists()


def test_keep_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Store(tmp_path, 0)


@pytest.fixture
def pair(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    save(store, 1)
    save(store, 2)
    return store


def passed_over(store: Store, name: str) -> None:
    """The older one is taken, and the damage in the newer one is named."""
    check(store.newest(), 1)
    (sentence,) = store.passed_over
    assert str(store.folder / "update-00000002") in sentence
    assert name in sentence


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(pair: Store, name: str) -> None:
    path = pair.folder / "update-00000002" / name
    content = path.read_bytes()
    for length in sorted({0, 1, 7, 8, len(content) // 2, len(content) - 1}):
        path.write_bytes(content[:length])
        passed_over(pair, name if name == "manifest.json" else f"{name} has {length} bytes")
    path.write_bytes(content + b"\n")
    passed_over(pair, name)
    path.write_bytes(content)
    check(pair.newest(), 2)
    assert pair.passed_over == []


@pytest.mark.parametrize("name", FILES)
def test_one_altered_byte_is_named(pair: Store, name: str) -> None:
    path = pair.folder / "update-00000002" / name
    content = path.read_bytes()
    places = range(len(content)) if name == "manifest.json" else range(0, len(content), 7)
    for place in places:
        for flip in (0x01, 0x20, 0x80) if name == "manifest.json" else (0x10,):
            altered = bytearray(content)
            altered[place] ^= flip
            path.write_bytes(altered)
            passed_over(pair, name)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(pair: Store, name: str) -> None:
    (pair.folder / "update-00000002" / name).unlink()
    passed_over(pair, f"{name} is missing")


@pytest.mark.parametrize("name", FILES)
def test_an_unreadable_file_is_named(pair: Store, name: str) -> None:
    path = pair.folder / "update-00000002" / name
    path.unlink()
    path.mkdir()
    passed_over(pair, name)


def rewritten(folder: Path, change) -> None:
    """A manifest that vouches for itself, changed."""
    content = json.loads((folder / "manifest.json").read_bytes())
    content.pop("sha256")
    change(content)
    (folder / "manifest.json").write_bytes(manifest._sealed(content))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content.update(version=2), "has format version 2, this release reads 1"),
        (lambda content: content.update(format="other"), "is not that of a wellposed checkpoint"),
        (lambda content: content.update(update=7), "is that of update 7"),
        (lambda content: content.pop("update"), "does not have the fields of version 1"),
        (lambda content: content.update(files=[]), "does not have the fields of version 1"),
        (lambda content: content["files"].pop("state.json"), "state.json is missing"),
        (
            lambda content: content["files"].update({"../update-00000001/state.json": {}}),
            "lists '../update-00000001/state.json', which is not a file in this folder",
        ),
    ],
)
def test_a_manifest_of_something_else_is_named(pair: Store, change, reason: str) -> None:
    rewritten(pair.folder / "update-00000002", change)
    passed_over(pair, reason)


def test_none_whole_is_not_none_there(pair: Store) -> None:
    for update in (1, 2):
        (pair.folder / f"update-0000000{update}" / "state.json").write_text("{}")
    assert pair.newest() is None
    assert len(pair.passed_over) == 2


def test_other_things_in_the_folder_are_left_alone(pair: Store) -> None:
    newer = pair.folder / "update-00000002"
    (newer / "notes.txt").write_text("mine")
    (pair.folder / "update-00000003").write_text("a file")
    for name in ("update-3", "best", ".staging", ".staging-mine"):
        (pair.folder / name).mkdir()
    check(pair.newest(), 2)
    assert pair.passed_over == []
    save(pair, 4)
    assert {"update-3", "best", ".staging", ".staging-mine", "update-00000003"} <= set(
        os.listdir(pair.folder)
    )
    check(pair.newest(), 4)


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.target),)


def test_a_pickle_is_refused_and_not_run(pair: Store, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    payload = pickle.dumps(Malicious(ran))
    newer = pair.folder / "update-00000002"
    for name in ("model.pt", "model.bin", "optimizer.pkl"):
        (newer / name).write_bytes(payload)
    check(pair.newest(), 2)

    (newer / "model.safetensors").write_bytes(payload)
    passed_over(pair, "model.safetensors")

    # The attacker writes a fitting manifest, too.
    (newer / "manifest.json").write_bytes(manifest.manifest_text(newer, FILES[:3], 2))
    passed_over(pair, "model.safetensors is not in the safetensors format")
    torch.save({"w": Malicious(ran)}, newer / "model.safetensors")
    (newer / "manifest.json").write_bytes(manifest.manifest_text(newer, FILES[:3], 2))
    passed_over(pair, "model.safetensors is not in the safetensors format")

    (newer / "state.json").write_bytes(payload)
    (newer / "manifest.json").write_bytes(manifest.manifest_text(newer, ["state.json"], 2))
    passed_over(pair, "state.json cannot be read")
    assert not ran.exists()
    pickle.loads(payload)  # the payload does work
    assert ran.exists()
