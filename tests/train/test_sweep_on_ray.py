"""A sweep on a Ray cluster of two nodes on this machine, one of which is killed in the middle."""

import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from short_runs import assert_bitwise, recipe
from wellposed.train.recipe import write_recipe
from wellposed.train.sweep import run
from wellposed.train.sweep.processes import Resources, connected

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(monkeypatch):
    """A head node that has the driver and one core, to which nodes can be added."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    small = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    quick = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 3,
    }
    head = {**small, "include_dashboard": False, "_system_config": quick}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.node = lambda: made.add_node(**small)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    made.shutdown()


def sweep(files, out, **options):
    console = Console(file=io.StringIO(), width=200)
    return run(files, out=out, console=console, **options), console.file.getvalue()


def log(folder: Path) -> str:
    return (folder / "log.txt").read_text() if (folder / "log.txt").exists() else ""


def test_a_node_dies_and_the_results_are_those_of_this_machine(cluster, tmp_path) -> None:
    doomed = cluster.node()
    made = recipe(
        limit=512, epochs=8, checkpoint_every=10, model_options={"depth": 1, "embed_dim": 16, "num_heads": 1}
    )
    write_recipe(made, tmp_path / "a.toml")
    out = tmp_path / "ray"
    runs = [out / "a-seed0", out / "a-seed1"]

    def kill() -> None:
        """Once the run on that node has saved something and is not at its end."""
        while True:
            for folder in runs:
                if doomed.node_id in log(folder) and list(folder.glob("checkpoints/update-*")):
                    lost.append(folder)
                    return cluster.remove_node(doomed, allow_graceful=False)
            time.sleep(0.02)

    lost: list[Path] = []
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    outcome, text = sweep([tmp_path / "a.toml"], out, seeds=[0, 1], cluster=Resources(cpus=1))
    assert outcome.exit_code == 0, text
    killer.join(timeout=0)
    (folder,) = lost
    assert log(folder).count("Ray node") == 2
    assert "resumes at update" in log(folder)

    local, text = sweep([tmp_path / "a.toml"], tmp_path / "local", seeds=[0, 1], jobs=2)
    assert local.exit_code == 0, text
    for there, here in zip(outcome.runs, local.runs, strict=True):
        assert (there["accuracy"], there["loss"]) == (here["accuracy"], here["loss"])
        weights = (load_file(Path(row["folder"]) / "last" / "model.safetensors") for row in (there, here))
        assert_bitwise(*weights)


RUNNER = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[3])
def stop(*_):
    (folder / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
if "fail" in folder.name:
    sys.exit("the last words")
(folder / "hangs").write_text(str(os.getpid()))
time.sleep(60)
"""


def test_runs_that_fail_and_a_sweep_that_is_stopped(cluster, tmp_path) -> None:
    (tmp_path / "runner.py").write_text(RUNNER)
    for name in ("fail", "hang", "wait"):
        write_recipe(recipe(), tmp_path / f"{name}.toml")
    out = tmp_path / "out"

    def stop() -> None:
        while not (out / "hang" / "hangs").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    files = [tmp_path / f"{name}.toml" for name in ("fail", "hang", "wait")]
    before = signal.getsignal(signal.SIGTERM)
    command = [sys.executable, "-S", str(tmp_path / "runner.py")]
    with connected():
        outcome, text = sweep(files, out, command=command, cluster=Resources(gpus=0))
    assert signal.getsignal(signal.SIGTERM) is before
    assert outcome.exit_code == 143
    assert [row["state"] for row in outcome.runs] == ["failed", "interrupted", "interrupted"]
    assert "the last words" in text
    assert (out / "hang" / "saved").exists()
    assert not (out / "wait" / "hangs").exists()
    assert not list(out.glob(".*.stop"))
    assert json.loads((out / "sweep.json").read_text())["runs"] == outcome.runs


def test_what_a_run_can_get() -> None:
    with pytest.raises(ValueError, match=r"a part of a GPU, such as 0\.25, or a whole number, got 1\.5"):
        Resources(gpus=1.5)
    with pytest.raises(ValueError, match="cpus_per_run must be greater than 0"):
        Resources(cpus=0)
    assert Resources(gpus=0.25).retries == 3


def test_without_ray_the_error_says_what_to_install(monkeypatch, tmp_path) -> None:
    write_recipe(recipe(), tmp_path / "a.toml")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'wellposed\[ray\]'"):
        sweep([tmp_path / "a.toml"], tmp_path / "out", cluster=Resources())
