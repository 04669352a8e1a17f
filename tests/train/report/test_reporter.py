"""The reporter as the training loop uses it."""

import errno
import io
import json
import math
import os
import re
import time

import pytest
from rich.console import Console

from wellposed import run_records as run_log
from wellposed.run_records import NAME, read_run
from wellposed.train import reporter, screen
from wellposed.train.recipe import Recipe
from wellposed.train.reporter import Reporter

RECIPE = Recipe(epochs=4, trackers=("none",))


def reporter_of(folder, *, start=0, stream=None, terminal=False, **options):
    console = Console(file=stream or io.StringIO(), force_terminal=terminal, width=200)
    options = {"updates": 100, "main": True, "console": console, **options}
    return Reporter(folder, RECIPE, start=start, **options)


def run_a_little(tell: Reporter) -> None:
    tell.say("starting")
    tell.measured(0, {"kappa/0/input": 80.0, "kappa/1/input": 90.0, "entropy/0": 0.5, "entropy/1": 0.7})
    for update in range(1, 101):
        tell.advance(update)
        if update % 25 == 0:
            tell.train(update, loss=10 / update, accuracy=update / 100, lr=1e-3, grad_norm=1.5, images=1600)
            tell.tested(
                update, epoch=update // 25, loss=0.5, accuracy=0.9 if update == 75 else 0.8, best=update < 100
            )
    tell.event("checkpoint", update=100, path=tell.folder / "checkpoints")
    tell.measured(100, {"kappa/0/input": 8.0, "kappa/1/input": 9.0, "entropy/0": 0.6, "entropy/1": 0.8})
    tell.event("finished", update=100)


def test_a_whole_run(tmp_path) -> None:
    stream = io.StringIO()
    with reporter_of(
        tmp_path, stream=stream, about={"parameters": 123456, "test_images": 297, "edits": "one\ntwo"}
    ) as tell:
        run_a_little(tell)
        result = tell.write_result({"python": "3"})
    lines = read_run(tmp_path)
    events = [line["event"] for line in lines]
    assert events[:3] == ["start", "note", "monitor"]
    assert events[-1] == "finished"
    assert all({"event", "update", "time", "seconds"} <= line.keys() for line in lines)
    train = next(line for line in lines if line["event"] == "train")
    assert (train["update"], train["loss"], train["accuracy"], train["grad_norm"]) == (25, 0.4, 0.25, 1.5)
    assert train["images_per_second"] > 0

    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["best"] == {"update": 75, "epoch": 3, "loss": 0.5, "accuracy": 0.9}
    assert result["test"]["accuracy"] == 0.8
    assert result["kappa"] == {"input": {"first": 90.0, "last": 9.0}}
    assert result["entropy"] == {"first": 0.6, "last": pytest.approx(0.7)}
    assert result["finished"]
    assert result["recipe"]["epochs"] == 4
    assert result["environment"] == {"python": "3"}

    shown = stream.getvalue()
    assert shown.startswith("starting\n")
    assert "epoch 4/4, 100%: loss 0.1, test 80.0%, 0:00 left," in shown
    table = str(tell.table())
    for part in (
        "123,456",
        "90.00%, loss 0.5 (epoch 3)",
        "80.00%",
        "90 -> 9 (worst block)",
        "0.6000 -> 0.7000",
    ):
        assert part in table, part
    assert "run.jsonl" in table
    assert re.search(r"test images +297", table)
    assert re.search(r"\nedits +one\n +two\n", table)
    console = Console(file=io.StringIO(), width=100)
    console.print(tell.table())
    assert re.search(r"parameters +123,456", console.file.getvalue())


def test_the_other_processes_do_nothing(tmp_path) -> None:
    stream = io.StringIO()
    with reporter_of(tmp_path / "run", stream=stream, main=False) as tell:
        run_a_little(tell)
        assert tell.write_result() == {}
    assert str(tell.table()) == ""
    assert stream.getvalue() == ""
    assert not (tmp_path / "run").exists()


def test_quiet_writes_files_only(tmp_path) -> None:
    stream = io.StringIO()
    with reporter_of(tmp_path, stream=stream, quiet=True) as tell:
        run_a_little(tell)
    assert stream.getvalue() == ""
    assert read_run(tmp_path)[-1]["event"] == "finished"


def test_a_run_that_was_killed_and_resumed(tmp_path) -> None:
    clock = iter(range(100_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporter.time, "monotonic", lambda: float(next(clock)))
        killed = reporter_of(tmp_path)
        killed.__enter__()
        killed.train(50, loss=1.0, lr=0.1, images=10)
        before = read_run(tmp_path)[-1]["seconds"]
        killed.train(90, loss=0.1, lr=0.1, images=10)
        killed.tested(90, epoch=3, loss=0.1, accuracy=0.99, best=True)
        with (tmp_path / NAME).open("a") as file:
            file.write('{"event": "tra')
        with reporter_of(tmp_path, start=60) as tell:
            tell.train(100, loss=0.5, lr=0.1, images=10)
            tell.tested(100, epoch=4, loss=0.2, accuracy=0.7, best=True)
            tell.event("finished")
    lines = read_run(tmp_path)
    kept = [(line["event"], line.get("update")) for line in lines]
    assert kept == [
        ("start", 0),
        ("train", 50),
        ("torn", None),
        ("resume", 60),
        ("train", 100),
        ("test", 100),
        ("finished", 100),
    ]
    assert lines[0]["run"] == lines[3]["run"]
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    assert seconds == sorted(seconds)
    assert before < seconds[2] < before + 5, "the time goes on from the newest line that counts"
    result = tell.write_result()
    assert result["best"]["accuracy"] == 0.7
    assert result["starts"] == 2
    assert "started" in str(tell.table())


def test_a_start_from_nothing_in_a_used_folder_supersedes_all(tmp_path) -> None:
    with reporter_of(tmp_path) as tell:
        run_a_little(tell)
    with reporter_of(tmp_path) as tell:
        tell.train(25, loss=7.0, lr=0.1, images=10)
    assert [line["loss"] for line in read_run(tmp_path) if line["event"] == "train"] == [7.0]


def test_advance_is_cheap_and_refreshes_rarely(tmp_path, monkeypatch) -> None:
    shown = []
    monkeypatch.setattr(screen.Bar, "show", lambda self, update, *_: shown.append(update))
    now = 0.0
    monkeypatch.setattr(reporter.time, "monotonic", lambda: now)
    with reporter_of(tmp_path, terminal=True, updates=10**6) as tell:
        for update in range(10_000):
            now += 0.001
            tell.advance(update)
    assert 30 < len(shown) <= 51, "in ten seconds"


def test_advance_takes_microseconds(tmp_path) -> None:
    with reporter_of(tmp_path, terminal=True, updates=10**6) as tell:
        tell.advance(0)
        began = time.perf_counter()
        for update in range(20_000):
            tell.advance(update)
        assert (time.perf_counter() - began) / 20_000 < 20e-6


def test_numbers_that_are_not_finite(tmp_path) -> None:
    stream = io.StringIO()
    with reporter_of(tmp_path, stream=stream) as tell:
        tell.train(50, loss=math.nan, lr=0.1, grad_norm=math.inf, images=10)
        tell.tested(50, epoch=1, loss=math.inf, accuracy=0.1)
        tell.measured(50, {"kappa/0/input": math.inf})
        tell.event("nonfinite", update=50, loss=math.nan, layers={"head": math.nan})
        tell.advance(50)
        assert tell.write_result()["nonfinite"] == 1
    assert "loss nan" in stream.getvalue()
    assert "inf" in str(tell.table())
    for line in (tmp_path / NAME).read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_a_task_without_accuracy(tmp_path) -> None:
    with reporter_of(tmp_path) as tell:
        tell.train(50, loss=0.5, lr=0.1, images=10)
        tell.tested(50, epoch=2, loss=0.25, best=True)
        tell.measured(50, {})
    assert "loss 0.25 (epoch 2)" in str(tell.table())
    assert "monitor" not in [line["event"] for line in read_run(tmp_path)]


def test_a_full_disk_does_not_stop_the_run(tmp_path, monkeypatch) -> None:
    stream, write, full = io.StringIO(), os.write, False

    def half_then_full(file, data):
        if not full:
            return write(file, data)
        if len(data) > 20:
            return write(file, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_log.os, "write", half_then_full)
    with reporter_of(tmp_path, stream=stream) as tell:
        tell.train(25, loss=1.0, lr=0.1, images=10)
        full = True
        tell.train(50, loss=1.0, lr=0.1, images=10)
        tell.train(75, loss=1.0, lr=0.1, images=10)
        full = False
        tell.train(100, loss=1.0, lr=0.1, images=10)
        tell.event("finished")
    assert stream.getvalue().count("No space left on device") == 1
    lines = read_run(tmp_path)
    assert [line["update"] for line in lines if line["event"] == "train"] == [25, 100]
    (warning,) = (line for line in lines if line["event"] == "warning")
    assert "2 lines" in warning["text"]


def test_an_error_is_recorded_and_not_hidden(tmp_path) -> None:
    with pytest.raises(ZeroDivisionError), reporter_of(tmp_path):
        _ = 1 / 0
    last = read_run(tmp_path)[-1]
    assert (last["event"], last["text"]) == ("error", "ZeroDivisionError: division by zero")
    with pytest.raises(SystemExit), reporter_of(tmp_path):
        raise SystemExit(143)
    assert read_run(tmp_path)[-1]["event"] == "resume"


def test_an_unwritable_folder_is_an_error_at_the_start(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), reporter_of(tmp_path / "file"):
        pass


def test_result_is_replaced_at_once(tmp_path, monkeypatch) -> None:
    with reporter_of(tmp_path) as tell:
        tell.write_result()
        before = (tmp_path / "result.json").read_bytes()
        monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            tell.write_result({"more": 1})
    assert (tmp_path / "result.json").read_bytes() == before
