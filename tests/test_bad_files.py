"""Damaged files, and those made to do harm, end in a sentence that names them: no hang, no gigabytes."""

import gzip
import io
import json
import os
import resource
import struct
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
from PIL import Image

import report_material as make
from short_runs import recipe
from wellposed.errors import WorkerDiedError
from wellposed.files import DEEPEST, parse_json, parse_toml, read_bytes, write_cells, write_text
from wellposed.models import build
from wellposed.probes.diagnosis import Diagnosis
from wellposed.probes.images import image_batches
from wellposed.records import Record, write_csv
from wellposed.report import read_data, read_material, report_page
from wellposed.run_records import read_run
from wellposed.text import indices
from wellposed.train import Recipe, open_run
from wellposed.train import checkpoint as manifest
from wellposed.train.batches import read_by
from wellposed.train.checkpoint import Store
from wellposed.train.data import open_data
from wellposed.train.fitting import open_folder
from wellposed.train.recipe import read_recipe

DEEP = "[" * 200_000 + "]" * 200_000


@pytest.fixture(autouse=True)
def little() -> Iterator[None]:
    """Neither seconds nor gigabytes."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    yield
    assert time.monotonic() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


@pytest.mark.parametrize("parse", [parse_json, lambda text: parse_toml(f"a = {text}")])
def test_what_is_nested_too_deeply(parse: Any) -> None:
    assert parse("[" * 20 + "]" * 20)
    for depth in (DEEPEST + 1, 500, 200_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse("[" * depth + "]" * depth)


def test_a_pipe_and_a_file_that_is_too_large_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_bytes(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="more than the 268,435,456 bytes"):
        read_bytes(tmp_path / "large")


def test_a_kill_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.html"
    write_text(path, "old")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new, and longer")
    assert [each.name for each in tmp_path.iterdir()] == ["a.html"]
    assert path.read_text() == "old"


def test_a_formula_in_a_csv_cell_is_text(tmp_path: Path) -> None:
    """As in the files that the page saves."""
    write_csv([Record(measure="kappa", value=-1.0, module="=1+1", note="@a,b")], tmp_path / "r.csv")
    cells = (tmp_path / "r.csv").read_text().splitlines()[1]
    assert cells.startswith("kappa,-1.0,,'=1+1,")
    assert '"\'@a,b"' in cells
    write_cells(tmp_path / "n.csv", [["-1e-3", None, "+1.5", "-x"]])
    assert (tmp_path / "n.csv").read_bytes() == b"-1e-3,,+1.5,'-x\r\n"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("deep.toml", f"model_options = {{a = {DEEP}}}", "not valid TOML: it is nested too deeply"),
        ("recipe.yaml", "epochs: 3", "write NAME = VALUE for NAME: VALUE"),
        ("large.toml", "# " + "x" * 2**23, "cannot be read: it has more than"),
    ],
)
def test_recipes(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name}.*{said}"):
        read_recipe(tmp_path / name)


@pytest.mark.parametrize("text", ["0-9999999999", "0-99999,0-99999", "9" * 5000, "0-" + "9" * 5000])
def test_ranges_of_blocks(text: str) -> None:
    with pytest.raises(ValueError, match="blocks must be"):
        indices(text)


@pytest.mark.parametrize("names", ["a-{0..9999999999}.tar", "a-{0..9999}{0..9999}{0..9999}.tar"])
def test_ranges_of_shards(names: str) -> None:
    with pytest.raises(ValueError, match="expected at most 100,000 shards, got the pattern 'a-"):
        open_data(f"wds:{names}", holdout=0.1, seed=0)


@pytest.mark.parametrize("seed", [2**63, 2**64, -1])
def test_seeds(seed: int) -> None:
    with pytest.raises(ValueError, match="seed must be at least 0 and below 2"):
        Recipe(seed=seed)
    with pytest.raises(ValueError, match="seed must be at least 0 and below 2"):
        build("test_vit", seed=seed)


# Images


def folder_of_images(folder: Path) -> Path:
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (16, 16), (number, 0, 0)).save(folder / name / f"{number}.png")
    return folder


def a_line(path: Path) -> str:
    Image.new("RGB", (60_000, 1)).save(path)
    return "one side is more than 100 times as long as the other, 60000 x 1"


def a_pipe(path: Path) -> str:
    os.mkfifo(path)
    return "it is not a regular file"


@pytest.mark.parametrize("made", [a_line, a_pipe])
def test_images_to_train_on_and_to_diagnose(tmp_path: Path, made: Any) -> None:
    folder = folder_of_images(tmp_path / "set")
    said = made(folder / "cat" / "bad.png")
    with pytest.raises(ValueError, match=f"bad.png: {said}"):
        open_data(str(folder), holdout=0.3, seed=0)
    batches = image_batches([folder / "cat" / name for name in ("0.png", "bad.png")], build("test_vit"))
    assert [len(batch) for batch in batches] == [1]
    assert said in batches.unreadable[0][1]


# Sets in one file


def npz(path: Path, compression: int = zipfile.ZIP_STORED, **arrays: Any) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in arrays.items():
            archive.writestr(f"{name}.npy", content)


def npy(array: Any, shape: tuple[int, ...] | None = None) -> bytes:
    """Of numpy's format, with a header that may lie about the shape."""
    file, array = io.BytesIO(), np.asarray(array)
    values = {"descr": array.dtype.str, "fortran_order": False, "shape": shape or array.shape}
    np.lib.format.write_array_header_1_0(file, values)
    return file.getvalue() + array.tobytes()


GOOD = {"classes": npy(["a", "b"]), "train_bytes": npy(np.zeros(8, np.uint8)), "train_labels": npy([0, 1])}
GOOD["train_offsets"] = npy([0, 4, 8])


@pytest.mark.parametrize(
    ("changed", "compression", "said"),
    [
        ({"train_bytes": npy(np.zeros(8, np.uint8), (10**13,))}, zipfile.ZIP_STORED, "must have 10,000,000"),
        ({"train_offsets": npy([0, 4, 8], (10**13,))}, zipfile.ZIP_STORED, "train_offsets must have"),
        ({"train_bytes": npy(np.zeros(2**28, np.uint8))}, zipfile.ZIP_DEFLATED, "would unpack from"),
        ({"classes": b"nonsense"}, zipfile.ZIP_STORED, "magic"),
    ],
)
def test_packed_sets(tmp_path: Path, changed: dict[str, bytes], compression: int, said: str) -> None:
    npz(tmp_path / "set.npz", compression, **GOOD | changed)
    with pytest.raises(ValueError, match=rf"set\.npz cannot be read as a packed set: .*{said}"):
        open_data(f"packed:{tmp_path / 'set.npz'}", holdout=0.1, seed=0)


def test_a_packed_set_of_an_unknown_compression(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    npz(path, **GOOD)
    content = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        place = content.find(mark)
        while place >= 0:
            content[place + offset : place + offset + 2] = struct.pack("<H", 77)
            place = content.find(mark, place + 1)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"set\.npz cannot be read as a packed set"):
        open_data(f"packed:{path}", holdout=0.1, seed=0)


def test_an_idx_file_that_unpacks_to_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchvision unpacks no archive whose MD5 sum is not the original's."""

    def no_network(*_: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", no_network)
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    with gzip.open(raw / "train-images-idx3-ubyte.gz", "wb") as file:
        for _ in range(300):
            file.write(bytes(2**20))
    for spec in (f"fashion-mnist:{tmp_path}", f"torchvision:FashionMNIST:{tmp_path}"):
        with pytest.raises(ValueError, match=f"torchvision cannot open FashionMNIST in {tmp_path}: "):
            open_data(spec, holdout=0.1, seed=0)
    assert [path.name for path in raw.iterdir()] == ["train-images-idx3-ubyte.gz"]


def test_a_tar_with_a_giant_header(tmp_path: Path) -> None:
    """The file is sparse: as much as the header says could be read."""
    member = tarfile.TarInfo("pax")
    member.type, member.size = tarfile.XHDTYPE, 2**32
    with (tmp_path / "train.tar").open("wb") as file:
        file.write(member.tobuf())
        file.truncate(2**32 + 2**20)
    with pytest.raises(ValueError, match=r"train\.tar is cut, damaged or no plain tar.*4,294,967,296"):
        open_data(f"wds:{tmp_path / 'train.tar'}", holdout=0.1, seed=0)


def test_a_worker_that_was_killed() -> None:
    def dies() -> Iterator[int]:
        yield 1
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.\nand more")

    read = read_by(dies())
    assert next(read) == 1
    with pytest.raises(WorkerDiedError, match=r"\(DataLoader worker \(pid 7\).*resumes from the last"):
        next(read)


# What a run has written


def test_a_manifest_that_is_nested_deeply_is_passed_over(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    store.save(1, {}, {"a": 1})
    store.save(2, {}, {"a": 2})
    (tmp_path / "update-00000002" / manifest.MANIFEST).write_text(DEEP)
    newest = store.newest()
    assert newest is not None
    assert newest.update == 1
    assert "nested too deeply" in store.passed_over[0]


OTHER_TYPES = ["[]", "5", "null", '"text"', "{}", '{"test": [1]}', DEEP, '{"pretrained_cfg": 5}']


@pytest.mark.parametrize("text", OTHER_TYPES)
def test_config_and_result_of_other_types(tmp_path: Path, text: str) -> None:
    open_folder(tmp_path, recipe(), overwrite=False)
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        open_run(tmp_path)
    good = {"pretrained_cfg": {"num_classes": 10, "input_size": [1, 8, 8]}}
    (tmp_path / "last" / "config.json").write_text(json.dumps(good))
    (tmp_path / "result.json").write_text(text.replace("pretrained_cfg", "about"))
    with pytest.raises(ValueError, match=r"result\.json"):
        open_run(tmp_path)


@pytest.mark.parametrize("text", OTHER_TYPES)
@pytest.mark.parametrize("name", ["environment.json", "result.json", "diagnosis.json"])
def test_a_page_names_files_of_other_types(tmp_path: Path, name: str, text: str) -> None:
    make.write_run(tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    assert "training" in read_data(report_page(read_material([tmp_path / "run"])))


@pytest.mark.parametrize(
    "record",
    [{"value": "x"}, {"value": 1, "samples": ["x"]}, {"value": 1, "block": {}}, {"value": 1, "status": "?"}],
)
def test_a_diagnosis_of_other_types(tmp_path: Path, record: dict[str, Any]) -> None:
    path = tmp_path / "diagnosis.json"
    path.write_text(json.dumps({"about": {}, "records": [{"measure": "kappa", **record}]}))
    with pytest.raises(ValueError, match="a record has other values as its"):
        Diagnosis.from_json(path)
    with pytest.raises(ValueError, match=r"diagnosis\.json: expected a diagnosis as JSON"):
        read_material([path])


def test_a_line_of_a_run_that_is_nested_deeply_is_torn(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text(f'{{"event": "start"}}\n{{"event": {DEEP}}}\n')
    assert [line["event"] for line in read_run(tmp_path)] == ["start", "torn"]
