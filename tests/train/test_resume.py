"""An interrupted run ends bitwise equal to one that was not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from short_runs import assert_bitwise, run, signal_at, weights
from wellposed.run_records import read_run

TESTS = Path(__file__).parent.parent

# Everything that draws random numbers or keeps a state, at once.
EVERYTHING = {
    "mixup": 0.3,
    "cutmix": 1.0,
    "smoothing": 0.1,
    "erase": 0.3,
    "crop_padding": 1,
    "flip": 0.5,
    "drop_path": 0.2,
    "ema": 0.9,
    "graying": "dct",
    "eps": 0.7,
    "eps_end": 1.0,
    "broadcast": "cb_s",
}
CASES = {
    "on the device": {},
    "streamed, no workers": {"placement": "stream", "workers": 0},
    "streamed, two workers": {"placement": "stream", "workers": 2},
    "accumulating": {"accumulate": 2, "optimizer": "lamb"},
    "spectral graying": {"graying": "spectral"},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def whole(request, tmp_path_factory):
    """(fields, folder of a run that was not interrupted)"""
    fields = EVERYTHING | CASES[request.param]
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder, **fields).status == "finished"
    return fields, folder


def test_terminated_in_the_middle_of_an_epoch(whole, tmp_path, monkeypatch) -> None:
    fields, expected = whole
    signal_at(monkeypatch, 6, signal.SIGTERM)
    stopped = run(tmp_path, **fields)
    assert stopped.status == "terminated"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-00000006"]
    assert not (tmp_path / "last").exists()
    assert run(tmp_path, **fields).status == "finished"
    assert_bitwise(weights(tmp_path), weights(expected))
    for name in ("best", "last"):
        file = f"{name}/model.safetensors"
        assert_bitwise(load_file(tmp_path / file), load_file(expected / file))
    numbers = [
        {key: line[key] for key in ("update", "loss", "accuracy")}
        for folder in (tmp_path, expected)
        for line in read_run(folder)
        if line["event"] == "test"
    ]
    assert numbers[:3] == numbers[3:]


@pytest.mark.parametrize("update", [4, 12])
def test_terminated_at_the_end_of_an_epoch(whole, tmp_path, monkeypatch, update: int) -> None:
    """What the signal came before, the test, is made up for; after the last epoch, too."""
    fields, expected = whole
    signal_at(monkeypatch, update, signal.SIGTERM)
    assert run(tmp_path, **fields).status == "terminated"
    result = run(tmp_path, **fields)
    assert result.status == "finished"
    assert_bitwise(weights(tmp_path), weights(expected))
    for name in ("best", "last"):
        file = f"{name}/model.safetensors"
        assert_bitwise(load_file(tmp_path / file), load_file(expected / file))
    told = [
        [
            (line["update"], line["loss"], line["accuracy"])
            for line in read_run(folder)
            if line["event"] == "test"
        ]
        for folder in (tmp_path, expected)
    ]
    assert told[0] == told[1]
    assert json.loads((tmp_path / "result.json").read_text())["test"]["update"] == 12


CHILD = """
import json, signal, sys
import pytest, torch
from short_runs import run, signal_at

folder, update, fields = sys.argv[1:]
torch.set_num_threads(1)
signal_at(pytest.MonkeyPatch(), int(update), signal.SIGKILL)
run(folder, **json.loads(fields))
"""


@pytest.mark.parametrize("update", [3, 7])
def test_killed(tmp_path, update) -> None:
    """Saved every two updates; with the update that was lost done again, all is as if nothing happened."""
    fields = EVERYTHING | {"checkpoint_every": 2}
    run(tmp_path / "whole", **fields)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path / "killed", str(update), json.dumps(fields)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr[-2000:]
    assert run(tmp_path / "killed", **fields).status == "finished"
    assert_bitwise(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    starts = [
        json.loads(line)["update"]
        for line in (tmp_path / "killed" / "run.jsonl").read_text().splitlines()
        if json.loads(line)["event"] in ("start", "resume")
    ]
    assert starts == [0, update - 1]


def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, monkeypatch) -> None:
    fields = {"checkpoint_every": 2}
    run(tmp_path / "whole", **fields)
    signal_at(monkeypatch, 7, signal.SIGTERM)
    run(tmp_path / "damaged", **fields)
    newest = tmp_path / "damaged" / "checkpoints" / "update-00000007" / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert run(tmp_path / "damaged", **fields).status == "finished"
    said = [line["text"] for line in read_run(tmp_path / "damaged") if line["event"] == "note"]
    assert any("update-00000007 was passed over" in text and "optimizer.safetensors" in text for text in said)
    assert "resumes at update 6 of 12." in said
    assert_bitwise(weights(tmp_path / "damaged"), weights(tmp_path / "whole"))


def test_seeds_and_the_order_of_the_images_matter(tmp_path) -> None:
    """The equalities above are not those of a run that learns nothing."""
    run(tmp_path / "a", epochs=1)
    run(tmp_path / "b", epochs=1, seed=1)
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert not torch.equal(a["model/blocks.0.attn.qkv.weight"], b["model/blocks.0.attn.qkv.weight"])


def test_the_callers_generators_stay_as_they_are(tmp_path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run(tmp_path, epochs=1, drop_path=0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_lines_after_a_resume_inside_a_log_interval_are_whole(tmp_path, monkeypatch) -> None:
    """Log at 4, 8, 12; stopped after 6, the line of 8 is of 4 updates and not of the last 2."""
    fields = {"log_every": 4, "monitor_every": 3}
    run(tmp_path / "whole", **fields)
    with monkeypatch.context() as patch:
        signal_at(patch, 6, signal.SIGTERM)
        assert run(tmp_path / "parted", **fields).status == "terminated"
    assert run(tmp_path / "parted", **fields).status == "finished"
    told = [
        [
            {
                name: value
                for name, value in line.items()
                if name not in ("time", "seconds", "images_per_second")
            }
            for line in read_run(tmp_path / name)
            if line["event"] in ("train", "test", "monitor")
        ]
        for name in ("whole", "parted")
    ]
    # The measurement after update 6 was due when the signal came.
    assert [line["update"] for line in told[0] if line["event"] == "monitor"] == [0, 3, 6, 9, 12]
    assert told[1] == told[0]
