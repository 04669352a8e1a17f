"""A sweep's runs on a Ray cluster: each is a task that starts ``wellposed train`` where there is room for it.

Ray finds the node, waits for its resources, and starts a run again elsewhere when its node or its worker
dies; the run then resumes from its last checkpoint. All nodes see the sweep's folder at the same path.
"""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.train.sweep.processes import LOG, Run

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Resources:
    """What each run gets of the cluster.

    Args:
        gpus: may be a part, such as 0.25, that several runs share. None: 1 if the cluster has GPUs, else 0.
        cpus: cores.
        retries: how often a run starts again when its node or worker dies. One that fails by itself does not.
    """

    gpus: float | None = None
    cpus: float = 1
    retries: int = 3

    def __post_init__(self) -> None:
        if self.gpus is not None and (self.gpus < 0 or (self.gpus > 1 and self.gpus % 1)):
            raise ValueError(
                f"gpus_per_run must be a part of a GPU, such as 0.25, or a whole number, got {self.gpus}."
            )
        if self.cpus <= 0:
            raise ValueError(f"cpus_per_run must be greater than 0, got {self.cpus}.")
        if self.retries < 0:
            raise ValueError(f"retries must be 0 or more, got {self.retries}.")


class RayEngine:
    """Starts runs as tasks of a cluster that this process is connected to, see :func:`connected`."""

    def __init__(self, command: Sequence[str], resources: Resources, *, may_use_gpu: bool = True) -> None:
        self._ray = _import_ray()
        self._command = list(command)
        available = float(self._ray.cluster_resources().get("GPU", 0))
        self.gpus = min(available, 1.0) * may_use_gpu if resources.gpus is None else resources.gpus
        self._task = self._ray.remote(train_here)
        self._options = {
            "num_cpus": resources.cpus,
            "num_gpus": self.gpus,
            "max_retries": resources.retries,
        }
        self.notes: list[str] = []
        for name, wanted in (("GPU", self.gpus), ("CPU", resources.cpus)):
            most = max(
                (node["Resources"].get(name, 0) for node in self._ray.nodes() if node["Alive"]), default=0
            )
            if wanted > most:
                self.notes.append(f"no node of the cluster has {wanted:g} {name} now; the runs wait for one.")

    def start(self, run: Run) -> "RayRun":
        """Queue a run."""
        folder = run.folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        arguments = (self._command, str(run.recipe_file.absolute()), str(folder), os.getcwd())
        task = self._task.options(name=run.name, **self._options).remote(*arguments, sys.executable)
        return RayRun(self._ray, task, folder / LOG)


class RayRun:
    """A run on the cluster, with the methods of a process."""

    def __init__(self, ray: Any, task: Any, log: Path) -> None:
        self._ray, self._task, self._log = ray, task, log
        self._size = _size(log)

    @property
    def is_queued(self) -> bool:
        """Whether it waits for resources: a run that starts writes its node into its log."""
        return _size(self._log) == self._size

    def poll(self) -> int | None:
        """The exit code of ``wellposed train``, None while it has none."""
        ended, _ = self._ray.wait([self._task], timeout=0)
        return self.wait() if ended else None

    def wait(self) -> int:
        try:
            return int(self._ray.get(self._task))
        except self._ray.exceptions.TaskCancelledError:
            return -signal.SIGTERM
        except self._ray.exceptions.RayTaskError as error:
            raise ChildProcessError(str(error.cause)) from error
        except self._ray.exceptions.RayError as error:
            raise ChildProcessError(f"Ray lost it: {type(error).__name__}: {error}") from error

    def terminate(self) -> None:
        """Let it save and end; one that waits for resources never starts."""
        self._ray.cancel(self._task)

    def kill(self) -> None:
        self._ray.cancel(self._task, force=True)


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Connect to the cluster of ``RAY_ADDRESS``, or to one that runs on this machine.

    A connection that is there already is used and stays.
    """
    ray = _import_ray()
    if ray.is_initialized():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise ConnectionError(
            "expected a Ray cluster, found none: start one with `ray start --head` here and "
            "`ray start --address=HOST:6379` on the other machines, or name one in RAY_ADDRESS."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)  # Ray puts one of its own there


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError(
            "a sweep with --engine ray needs Ray, which is not installed: pip install 'wellposed[ray]'",
            name="ray",
        ) from error


# Dies with the worker that started it: a run that was lost must not hold its folder when it starts elsewhere.
_BOUND = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the worker has died")
os.execv(sys.argv[2], sys.argv[2:])
"""


def train_here(command: list[str], recipe: str, folder: str, cwd: str, python: str) -> int:
    """Train a run on this node; returns the exit code.

    Args:
        command: what is called with the recipe and ``--out FOLDER``.
        recipe: the file.
        folder: of the run.
        cwd: that relative paths in the recipe start from.
        python: the interpreter of the sweep, in whose place this node's own is called.
    """
    import ray

    node = ray.get_runtime_context().get_node_id()
    for path in (recipe, folder, cwd):
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"expected {path} on the node {os.uname().nodename}, there is none; --out, and the folder in "
                "which the sweep is called, must be on a disk that all nodes see at the same path."
            )
    command = [sys.executable if part == python else part for part in command]
    with open(os.path.join(folder, LOG), "ab", buffering=0) as log:
        log.write(f"on {os.uname().nodename}, Ray node {node}\n".encode())
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _BOUND, str(os.getpid()), *command, recipe, "--out", folder],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"PYTHONUNBUFFERED": "1", **os.environ},
            cwd=cwd,
        )
    try:
        while (code := process.poll()) is None:
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:  # so Ray cancels a task
        process.terminate()
        code = process.wait()
    return code
