"""Runs beside each other, with a small script in the place of ``wellposed train``."""

import contextlib
import csv
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from wellposed.train.recipe import Recipe, write_recipe
from wellposed.train.sweep import (
    Run,
    child_environment,
    default_jobs,
    distinct_names,
    find_recipes,
    gpu_is_there,
    plan,
    run,
)
from wellposed.train.sweep.processes import Child, Progress, as_table

# What a run does is in its recipe's field "data".
RUNNER = """
import json, os, signal, sys, time, tomllib
from pathlib import Path

recipe, folder = tomllib.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[3])
does = recipe["data"]
with (folder / "calls.txt").open("a") as calls:
    calls.write(f"{os.environ.get('OMP_NUM_THREADS')}\\n")
print("training", folder.name)
with (folder / "run.jsonl").open("a") as log:
    log.write(json.dumps({"event": "start", "update": 0, "updates": 40}) + "\\n")
    log.write(json.dumps({"event": "train", "update": 20, "images_per_second": 640.0}) + "\\n")
    log.write(json.dumps({"event": "test", "update": 20, "accuracy": 0.5}) + "\\n")
if does == "fail":
    print("the last words"); sys.exit(1)
if does == "vanish":
    sys.exit(0)
if does == "nonfinite":
    (folder / "result.json").write_text('{"finished": false, "test": {"accuracy": 0.1}}')
    sys.exit(3)
if does == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if does == "beside":
    # Both write what they see of the other's start.
    others = lambda: [f for f in folder.parent.glob("*/started") if f.parent != folder]
    (folder / "started").touch()
    until = time.monotonic() + float(recipe["lr"])
    while time.monotonic() < until and not others():
        time.sleep(0.01)
    (folder / "seen").write_text(str(len(others())))
    time.sleep(0.3)
    (folder / "started").unlink()
if does in ("hang", "stubborn") and not (folder / "saved").exists():
    def stop(*_):
        (folder / "saved").touch()
        if does == "hang":
            sys.exit(143)
    signal.signal(signal.SIGTERM, stop)
    (folder / "pid").write_text(str(os.getpid()))
    (folder / "pid").rename(folder / "hangs")
    time.sleep(60)
accuracy = 0.9 + recipe["seed"] / 100
result = {"finished": True, "seconds": 62.0, "images_per_second": 640.0,
          "test": {"accuracy": accuracy, "loss": 0.25}, "best": {"accuracy": 0.95, "ema_accuracy": 0.97}}
(folder / "result.json").write_text(json.dumps(result))
"""


@pytest.fixture
def sweep(tmp_path):
    """Call a sweep of recipes, given as name=data; gives its outcome and what it printed."""
    script = tmp_path / "runner.py"
    script.write_text(RUNNER)
    out = tmp_path / "out"

    def call(*, jobs: int = 2, seeds=None, changes=None, console=None, **recipes: str | Recipe):
        folder = tmp_path / "recipes"
        folder.mkdir(exist_ok=True)
        for name, recipe in recipes.items():
            made = Recipe(data=recipe) if isinstance(recipe, str) else recipe
            write_recipe(made, folder / f"{name}.toml")
        files = [folder / f"{name}.toml" for name in recipes]
        console = console or Console(file=io.StringIO(), width=200)
        command = [sys.executable, "-S", str(script)]
        outcome = run(
            files, out=out, jobs=jobs, seeds=seeds, changes=changes, command=command, console=console
        )
        return outcome, console.file.getvalue()

    call.out = out
    return call


def states(outcome) -> dict[str, str]:
    return {row["run"]: row["state"] for row in outcome.runs}


def calls(out: Path, name: str) -> int:
    return len((out / name / "calls.txt").read_text().splitlines())


def when(condition, then) -> threading.Thread:
    """Do something from another thread once a condition holds."""

    def wait() -> None:
        until = time.monotonic() + 30
        while not condition() and time.monotonic() < until:
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_all_finish_and_are_compared(sweep) -> None:
    outcome, text = sweep(plain="ok", other="ok", seeds=[0, 2])
    out = sweep.out
    assert outcome.exit_code == 0
    assert states(outcome) == dict.fromkeys(
        ["plain-seed0", "plain-seed2", "other-seed0", "other-seed2"], "finished"
    )
    assert (out / "plain-seed0" / "log.txt").read_text() == "training plain-seed0\n"
    std = statistics.stdev([0.9, 0.92])
    assert "plain-seed2  finished    92.00%  0.25       640  1:02" in text
    assert f"plain   91.00% ± {100 * std:.2f}%  2" in text
    saved = json.loads((out / "sweep.json").read_text())
    assert saved["runs"] == outcome.runs
    assert saved["recipes"][0] == {"recipe": "plain", "n": 2, "mean": 0.91, "std": pytest.approx(std)}
    with (out / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["0", "2", "0", "2"]
    assert rows[1]["accuracy"] == "0.92"
    assert rows[1]["best_accuracy"] == "0.97"  # of the averaged weights, which are those in best
    assert (rows[1]["recipe_accuracy_mean"], rows[1]["recipe_n"]) == ("0.91", "2")

    again, text = sweep(plain="ok", other="ok", seeds=[0, 2])
    assert again == outcome
    assert calls(out, "plain-seed0") == 1
    assert "4 runs, 4 of them finished before" in text


def test_one_that_fails_does_not_stop_the_others(sweep) -> None:
    outcome, text = sweep(a="fail", b="vanish", c="killed", d="nonfinite", e="ok", jobs=1)
    assert outcome.exit_code == 1
    expected = {"a": "failed", "b": "failed", "c": "failed", "d": "nonfinite", "e": "finished"}
    assert states(outcome) == expected
    assert "a failed: exit code 1. The end of its log:\n  training a\n  the last words" in text
    assert "b failed: it ended without a result.json" in text
    assert "c failed: killed by signal 9" in text
    assert "d nonfinite: a loss or gradient was not finite" in text
    assert [row["accuracy"] for row in outcome.runs] == [None] * 4 + [0.9]
    sweep(a="fail", e="ok")
    assert (calls(sweep.out, "a"), calls(sweep.out, "e")) == (2, 1)


def test_a_folder_that_cannot_be_made_fails_one_run_only(sweep) -> None:
    sweep.out.mkdir()
    (sweep.out / "a").touch()
    outcome, text = sweep(a="ok", b="ok")
    assert states(outcome) == {"a": "failed", "b": "finished"}
    assert "a failed: could not be started" in text


@pytest.mark.parametrize(("jobs", "sees"), [(2, "1"), (1, "0")])
def test_so_many_run_beside_each_other(sweep, monkeypatch, jobs, sees) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    wait = 20.0 if jobs == 2 else 0.2
    recipes = {name: Recipe(data="beside", lr=wait) for name in "ab"}
    assert sweep(**recipes, jobs=jobs)[0].exit_code == 0
    assert [(sweep.out / name / "seen").read_text() for name in "ab"] == [sees, sees]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2)) if jobs == 2 else "None"
    assert (sweep.out / "a" / "calls.txt").read_text() == f"{threads}\n"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background jobs ignore SIGINT, and so would the sweep."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_sweep_goes_on_later(sweep, number) -> None:
    hangs, before = sweep.out / "a" / "hangs", signal.getsignal(number)
    thread = when(hangs.exists, lambda: os.kill(os.getpid(), number))
    outcome, text = sweep(a="hang", b="ok", jobs=1)
    thread.join()
    assert outcome.exit_code == 128 + number
    assert states(outcome) == {"a": "interrupted", "b": "waiting"}
    assert (sweep.out / "a" / "saved").exists()
    assert "the same command again continues" in text
    assert signal.getsignal(number) is before
    assert json.loads((sweep.out / "sweep.json").read_text())["runs"][0]["state"] == "interrupted"

    outcome, _ = sweep(a="hang", b="ok", jobs=1)
    assert outcome.exit_code == 0
    assert (calls(sweep.out, "a"), calls(sweep.out, "b")) == (2, 1)
    assert (sweep.out / "a" / "log.txt").read_text() == "training a\ntraining a\n"


def test_a_second_signal_kills(sweep) -> None:
    folder = sweep.out / "a"

    def insist() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        when((folder / "saved").exists, lambda: os.kill(os.getpid(), signal.SIGTERM))

    thread = when((folder / "hangs").exists, insist)
    began = time.monotonic()
    outcome, _ = sweep(a="stubborn")
    thread.join()
    assert states(outcome) == {"a": "interrupted"}
    assert time.monotonic() - began < 30


def test_a_bad_recipe_is_told_before_anything_starts(sweep, tmp_path) -> None:
    (tmp_path / "bad.toml").write_text("eps = 0.5")
    with pytest.raises(ValueError, match=r"bad\.toml: eps does nothing without graying"):
        run([tmp_path / "bad.toml"], out=sweep.out, command=["false"])
    with pytest.raises(ValueError, match=r"a\.toml: batch_size must be a multiple of accumulate"):
        sweep(a="ok", changes={"accumulate": 7})
    assert not sweep.out.exists()


def test_a_changed_recipe_is_not_taken_for_the_old_one(sweep) -> None:
    sweep(a=Recipe(data="ok", lr=0.1))
    with pytest.raises(ValueError, match=r"out/a holds a run of another recipe: lr was 0\.1, now 0\.2"):
        sweep(a=Recipe(data="ok", lr=0.2))
    # How it is computed may change.
    outcome, _ = sweep(a=Recipe(data="ok", lr=0.1, workers=0))
    assert outcome.exit_code == 0
    assert calls(sweep.out, "a") == 1
    # A run that failed before it began, and left only a log, may be mended.
    (sweep.out / "b").mkdir()
    (sweep.out / "b" / "log.txt").touch()
    write_recipe(Recipe(data="wrong"), sweep.out / "b.toml")
    assert states(sweep(b="ok")[0]) == {"b": "finished"}


def test_two_sweeps_do_not_share_a_folder(sweep, tmp_path) -> None:
    """Also when the first was killed and only its runs go on."""
    (tmp_path / "hang.toml").write_text('data = "hang"')
    folder = sweep.out / "hang"
    code = "import sys; from wellposed.train.sweep import run as go; go([sys.argv[1]], out=sys.argv[2], "
    code += "command=sys.argv[3:])"
    arguments = [tmp_path / "hang.toml", sweep.out, sys.executable, "-S", tmp_path / "runner.py"]
    first = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.DEVNULL)
    when((folder / "hangs").exists, first.kill).join()
    first.wait()
    with pytest.raises(BlockingIOError, match="still works in"):
        sweep(a="ok")
    os.kill(int((folder / "hangs").read_text()), signal.SIGTERM)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            assert sweep(a="ok")[0].exit_code == 0
            return
        time.sleep(0.05)
    pytest.fail("the lock outlived the run")


def test_which_recipes(tmp_path) -> None:
    out = tmp_path / "set" / "out"
    for name in ("set/a.toml", "set/deep/b.toml", "set/notes.md", "set/out/old.toml", "single.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = find_recipes(
        [tmp_path / "set", tmp_path / "single.toml", tmp_path / "set" / "a.toml"], without=out
    )
    assert [file.name for file in found] == ["a.toml", "b.toml", "single.toml"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"expected recipes in .*empty, got none"):
        find_recipes([tmp_path / "empty"], without=out)
    with pytest.raises(FileNotFoundError, match="there is no recipe"):
        plan([tmp_path / "no.toml"], out=out)
    with pytest.raises(ValueError, match="got both"):
        plan([tmp_path / "set"], out=out, seeds=[0], changes={"seed": 1})
    with pytest.raises(ValueError, match="different numbers"):
        plan([tmp_path / "set"], out=out, seeds=[0, 0])
    runs = plan([tmp_path / "set"], out=out, seeds=[4, 5], changes={"lr": 0.5})
    assert [each.name for each in runs] == ["a-seed4", "a-seed5", "b-seed4", "b-seed5"]
    assert {each.recipe.lr for each in runs} == {0.5}
    assert [each.recipe.seed for each in runs] == [4, 5, 4, 5]


def test_names_are_distinct() -> None:
    files = [Path("x/a.toml"), Path("y/A.toml"), Path("z/y/a.toml"), Path("y-a.toml"), Path("b.toml")]
    names = distinct_names(files)
    assert names[4] == "b"
    assert len({name.casefold() for name in names}) == len(files)


def test_progress_reads_only_whole_lines(tmp_path) -> None:
    file = tmp_path / "run.jsonl"
    progress = Progress(file)
    progress.refresh()
    assert progress.update is None
    file.write_text('{"event": "start", "update": 0, "updates": 100}\n{"event": "train", "upd')
    progress.refresh()
    assert (progress.update, progress.updates, progress.seconds_left(64)) == (0, 100, None)
    with file.open("a") as added:
        added.write('ate": 50, "images_per_second": 320.0}\n{"torn\n\n{"event": "test", "accuracy": 0.75}\n')
    progress.refresh()
    assert (progress.update, progress.rate, progress.accuracy) == (50, 320.0, 0.75)
    assert progress.seconds_left(64) == 10.0
    with file.open("a") as added:
        added.write(
            '{"event": "resume", "update": 40, "updates": 100}\n{"event": "test", "accuracy": "nan"}\n'
        )
    progress.refresh()
    assert (progress.update, progress.accuracy) == (40, None)


def child(name: str, state: str) -> Child:
    made = Child(
        Run(name, name, Recipe(batch_size=64), Path("out") / name), Progress(Path("none")), state=state
    )
    made.progress.update, made.progress.updates = 1000, 2500
    made.progress.rate, made.progress.accuracy = 960.0, 0.5
    return made


def shown(table) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()


def test_the_table_in_a_terminal(sweep) -> None:
    text = shown(as_table([child("a[b]", "running"), child("c", "finished")], rows=20))
    (line,) = (line for line in text.splitlines() if "a[b]" in line)
    assert line.split("│")[1:-1] == [
        " a[b] ",
        " running  ",
        " 1,000/2,500 ",
        "   50.00% ",
        "      960 ",
        "      1:40 ",
    ]
    assert "1 running, 1 finished" in text
    many = [*(child(f"done{index}", "finished") for index in range(30)), child("now", "running")]
    text = shown(as_table(many, rows=20))
    assert "now" in text
    assert "done" not in text
    assert "30 finished, 1 running" in text

    console = Console(file=io.StringIO(), width=120, force_terminal=True, force_interactive=True)
    _, text = sweep(a="ok", console=console)
    assert "│ a   │" in text


def test_lines_in_a_log(sweep) -> None:
    _, text = sweep(a="ok", b="fail", jobs=1)
    lines = text.splitlines()
    expected = [
        "a: running",
        "a: finished, accuracy 50.00%",
        "b: running",
        "b: failed, exit code 1, accuracy 50.00%",
    ]
    assert lines[1:5] == expected
    assert "\x1b" not in text


def test_jobs_by_what_there_is(tmp_path, monkeypatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: a card (UUID: GPU-1)'\n")
    tool.chmod(0o755)
    with_gpu = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert gpu_is_there(with_gpu)
    assert not gpu_is_there({**with_gpu, "CUDA_VISIBLE_DEVICES": ""})
    assert not gpu_is_there({"PATH": str(tmp_path / "nowhere")})
    monkeypatch.setenv("PATH", with_gpu["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    runs = [Run("a", "a", Recipe(), Path("a"))]
    assert default_jobs(runs) == 6
    assert default_jobs([Run("a", "a", Recipe(device="cpu"), Path("a"))]) == 1
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert default_jobs(runs) == 1
    tool.write_text("not a program")
    assert not gpu_is_there(with_gpu)


def test_the_users_own_number_of_threads_stays() -> None:
    assert child_environment(4, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    assert int(child_environment(1000, {})["OMP_NUM_THREADS"]) == 1
    assert "OMP_NUM_THREADS" not in child_environment(1, {})
