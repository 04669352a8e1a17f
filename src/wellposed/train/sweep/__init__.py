"""The end of a sweep: a line for each run, and over the seeds of each recipe the mean and the deviation.

Several runs beside each other on one machine: small models leave a GPU idle.

Each recipe, with each seed, is a process of its own, ``wellposed train RECIPE --out FOLDER``. They share the
GPU that CUDA shows first; ``CUDA_VISIBLE_DEVICES`` chooses another. What a run prints goes to ``log.txt`` in
its folder. A run that fails does not stop the others, and a sweep that is called again goes on where it
stopped: runs that have finished are not trained again.
"""

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from wellposed.files import alone_in, write_cells, write_json
from wellposed.records import short
from wellposed.run_records import best_accuracy
from wellposed.text import aligned
from wellposed.train.screen import duration, percent, rate
from wellposed.train.sweep import processes as progress
from wellposed.train.sweep.plan import Run, plan, write_recipes
from wellposed.train.sweep.processes import (
    Child,
    Engine,
    LocalEngine,
    Screen,
    Signals,
    nothing_more,
    train_all,
)

if TYPE_CHECKING:
    from wellposed.train.sweep.cluster import Resources

_SPEED = ("images_per_second", "seconds")
COLUMNS = ("run", "recipe", "seed", "state", "accuracy", "best_accuracy", "loss", *_SPEED, "folder")
GROUP_COLUMNS = ("recipe_accuracy_mean", "recipe_accuracy_std", "recipe_n")


@dataclass(frozen=True)
class Group:
    """The finished runs of one recipe; ``std`` is the standard deviation of the sample, None for one run."""

    recipe: str
    n: int
    mean: float | None
    std: float | None


def rows_of(children: Sequence[Child]) -> list[dict[str, Any]]:
    """One mapping a run, under the names of :data:`COLUMNS`."""
    return [_row(child) for child in children]


def _row(child: Child) -> dict[str, Any]:
    result = child.result or {}
    last = result.get("test") or {}
    measured = {
        "accuracy": last.get("accuracy"),
        "best_accuracy": best_accuracy(result),
        "loss": last.get("loss"),
    }
    finished = child.state == "finished"
    return {
        "run": child.run.name,
        "recipe": child.run.group,
        "seed": child.run.recipe.seed,
        "state": child.state,
        **{name: progress.number(value) if finished else None for name, value in measured.items()},
        **{name: progress.number(result.get(name)) for name in _SPEED},
        "folder": str(child.run.folder),
    }


def groups(runs: Sequence[dict[str, Any]]) -> list[Group]:
    """The recipes in their order, over the runs that finished.

    >>> groups([{"recipe": "a", "accuracy": 0.5}, {"recipe": "a", "accuracy": 0.75},
    ...         {"recipe": "a", "accuracy": None}])
    [Group(recipe='a', n=2, mean=0.625, std=0.1767766952966369)]
    """
    found = []
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        values = [run["accuracy"] for run in runs if run["recipe"] == recipe and run["accuracy"] is not None]
        mean = statistics.fmean(values) if values else None
        found.append(Group(recipe, len(values), mean, statistics.stdev(values) if len(values) > 1 else None))
    return found


def summary_text(runs: Sequence[dict[str, Any]]) -> str:
    """Both tables; the one over the seeds only where a recipe has several runs."""
    lines = [("run", "state", "accuracy", "loss", "images/s", "time")]
    for run in runs:
        cells = (
            _told(run["accuracy"], percent),
            _told(run["loss"], short),
            _told(run["images_per_second"], rate),
            _told(run["seconds"], duration),
        )
        lines.append((run["run"], run["state"], *cells))
    tables = [aligned(lines, right=(2, 3, 4, 5))]
    found = groups(runs)
    if len(found) < len(runs) and any(group.n for group in found):
        over_seeds = [("recipe", "accuracy", "n")]
        over_seeds += [(group.recipe, _mean_and_std(group), str(group.n)) for group in found]
        tables.append(aligned(over_seeds, right=(1, 2)))
        tables.append("accuracy: mean ± standard deviation of the sample over n finished runs")
    return "\n\n".join(tables)


def _mean_and_std(group: Group) -> str:
    if group.mean is None:
        return "-"
    return percent(group.mean) + ("" if group.std is None else f" ± {percent(group.std)}")


def _told(value: float | None, words: Any) -> str:
    return "-" if value is None else str(words(value))


def write_summary(runs: Sequence[dict[str, Any]], about: dict[str, Any], out: Path) -> None:
    """Write ``sweep.csv``, one line a run, and ``sweep.json``, with what the sweep was asked."""
    found = {group.recipe: group for group in groups(runs)}
    rows_of = [
        [*(run[name] for name in COLUMNS), group.mean, group.std, group.n]
        for run in runs
        for group in (found[run["recipe"]],)
    ]
    write_cells(out / "sweep.csv", [[*COLUMNS, *GROUP_COLUMNS], *rows_of])
    content = {**about, "runs": list(runs), "recipes": [vars(group) for group in found.values()]}
    write_json(out / "sweep.json", content)


__all__ = ["Outcome", "run"]

COMMAND = (sys.executable, "-m", "wellposed", "train")
GPU_JOBS = 6
"""Small models beside each other on one GPU: more gain little."""
LOG_LINES = 15


@dataclass(frozen=True)
class Outcome:
    """What became of the runs, as in ``sweep.json``, and the exit code of the command."""

    runs: list[dict[str, Any]]
    exit_code: int


def run(
    recipes: Iterable[str | Path],
    *,
    out: str | Path,
    jobs: int | None = None,
    seeds: Sequence[int] | None = None,
    changes: Mapping[str, Any] | None = None,
    cluster: "Resources | None" = None,
    command: Sequence[str] = COMMAND,
    console: Console | None = None,
) -> Outcome:
    """Train recipes beside each other and compare them.

    Args:
        recipes: files, or folders that are searched with their subfolders.
        out: gets a folder and a recipe file for each run, ``sweep.csv`` and ``sweep.json``.
        jobs: runs at a time. None: 6 where ``nvidia-smi`` shows a GPU and a recipe may use it, else 1. With
            more than one, each gets its share of the cores (``OMP_NUM_THREADS``, unless that is set already).
            On a cluster None is as many as there is room for.
        seeds: train each recipe with each of them; None keeps the recipes' own.
        changes: values for all the recipes, such as the data.
        cluster: what each run gets of a Ray cluster, which then trains them; None trains on this machine.
        command: what is called with a recipe and ``--out FOLDER``.
        console: where to print.
    """
    out, console = Path(out), console or Console()
    runs = plan(recipes, out=out, seeds=seeds, changes=changes)
    if jobs is None:
        jobs = default_jobs(runs) if cluster is None else len(runs)
    jobs = min(jobs, len(runs))
    rows: list[dict[str, Any]] = []

    def save(children: Sequence[Child]) -> None:
        rows.extend(rows_of(children))
        about = {"jobs": jobs, "seeds": seeds and list(seeds), "changes": dict(changes or {})}
        write_summary(rows, about, out)

    children, exit_code = train_runs(
        runs, out=out, jobs=jobs, cluster=cluster, command=command, console=console, at_end=save
    )
    console.print(_closing(children, rows, out), markup=False, highlight=False, soft_wrap=True)
    return Outcome(rows, exit_code)


def train_runs(
    runs: Sequence[Run],
    *,
    out: Path,
    jobs: int,
    command: Sequence[str],
    console: Console,
    cluster: "Resources | None" = None,
    ended: Callable[[Run], Sequence[Run]] = nothing_more,
    at_end: Callable[[Sequence[Child]], None] = lambda children: None,
) -> tuple[list[Child], int]:
    """Train runs beside each other, the longest first; what became of them, and an exit code.

    Args:
        runs: whose folders are in ``out``.
        out: locked meanwhile.
        jobs: runs at a time.
        command: as of :func:`run`.
        cluster: as of :func:`run`.
        console: where to print.
        ended: called with each run that ended, well or not, and with those that had finished before; it tells
            the runs that had waited for it. It must not take long: no run is started meanwhile.
        at_end: called while the folder is still locked and signals wait.
    """
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out) as lock:
        write_recipes(runs)
        children = [Child.of(each) for each in runs]
        console.print(_opening(children, jobs, out), markup=False, highlight=False, soft_wrap=True)
        # Ray takes SIGTERM when it connects, so the sweep takes its signals after that.
        with _engine(runs, jobs, command, lock, cluster, console) as engine, Signals() as signals:
            with Screen(console, children) as screen:
                train_all(children, jobs=jobs, engine=engine, signals=signals, show=screen.show, ended=ended)
            at_end(children)
    return children, _exit_code(children, signals.received)


@contextlib.contextmanager
def _engine(
    runs: Sequence[Run],
    jobs: int,
    command: Sequence[str],
    lock: int,
    cluster: "Resources | None",
    console: Console,
) -> Iterator[Engine]:
    if cluster is None:
        yield LocalEngine(command, child_environment(jobs, os.environ), [lock])
        return
    from wellposed.train.sweep.cluster import RayEngine, connected

    with connected():
        engine = RayEngine(command, cluster, may_use_gpu=_may_use_gpu(runs))
        for note in engine.notes:
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        yield engine


def default_jobs(runs: Sequence[Run]) -> int:
    """How many runs to have beside each other, without loading torch to see what there is."""
    return GPU_JOBS if _may_use_gpu(runs) and gpu_is_there(os.environ) else 1


def _may_use_gpu(runs: Sequence[Run]) -> bool:
    return any(each.recipe.device in (None, "cuda") for each in runs)


def gpu_is_there(environment: Mapping[str, str]) -> bool:
    """Whether NVIDIA's tool shows a GPU that is not hidden."""
    tool = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if tool is None or environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.stdout.startswith("GPU ")


def child_environment(jobs: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run; several at a time share the cores."""
    made = {"PYTHONUNBUFFERED": "1", **environment}
    if jobs > 1:
        made.setdefault("OMP_NUM_THREADS", str(max(1, cores() // jobs)))
    return made


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _opening(children: Sequence[Child], jobs: int, out: Path) -> str:
    done = sum(child.state == "finished" for child in children)
    finished = f", {done} of them finished before" if done else ""
    runs = "1 run" if len(children) == 1 else f"{len(children)} runs"
    return f"{runs}{finished}, {min(jobs, len(children))} at a time, in {out}"


def _closing(children: Sequence[Child], rows: list[dict[str, Any]], out: Path) -> str:
    parts = [*failures(children), summary_text(rows)]
    if any(child.state in ("waiting", "interrupted") for child in children):
        parts.append("Not all runs have ended; the same command again goes on with them.")
    parts.append(f"written to {out}: sweep.csv, sweep.json")
    return "\n" + "\n\n".join(parts)


def failures(children: Sequence[Child]) -> list[str]:
    """Of each run that went wrong: why, and the end of its log."""
    parts = []
    for child in children:
        if child.reason:
            said = "\n".join(f"  {line}" for line in child.last_lines(LOG_LINES)) or "  (nothing)"
            parts.append(f"{child.run.title} {child.state}: {child.reason}. The end of its log:\n{said}")
    return parts


def _exit_code(children: Sequence[Child], received: int | None) -> int:
    if all(child.state == "finished" for child in children):
        return 0
    return 1 if received is None else 128 + received
