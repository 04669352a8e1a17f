"""Several runs side by side, because small models leave a GPU idle; and how they compare.

Each recipe, with each seed, is a process of its own, ``wellposed train RECIPE --out FOLDER``. They share the
GPU that CUDA shows first; ``CUDA_VISIBLE_DEVICES`` chooses another. What a run prints goes to ``log.txt`` in
its folder. A run that fails does not stop the others, and a sweep that is called again continues where it
stopped: runs that have finished are not trained again.

At the end there is a line for each run, and over the seeds of each recipe the mean and the deviation.
"""

import contextlib
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from wellposed.environment import usable_cores
from wellposed.files import alone_in, write_cells, write_json
from wellposed.records import short
from wellposed.run_records import best_accuracy
from wellposed.text import aligned
from wellposed.train.recipe import (
    SUFFIX,
    Recipe,
    changes_of,
    combine,
    decisive,
    named,
    read_recipe,
    write_recipe,
)
from wellposed.train.screen import duration, percent, rate
from wellposed.train.sweep.processes import (
    LOG,
    Child,
    Engine,
    LocalEngine,
    Run,
    Screen,
    Signals,
    number,
    train_all,
)

if TYPE_CHECKING:
    from wellposed.train.sweep.processes import Resources

__all__ = ["Outcome", "Run", "run"]

COMMAND = (sys.executable, "-m", "wellposed", "train")
GPU_JOBS = 6
"""Small models side by side on one GPU: more gain little."""
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
    """Train recipes side by side and compare them.

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

    Returns:
        A mapping for each run, and the exit code.

    Example:
        ``run(["recipes/skip-ablation"], out="runs/ablation", seeds=[0, 1, 2])``
    """
    out, console = Path(out), console or Console()
    runs = plan(recipes, out=out, seeds=seeds, changes=changes)
    if jobs is None:
        jobs = default_jobs(runs) if cluster is None else len(runs)
    jobs = min(jobs, len(runs))
    rows: list[dict[str, Any]] = []

    def save(children: Sequence[Child]) -> None:
        rows.extend(map(_row, children))
        about = {"jobs": jobs, "seeds": seeds and list(seeds), "changes": dict(changes or {})}
        write_summary(rows, about, out)

    children, exit_code = train_runs(
        runs, out=out, jobs=jobs, cluster=cluster, command=command, console=console, at_end=save
    )
    parts = [*failures(children), summary_text(rows)]
    if any(child.state in ("waiting", "interrupted") for child in children):
        parts.append("Not all runs have ended; the same command again continues with them.")
    parts.append(f"written to {out}: sweep.csv, sweep.json")
    _say(console, "\n" + "\n\n".join(parts))
    return Outcome(rows, exit_code)


def plan(
    sources: Iterable[str | Path],
    *,
    out: Path,
    seeds: Sequence[int] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> list[Run]:
    """The runs of recipes and folders of recipes, with ``changes`` to all, one for each of the seeds."""
    changes = changes or {}
    if seeds is not None and "seed" in changes:
        raise ValueError("expected seeds or a change of seed, got both; drop one of them.")
    if seeds is not None and (not seeds or len(set(seeds)) < len(seeds)):
        raise ValueError(f"seeds must be different numbers, got {list(seeds)}.")
    files = find_recipes(sources, without=out)
    runs = []
    recipes = []
    for file in files:
        values = read_recipe(file)
        with named(file):
            recipes.append(combine(values, changes))
    for group, recipe in zip(distinct_names(files), recipes, strict=True):
        for seed in [None] if seeds is None else seeds:
            name = group if seed is None else f"{group}-seed{seed}"
            seeded = recipe if seed is None else dataclasses.replace(recipe, seed=seed)
            runs.append(Run(name, group, seeded, out / name))
    return runs


def find_recipes(sources: Iterable[str | Path], *, without: Path) -> list[Path]:
    """The files, and those in the folders and their subfolders; ``without`` is the sweep's own output."""
    found: dict[Path, Path] = {}
    for source in map(Path, sources):
        files = [source]
        if source.is_dir():
            every = sorted(file for file in source.rglob("*") if file.suffix == SUFFIX)
            files = [file for file in every if without.resolve() not in file.resolve().parents]
            if not files:
                raise ValueError(f"expected recipes in {source}, got none that end in {SUFFIX}.")
        for file in files:
            found.setdefault(file.resolve(), file)
    if not found:
        raise ValueError("expected recipes, or folders of them, got none.")
    return list(found.values())


def distinct_names(files: Sequence[Path]) -> list[str]:
    """A name for each file: its own, with its folder's where several are called the same.

    >>> distinct_names([Path("a/base.toml"), Path("b/base.toml"), Path("c/b/base.toml"), Path("b/svd.toml")])
    ['a-base', 'b-base', 'b-base-2', 'svd']
    """
    # Some file systems take A and a for one.
    shared = Counter(file.stem.casefold() for file in files)
    names: dict[str, str] = {}
    for file in files:
        is_shared = shared[file.stem.casefold()] > 1
        name = first = f"{file.resolve().parent.name}-{file.stem}" if is_shared else file.stem
        number = 2
        while name.casefold() in names:
            name = f"{first}-{number}"
            number += 1
        names[name.casefold()] = name
    return list(names.values())


def train_runs(
    runs: Sequence[Run],
    *,
    out: Path,
    jobs: int,
    command: Sequence[str],
    console: Console,
    cluster: "Resources | None" = None,
    at_end: Callable[[Sequence[Child]], None] = lambda children: None,
) -> tuple[list[Child], int]:
    """Train runs, whose folders are in ``out``; what became of them, and an exit code. See :func:`run`.

    ``at_end`` is called while ``out`` is still locked and signals wait.
    """
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out) as lock:
        for each in runs:
            _require_same(each)
        for each in runs:
            write_recipe(each.recipe, each.recipe_file)
        children = [Child.of(each) for each in runs]
        done = sum(child.state == "finished" for child in children)
        finished = f", {done} of them finished before" if done else ""
        count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
        _say(console, f"{count}{finished}, {min(jobs, len(runs))} at a time, in {out}")
        # Ray takes SIGTERM when it connects, so the sweep takes its signals after that.
        with _engine(runs, jobs, command, lock, cluster, console) as engine, Signals() as signals:
            screen = Screen(console, children)
            with screen.live or contextlib.nullcontext():
                train_all(children, jobs=jobs, engine=engine, signals=signals, show=screen.show)
            at_end(children)
    if all(child.state == "finished" for child in children):
        return children, 0
    return children, 1 if signals.received is None else 128 + signals.received


def _require_same(run: Run) -> None:
    """An old result must not pass for one of a recipe that has changed since."""
    trained = run.folder.is_dir() and any(path.name != LOG for path in run.folder.iterdir())
    if not trained or not run.recipe_file.exists():
        return
    changed = changes_of(decisive(Recipe.from_mapping(read_recipe(run.recipe_file))), decisive(run.recipe))
    if changed:
        listed = "; ".join(f"{name} was {before!r}, now {now!r}" for name, before, now in changed)
        raise ValueError(
            f"{run.folder} holds a run of another recipe: {listed}. "
            "Choose another --out, or delete the folder."
        )


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
    from wellposed.train.sweep.processes import RayEngine, connected

    with connected():
        engine = RayEngine(command, cluster, may_use_gpu=_may_use_gpu(runs))
        for note in engine.notes:
            _say(console, note)
        yield engine


def default_jobs(runs: Sequence[Run]) -> int:
    """How many runs to have side by side, without loading torch to see what there is."""
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
        made.setdefault("OMP_NUM_THREADS", str(max(1, (usable_cores() or 1) // jobs)))
    return made


def failures(children: Sequence[Child]) -> list[str]:
    """Of each run that went wrong: why, and the end of its log."""
    parts = []
    for child in children:
        if child.reason:
            said = "\n".join(f"  {line}" for line in child.last_lines(LOG_LINES)) or "  (nothing)"
            parts.append(f"{child.run.name} {child.state}: {child.reason}. The end of its log:\n{said}")
    return parts


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


def _row(child: Child) -> dict[str, Any]:
    """Of one run, under the names of :data:`COLUMNS`."""
    result = child.result or {}
    last = result.get("test") or {}
    measured = (last.get("accuracy"), best_accuracy(result), last.get("loss"))
    finished = child.state == "finished"
    values = (
        child.run.name,
        child.run.group,
        child.run.recipe.seed,
        child.state,
        *(number(value) if finished else None for value in measured),
        *(number(result.get(name)) for name in _SPEED),
        str(child.run.folder),
    )
    return dict(zip(COLUMNS, values, strict=True))


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
    words: dict[str, Callable[[float], str]] = {
        "accuracy": percent,
        "loss": short,
        "images_per_second": rate,
        "seconds": duration,
    }
    lines = [("run", "state", "accuracy", "loss", "images/s", "time")]
    for run in runs:
        cells = ("-" if run[name] is None else say(run[name]) for name, say in words.items())
        lines.append((run["run"], run["state"], *cells))
    tables = [aligned(lines, right=(2, 3, 4, 5))]
    found = groups(runs)
    if len(found) < len(runs) and any(group.n for group in found):
        over_seeds = [("recipe", "accuracy", "n")]
        for group in found:
            spread = "" if group.std is None else f" ± {percent(group.std)}"
            mean = "-" if group.mean is None else percent(group.mean) + spread
            over_seeds.append((group.recipe, mean, str(group.n)))
        tables.append(aligned(over_seeds, right=(1, 2)))
        tables.append("accuracy: mean ± standard deviation of the sample over n finished runs")
    return "\n\n".join(tables)


def write_summary(runs: Sequence[dict[str, Any]], about: dict[str, Any], out: Path) -> None:
    """Write ``sweep.csv``, one line a run, and ``sweep.json``, with what the sweep was asked."""
    found = {group.recipe: group for group in groups(runs)}
    lines = [
        [*run.values(), group.mean, group.std, group.n] for run in runs for group in (found[run["recipe"]],)
    ]
    write_cells(out / "sweep.csv", [[*COLUMNS, *GROUP_COLUMNS], *lines])
    content = {**about, "runs": list(runs), "recipes": [vars(group) for group in found.values()]}
    write_json(out / "sweep.json", content)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
