"""Runs as processes side by side: started, followed by what they write, stopped when the sweep is.

Each trains one recipe in its own folder, here or elsewhere (an engine). How far it is comes from the
lines that its ``run.jsonl`` gets. A terminal shows a table of the runs; a log file gets a line for each
change.

On a Ray cluster a run is a task that starts ``wellposed train`` where there is room for it. Ray finds the
node, waits for its resources, and starts a run again elsewhere when its node or its worker dies; the run then
resumes from its last checkpoint. All nodes see the sweep's folder at the same path.
"""

import contextlib
import importlib
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Union

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from wellposed.files import parse_json, read_bytes
from wellposed.train.recipe import Recipe
from wellposed.train.screen import duration, percent, rate

LOG = "log.txt"
"""In a run's folder: all that the run printed."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Args:
        name: of its folder and its recipe file.
        group: the name without the seed; runs of a group are compared as one.
        recipe: what is trained.
        folder: where it is trained.
    """

    name: str
    group: str
    recipe: Recipe
    folder: Path

    @property
    def recipe_file(self) -> Path:
        """Next to the folder, which belongs to the training process."""
        return self.folder.with_name(f"{self.name}.toml")


class LocalProcess(subprocess.Popen[bytes]):
    """A process of this machine."""

    is_queued = False


@dataclass(frozen=True)
class LocalEngine:
    """Processes of this machine: a command with RECIPE --out FOLDER, which hold the ``inherited`` files."""

    command: Sequence[str]
    environment: Mapping[str, str]
    inherited: Sequence[int] = ()

    def start(self, run: Run) -> LocalProcess:
        run.folder.mkdir(parents=True, exist_ok=True)
        with (run.folder / LOG).open("ab") as log:
            return LocalProcess(
                [*self.command, str(run.recipe_file), "--out", str(run.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                pass_fds=tuple(self.inherited),
                # A terminal sends Ctrl-C to all of its processes; the sweep alone passes it on, once.
                start_new_session=True,
            )


class Progress:
    """The newest numbers of a run; :meth:`refresh` reads what was added since the last time."""

    def __init__(self, file: Path) -> None:
        self._file, self._position = file, 0
        self.update: float | None = None
        self.updates: float | None = None  # in all; None until the run has said it
        self.accuracy: float | None = None  # of the last test
        self.rate: float | None = None  # images a second

    def refresh(self) -> None:
        """Read the new lines. One that is not whole yet waits for its end, one that is torn is skipped."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._position)
                added = file.read()
        except OSError:  # not there yet, or cannot be read just now: read next time
            return
        added = added[: added.rfind(b"\n") + 1]
        self._position += len(added)
        for values in map(_values, added.splitlines()):
            self.update = number(values.get("update"), self.update)
            self.updates = number(values.get("updates"), self.updates)
            if values.get("event") == "train":
                self.rate = number(values.get("images_per_second")) or self.rate
            elif values.get("event") == "test":
                self.accuracy = number(values.get("accuracy"))

    def seconds_left(self, batch_size: int) -> float | None:
        """At the present rate."""
        if self.update is None or self.updates is None or not self.rate:
            return None
        return max(self.updates - self.update, 0) * batch_size / self.rate


def number(value: Any, otherwise: float | None = None) -> float | None:
    """The value if it is a finite number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else otherwise


def _values(text: bytes) -> dict[str, Any]:
    try:
        values = parse_json(text)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _result(folder: Path) -> dict[str, Any]:
    """What the run's ``result.json`` says; empty if there is none that can be read."""
    try:
        return _values(read_bytes(folder / "result.json"))
    except (OSError, ValueError):
        return {}


Engine = Union["LocalEngine", "RayEngine"]
"""Where runs are trained: ``start(run)`` begins to train it, or queues it."""
State = Literal["waiting", "queued", "running", "finished", "interrupted", "nonfinite", "failed"]
POLL_SECONDS = 0.1
NONFINITE, TERMINATED = 3, 128 + signal.SIGTERM
"""Exit codes of ``wellposed train``."""


@dataclass
class Child:
    """A run with its process, if it has one.

    Attributes:
        reason: why it failed.
        result: what its ``result.json`` says.
        asked_to_stop: by the sweep.
    """

    run: Run
    progress: Progress
    state: State = "waiting"
    reason: str = ""
    result: dict[str, Any] | None = None
    asked_to_stop: bool = False
    process: "LocalProcess | RayRun | None" = None

    @classmethod
    def of(cls, run: Run) -> "Child":
        """A child that waits, or that a sweep before has finished."""
        child = cls(run, Progress(run.folder / "run.jsonl"))
        result = _result(run.folder)
        if result.get("finished"):
            child.state, child.result = "finished", result
            child.progress.refresh()
        return child

    @property
    def is_live(self) -> bool:
        return self.state in ("queued", "running")

    def start(self, engine: Engine) -> None:
        """Start the process; if that cannot be, the run has failed and the others continue."""
        try:
            self.process = engine.start(self.run)
        except OSError as error:
            self.state, self.reason = "failed", f"could not be started: {error}"
        else:
            self.state = "queued" if self.process.is_queued else "running"

    def poll(self) -> None:
        """Look how it is, and set the state if it has ended."""
        assert self.process is not None
        try:
            code = self.process.poll()
        except ChildProcessError as error:
            self.state, self.reason = "failed", str(error)
            return
        self.progress.refresh()
        if code is None:
            self.state = "queued" if self.process.is_queued else "running"
            return
        self.result = _result(self.run.folder)
        if code == 0 and self.result.get("finished"):
            self.state = "finished"
        elif self.asked_to_stop or code in (TERMINATED, -signal.SIGTERM):
            self.state = "interrupted"
        elif code == NONFINITE:
            self.state, self.reason = "nonfinite", "a loss or gradient was not finite"
        elif code == 0:
            self.state, self.reason = "failed", "it ended without a result.json"
        else:
            self.state = "failed"
            self.reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """Ask it to save and end."""
        if self.process is not None and not self.asked_to_stop:
            self.asked_to_stop = True
            self.process.terminate()

    def last_lines(self, count: int) -> list[str]:
        """Of its log."""
        if not (self.run.folder / LOG).is_file():
            return []
        with (self.run.folder / LOG).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 200 * count))
            return log.read().decode(errors="replace").splitlines()[-count:]


class Signals:
    """SIGINT, SIGTERM and SIGHUP ask the sweep to stop; asked again, it kills.

    Attributes:
        received: the first of them, None until it comes.
        again: whether there was a second.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.again = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            # Under nohup, SIGHUP is ignored and stays so.
            if before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.again = self.received is not None
        self.received = self.received or number


def train_all(
    children: Sequence[Child], *, jobs: int, engine: Engine, signals: Signals, show: Callable[[], None]
) -> None:
    """Run all that wait, at most ``jobs`` at a time, until they have ended or a signal says to stop.

    The longest come first: a long one that starts last would leave the GPU nearly idle at the end. Of equals
    the first seed does: the programs that it compiles are there for the others.
    """
    waiting = [child for child in children if child.state == "waiting"]
    waiting.sort(key=lambda child: (-work(child.run.recipe), child.run.recipe.seed))
    live: list[Child] = []
    try:
        while live or (waiting and signals.received is None):
            while waiting and len(live) < jobs and signals.received is None:
                child = waiting.pop(0)
                child.start(engine)
                live += [child] * child.is_live
            for child in live:
                child.poll()  # first: one that has ended by itself was not interrupted
                if child.is_live and signals.received is not None:
                    child.stop()
                if child.is_live and signals.again and child.process is not None:
                    child.process.kill()
            live = [child for child in live if child.is_live]
            show()
            if live:
                time.sleep(POLL_SECONDS)
    finally:
        # Only after an error of the sweep itself are there any left.
        for child in live:
            child.stop()
        for child in live:
            if child.process is not None:
                with contextlib.suppress(ChildProcessError):
                    child.process.wait()


DIGITS, UNKNOWN = 1_400, 50_000
"""Training images of the embedded set, and what a set counts as that would have to be opened to know."""
USUAL_DEPTH = 12


def work(recipe: Recipe) -> float:
    """Images that a run sees, times blocks: no more than an order of runs by how long they take.

    >>> work(Recipe(data="cifar10:DIR", epochs=3)) > work(Recipe(data="cifar10:DIR", epochs=20, limit=5000))
    True
    """
    images = DIGITS if recipe.data == "digits" else UNKNOWN
    depth = recipe.model_options.get("depth", USUAL_DEPTH)
    blocks = sum(depth) if isinstance(depth, (list, tuple)) else depth
    return float(recipe.epochs * min(images, recipe.limit or images) * blocks)


REFRESH_SECONDS = 0.5
_STYLES = {
    "running": "cyan",
    "finished": "green",
    "interrupted": "yellow",
    "nonfinite": "red",
    "failed": "red",
}
_RIGHT = ("update", "accuracy", "images/s", "time left")


class Screen:
    """Shows the runs whenever :meth:`show` is called; the table not more often than the eye needs.

    Attributes:
        live: the table in a terminal, to be entered; None where lines go into a log.
    """

    def __init__(self, console: Console, children: Sequence[Child]) -> None:
        self._console, self._children = console, children
        is_table = console.is_interactive
        self.live = Live(console=console, auto_refresh=False, transient=True) if is_table else None
        self._drawn, self._started = 0.0, time.monotonic()
        self._shown = {child.run.name: child.state for child in children}

    def show(self) -> None:
        if self.live is None:
            self._print_changes()
        elif time.monotonic() - self._drawn >= REFRESH_SECONDS:
            table = as_table(self._children, rows=self._console.height - 6)
            # Runs take seconds to start and to log; the clock says that they are at work.
            table.caption = f"{table.caption}, {duration(time.monotonic() - self._started)}"
            self.live.update(table, refresh=True)
            self._drawn = time.monotonic()

    def _print_changes(self) -> None:
        for child in self._children:
            if child.state != self._shown[child.run.name]:
                self._shown[child.run.name] = child.state
                parts = [f"{child.run.name}: {child.state}", *([child.reason] if child.reason else [])]
                if child.progress.accuracy is not None:
                    parts.append(f"accuracy {percent(child.progress.accuracy)}")
                self._console.print(", ".join(parts), markup=False, highlight=False, soft_wrap=True)


def as_table(children: Sequence[Child], rows: int) -> Table:
    """One line a run; where they do not fit, those that run or went wrong."""
    counts = Counter(child.state for child in children)
    table = Table(caption=", ".join(f"{count} {state}" for state, count in counts.items()))
    for title in ("run", "state", *_RIGHT):
        table.add_column(title, justify="right" if title in _RIGHT else "left", no_wrap=True)
    if len(children) > rows:
        quiet = ("waiting", "queued", "finished")
        children = [child for child in children if child.state not in quiet][: max(rows, 1)]
    for child in children:
        progress = child.progress
        done = "" if progress.update is None else f"{progress.update:,}"
        if done and progress.updates is not None:
            done = f"{done}/{progress.updates:,}"
        left = progress.seconds_left(child.run.recipe.batch_size) if child.state == "running" else None
        table.add_row(
            Text(child.run.name),
            Text(child.state, _STYLES.get(child.state, "")),
            done,
            "" if progress.accuracy is None else percent(progress.accuracy),
            "" if progress.rate is None else rate(progress.rate),
            "" if left is None else duration(left),
        )
    return table


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
        _stop_file(folder).unlink(missing_ok=True)
        arguments = (self._command, str(run.recipe_file.absolute()), str(folder), os.getcwd())
        task = self._task.options(name=run.name, **self._options).remote(*arguments, sys.executable)
        return RayRun(self._ray, task, folder)


class RayRun:
    """A run on the cluster, with the methods of a process."""

    def __init__(self, ray: Any, task: Any, folder: Path) -> None:
        self._ray, self._task, self._log = ray, task, folder / LOG
        self._stop_file = _stop_file(folder)
        self._size = _size(self._log)

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
        finally:
            self._stop_file.unlink(missing_ok=True)

    def terminate(self) -> None:
        """Let it save and end; one that waits for resources never starts.

        A task that runs is not cancelled: Ray may call it cancelled while its run still saves.
        """
        self._stop_file.touch()
        if self.is_queued:
            self._ray.cancel(self._task)

    def kill(self) -> None:
        self._ray.cancel(self._task, force=True)


def _stop_file(folder: Path) -> Path:
    """A file next to the folder of a run that tells the node that trains it to stop."""
    return folder.with_name(f".{folder.name}.stop")


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
    stop = _stop_file(Path(folder))
    if stop.exists():
        return TERMINATED
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
            if stop.exists():
                process.terminate()
                return process.wait()
            time.sleep(0.2)
    except KeyboardInterrupt:  # Ray cancels a task so that was queued a moment ago
        process.terminate()
        code = process.wait()
    return code
