"""Two processes equal one at the same global batch, replicated or sharded, also when one is killed."""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distributed_run import FIELDS
from short_runs import run
from wellposed.run_records import read_run
from wellposed.train import Recipe
from wellposed.train.parallel import make_accelerator

TESTS = Path(__file__).parent.parent


def launch(folder: Path, *arguments: str) -> None:
    torchrun("--max-restarts=3", str(TESTS / "distributed_run.py"), str(folder), *arguments)


def torchrun(*arguments: str) -> str:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    # One at a time: two launchers that look for a free port at the same moment may find the same.
    with (Path(tempfile.gettempdir()) / "wellposed-torchrun.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = subprocess.run(
            [sys.executable, *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    run(folder, **FIELDS, monitor_every=6)
    torch.set_num_threads(before)
    return folder


@pytest.mark.parametrize(("parallel", "kill_at"), [("ddp", "7"), ("fsdp2", "5")])
def test_two_processes_equal_one(alone, tmp_path, parallel, kill_at) -> None:
    folder = tmp_path / parallel
    launch(folder, parallel, "kill", kill_at)
    assert (tmp_path / f"{parallel}-died").exists()
    lines = read_run(folder)
    assert [line["update"] for line in lines if line["event"] in ("start", "resume")] == [
        0,
        int(kill_at) - 1,
    ]
    got, expected = (load_file(path / "last" / "model.safetensors") for path in (folder, alone))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=2e-4, atol=2e-5)
    tests = [
        [(line["epoch"], line["accuracy"]) for line in read_run(path) if line["event"] == "test"]
        for path in (folder, alone)
    ]
    assert tests[0] == tests[1]
    losses = [
        {line["update"]: line["loss"] for line in read_run(path) if line["event"] == "train"}
        for path in (folder, alone)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    kappas = [
        [line["kappa/0/input"] for line in read_run(path) if line["event"] == "monitor"]
        for path in (folder, alone)
    ]
    assert kappas[0] == pytest.approx(kappas[1], rel=1e-2)
    assert len(kappas[0]) == 3


def test_a_loss_that_one_process_cannot_tell_stops_all(tmp_path) -> None:
    """Each of them ends with the status that tells it, which the child asserts."""
    folder = tmp_path / "nan"
    launch(folder, "ddp", "nan", "5")
    (explained,) = folder.glob("nonfinite-*")
    assert sorted(path.name for path in explained.iterdir()) == [
        "batch-0.safetensors",
        "batch-1.safetensors",
        "report.json",
    ]
    assert "another process's part" in (explained / "report.json").read_text()
    newest = max((folder / "checkpoints").iterdir())
    assert newest.name == "update-00000005"
    assert load_file(newest / "optimizer.safetensors")["head.weight/step"] == 5


def test_the_documented_command_without_a_gpu_is_one_run_on_two_processes(tmp_path) -> None:
    """As it stands in docs/train.md: no --device, which is what --device cpu hid."""
    folder = tmp_path / "run"
    recipe = ("--epochs", "2", "--limit", "320", "--batch-size", "32", "--out", str(folder))
    said = torchrun("--max-restarts=2", "-m", "wellposed", "train", *recipe)
    assert "Traceback" not in said
    lines = read_run(folder)
    assert [line["event"] for line in lines].count("start") == 1
    assert {line["update"] for line in lines if line["event"] == "train"} == {20}
    result = json.loads((folder / "result.json").read_text())
    assert result["about"]["processes"] == 2
    assert result["train"]["accuracy"] is not None
    weights, best = (load_file(folder / name / "model.safetensors") for name in ("last", "best"))
    assert weights.keys() == best.keys() > {"head.weight", "patch_embed.proj.weight"}


def test_processes_that_were_not_joined_are_refused(tmp_path, monkeypatch) -> None:
    """Else each would train the whole batch alone, into the same folder."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match=r"expected one run on 2 processes.*got process 0 of 1"):
        make_accelerator(Recipe(), [], tmp_path)
