"""run.jsonl: strict JSON, appended, and right after any kill."""

import json
import math

import numpy as np
import pytest
import torch

from wellposed.run_records import NAME, RunLog, read_run


def write(folder, *lines):
    log = RunLog(folder / NAME)
    for line in lines:
        log.write(line)
    log.close()


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_numbers_come_back_and_the_file_is_strict_json(tmp_path) -> None:
    values = {
        "nan": math.nan,
        "inf": math.inf,
        "low": -math.inf,
        "third": 1 / 3,
        "n": 3,
        "yes": True,
        "no": None,
    }
    write(tmp_path, {"event": "train", "update": 1, **values})
    (line,) = (tmp_path / NAME).read_text().splitlines()
    written = json.loads(line, parse_constant=refuse)
    assert (written["nan"], written["inf"], written["low"]) == ("nan", "inf", "-inf")
    (read,) = read_run(tmp_path)
    assert math.isnan(read.pop("nan"))
    del values["nan"]
    assert read == {"event": "train", "update": 1, **values}


def test_values_that_are_no_plain_python(tmp_path) -> None:
    scalars = {
        "a": np.float32(0.5),
        "b": np.int64(3),
        "c": torch.tensor(2.0),
        "path": tmp_path,
        "d": (1, [2.5]),
    }
    write(tmp_path, {"event": "x", "update": 0, **scalars})
    (read,) = read_run(tmp_path)
    assert read == {
        "event": "x",
        "update": 0,
        "a": 0.5,
        "b": 3,
        "c": 2.0,
        "path": str(tmp_path),
        "d": [1, [2.5]],
    }


def test_a_line_torn_anywhere_is_passed_over_and_the_next_one_is_whole(tmp_path) -> None:
    write(tmp_path, {"event": "train", "update": 1}, {"event": "train", "update": 2, "text": "schön"})
    whole = (tmp_path / NAME).read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start + 1, len(whole) - 1):
        (tmp_path / NAME).write_bytes(whole[:cut])
        assert [line["event"] for line in read_run(tmp_path)] == ["train", "torn"]
        write(tmp_path, {"event": "resume", "update": 1})
        events = [(line["event"], line.get("update"), line.get("line")) for line in read_run(tmp_path)]
        assert events == [("train", 1, None), ("torn", None, 2), ("resume", 1, None)], cut


def test_a_last_line_that_only_lacks_its_end_counts(tmp_path) -> None:
    (tmp_path / NAME).write_bytes(b'{"event": "train", "update": 1}')
    write(tmp_path, {"event": "train", "update": 2})
    assert [line["update"] for line in read_run(tmp_path)] == [1, 2]


def test_zeros_that_a_power_cut_leaves_are_passed_over(tmp_path) -> None:
    write(tmp_path, {"event": "train", "update": 1})
    with (tmp_path / NAME).open("ab") as file:
        file.write(b"\0" * 64)
    write(tmp_path, {"event": "train", "update": 2})
    assert [line["event"] for line in read_run(tmp_path)] == ["train", "torn", "train"]


def test_resume_supersedes_later_updates(tmp_path) -> None:
    write(
        tmp_path,
        {"event": "start", "update": 0},
        {"event": "train", "update": 50, "loss": 1.0},
        {"event": "checkpoint", "update": 60},
        {"event": "train", "update": 100, "loss": 2.0},
        {"event": "note", "update": 100, "text": "lost"},
        {"event": "resume", "update": 60},
        {"event": "train", "update": 100, "loss": 3.0},
        {"event": "resume", "update": 100},
        {"event": "finished", "update": 150},
    )
    kept = [(line["event"], line["update"], line.get("loss")) for line in read_run(tmp_path)]
    assert kept == [
        ("start", 0, None),
        ("train", 50, 1.0),
        ("checkpoint", 60, None),
        ("resume", 60, None),
        ("train", 100, 3.0),
        ("resume", 100, None),
        ("finished", 150, None),
    ]


def test_the_newest_numbers_of_an_update_count(tmp_path) -> None:
    write(
        tmp_path,
        {"event": "monitor", "update": 60, "kappa/0/input": 1.0},
        {"event": "train", "update": 60, "loss": 1.0},
        {"event": "resume", "update": 60},
        {"event": "monitor", "update": 60, "kappa/0/input": 2.0},
    )
    kept = read_run(tmp_path)
    assert [line["event"] for line in kept] == ["train", "resume", "monitor"]
    assert kept[-1]["kappa/0/input"] == 2.0


def test_rollback_supersedes_numbers_but_not_what_led_to_it(tmp_path) -> None:
    write(
        tmp_path,
        {"event": "train", "update": 50},
        {"event": "train", "update": 100},
        {"event": "nonfinite", "update": 101},
        {"event": "rollback", "update": 60},
        {"event": "train", "update": 100},
    )
    kept = [(line["event"], line["update"]) for line in read_run(tmp_path)]
    assert kept == [("train", 50), ("nonfinite", 101), ("rollback", 60), ("train", 100)]


def test_two_writers_append(tmp_path) -> None:
    first, second = RunLog(tmp_path / NAME), RunLog(tmp_path / NAME)
    for update in range(4):
        (first if update % 2 else second).write({"event": "x", "update": update})
    assert [line["update"] for line in read_run(tmp_path)] == [0, 1, 2, 3]


def test_no_run(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a run\.jsonl"):
        read_run(tmp_path)
