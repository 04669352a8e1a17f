"""Two processes equal one at the same global batch, replicated or sharded, also when one is killed."""

import fcntl
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
from wellposed.train.report import read_run

TESTS = Path(__file__).parent.parent


def launch(folder: Path, *arguments: str) -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    # One at a time: two launchers that look for a free port at the same moment may find the same.
    with (Path(tempfile.gettempdir()) / "wellposed-torchrun.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = subprocess.run(
            [sys.executable, *command, str(TESTS / "distributed_run.py"), str(folder), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr[-3000:]


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
        "report.txt",
    ]
    assert "another process's part" in (explained / "report.txt").read_text()
    newest = max((folder / "checkpoints").iterdir())
    assert newest.name == "update-00000005"
    assert load_file(newest / "optimizer.safetensors")["head.weight/step"] == 5
