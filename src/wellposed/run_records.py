"""``run.jsonl``: what happened in a run, one JSON object a line; ``result.json``: its end in a few numbers.

Each line has ``event``, ``update``, ``time`` (UTC) and ``seconds`` (of training so far), then its numbers.
JSON has no NaN and no infinity; they are written as the texts "nan", "inf" and "-inf", and :func:`read_run`
gives numbers back.

A run that was killed resumes from its newest checkpoint, a few updates before its last line. The lines in
between stay in the file. The next one, ``{"event": "resume", "update": n}``, says that they no longer count.

The summary is made from the lines alone: so it is the same for a run that was resumed.

>>> import tempfile
>>> folder = Path(tempfile.mkdtemp())
>>> log = RunLog(folder / NAME)
>>> for event, update in [("train", 50), ("train", 100), ("resume", 60), ("train", 80)]:
...     log.write({"event": event, "update": update})
>>> [(line["event"], line["update"]) for line in read_run(folder)]
[('train', 50), ('resume', 60), ('train', 80)]
"""

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wellposed.files import parse_json, plain, read_bytes, read_object
from wellposed.records import AT_LEAST

NAME, RESULT = "run.jsonl", "result.json"
MOST_BYTES = 2**32
NUMBERS = ("train", "monitor", "test")
"""Events of which the newest of an update counts."""

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class RunLog:
    """Appends lines. One that a kill has torn is left alone, the next starts on a line of its own."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line; after it returns, a kill of the process cannot lose the line."""
        text = json.dumps(plain(line), allow_nan=False, ensure_ascii=False)
        left = (("\n" if self._torn else "") + text + "\n").encode()
        # A full disk may take half of it.
        self._torn = True
        while left:
            left = left[os.write(self._file, left) :]
        self._torn = False

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_run(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run that count, in order.

    Lines that a resume or a rollback has superseded are skipped. A line that was cut off by a kill appears
    as ``{"event": "torn", "line": its number}``.
    """
    path = Path(folder) / NAME
    if not path.is_file():
        raise FileNotFoundError(f"expected a {NAME} in {folder}, there is none; is it the folder of a run?")
    lines = read_bytes(path, MOST_BYTES).split(b"\n")
    return current(_parse(number, line) for number, line in enumerate(lines, 1) if line)


def current(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that still count after the resumes and rollbacks among them."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        event, update = line["event"], line.get("update", 0)
        if event == "resume":
            kept = [other for other in kept if other.get("update", 0) <= update]
        elif event == "rollback":
            # What led to it, a non-finite loss, stays; the numbers on the way there go.
            passed = (*NUMBERS, "checkpoint")
            kept = [
                other for other in kept if other["event"] not in passed or other.get("update", 0) <= update
            ]
        kept.append(line)
    newest = {_place(line): line for line in kept if line["event"] in NUMBERS}
    return [line for line in kept if newest.get(_place(line), line) is line]


def _place(line: Mapping[str, Any]) -> tuple[Any, Any]:
    return line["event"], line.get("update")


def _parse(number: int, line: bytes) -> dict[str, Any]:
    try:
        values = parse_json(line.decode())
    except ValueError:
        values = None
    if not isinstance(values, dict) or "event" not in values:
        return {"event": "torn", "line": number}
    return {
        name: _NOT_FINITE.get(value, value) if isinstance(value, str) else value
        for name, value in values.items()
    }


def summarise(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What :func:`read_run` gives, as one mapping of plain values.

    ``test`` is the last test and ``best`` the last one that was better than all before it; ``kappa`` has the
    worst block of each position and ``entropy`` the mean over the blocks, at the first and last measurement.

    >>> summarise([
    ...     {"event": "monitor", "update": 0, "kappa/0/input": 5.0, "kappa/1/input": 9.0},
    ...     {"event": "train", "update": 10, "loss": 0.5, "images_per_second": 100.0, "seconds": 2.0},
    ...     {"event": "test", "update": 10, "epoch": 1, "loss": 0.4, "accuracy": 0.9, "best": True},
    ... ])["kappa"]
    {'input': {'first': 9.0, 'last': 9.0}}
    """
    trained, tested, monitored = (_of(lines, event) for event in ("train", "test", "monitor"))
    rates = [line["images_per_second"] for line in trained if "images_per_second" in line]
    return {
        "finished": any(line["event"] == "finished" for line in lines),
        "updates": max((line.get("update", 0) for line in lines), default=0),
        "seconds": max((line.get("seconds", 0.0) for line in lines), default=0.0),
        "images_per_second": statistics.median(rates) if rates else None,
        "train": _without(trained[-1], "images") if trained else None,
        "test": _without(tested[-1], "best") if tested else None,
        "best": _without(_best(tested), "best"),
        "kappa": _first_and_last([_worst_kappas(line) for line in monitored]),
        "entropy": _first_and_last([_mean_entropy(line) for line in monitored]).get("entropy"),
        "starts": sum(line["event"] in ("start", "resume") for line in lines),
        "nonfinite": len(_of(lines, "nonfinite")),
        "rollbacks": len(_of(lines, "rollback")),
        "collapsed": bool(_of(lines, "collapsed")),
    }


def read_result(folder: Path) -> dict[str, Any]:
    """What is in ``result.json``; an error names the file."""
    path = folder / RESULT

    def damaged(why: object) -> ValueError:
        return ValueError(
            f"expected a JSON object in {path}, which is damaged ({why}); delete that file, and the command "
            "that trained makes it again from the last checkpoint."
        )

    try:
        values = read_object(path)
    except ValueError as error:
        raise damaged(error) from error
    for name in ("test", "best", "about"):
        if not isinstance(values.get(name), (dict, type(None))):
            raise damaged(f"its {name} is a {type(values[name]).__name__}")
    return values


def best_accuracy(summary: Mapping[str, Any]) -> float | None:
    """Of the best test, which the weights in ``best`` had: those of the run, or their moving average.

    >>> best_accuracy({"best": {"accuracy": 0.5, "ema_accuracy": 0.75}}), best_accuracy({"best": None})
    (0.75, None)
    """
    best = summary.get("best") or {}
    found = (best.get("accuracy"), best.get("ema_accuracy"))
    return max((value for value in found if isinstance(value, (int, float))), default=None)


def _of(lines: Sequence[Mapping[str, Any]], event: str) -> list[Mapping[str, Any]]:
    return [line for line in lines if line["event"] == event]


def _best(tested: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return next((line for line in reversed(tested) if line.get("best")), None)


def _without(line: Mapping[str, Any] | None, *names: str) -> dict[str, Any] | None:
    without = ("event", "time", "seconds", *names)
    return None if line is None else {key: value for key, value in line.items() if key not in without}


def of_blocks(line: Mapping[str, Any], measure: str) -> dict[tuple[int, str], tuple[float, bool]]:
    """By block and position, a monitor's numbers of a measure, and whether each is a lower bound.

    >>> of_blocks({"kappa/0/input": 9e6, "kappa/0/input/at_least": 1.0, "kappa/input/worst": 9e6}, "kappa")
    {(0, 'input'): (9000000.0, True)}
    """
    found = {}
    for key, value in line.items():
        name, _, place = key.partition("/")
        block, _, position = place.partition("/")
        if name == measure and block.isdigit() and not key.endswith(AT_LEAST):
            found[int(block), position] = value, bool(line.get(key + AT_LEAST))
    return found


def _worst_kappas(line: Mapping[str, Any]) -> dict[str, float]:
    """Of each position; with ``POSITION/at_least`` where one of them is a bound."""
    worst: dict[str, float] = {}
    for (_, position), (value, is_bound) in of_blocks(line, "kappa").items():
        worst[position] = max(value, worst.get(position, value))
        worst |= {position + AT_LEAST: 1.0} if is_bound else {}
    return worst


def _mean_entropy(line: Mapping[str, Any]) -> dict[str, float]:
    values = [value for value, _ in of_blocks(line, "entropy").values()]
    return {"entropy": statistics.fmean(values)} if values else {}


def _first_and_last(measured: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """For each name, its first and last value; ``first/at_least`` is 1 where that is a bound."""
    found: dict[str, dict[str, float]] = {}
    for values in measured:
        for name in values:
            if not name.endswith(AT_LEAST):
                one = found.setdefault(name, _of_one("first", values, name))
                one.pop(f"last{AT_LEAST}", None)
                one |= _of_one("last", values, name)
    return found


def _of_one(when: str, values: Mapping[str, float], name: str) -> dict[str, float]:
    is_bound = {when + AT_LEAST: 1.0} if values.get(name + AT_LEAST) else {}
    return {when: values[name]} | is_bound
