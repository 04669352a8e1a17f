"""Seconds and bytes of a call, two calls in turns, and the files that the numbers go to.

What is compared takes turns in one process, so that the noise of the machine meets both sides.
"""

import csv
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch

from wellposed.environment import environment
from wellposed.files import replacing, write_text

BLOCKS = 5
"""Blocks of calls that one measurement is made of; what they differ by is its spread."""

_MOST_CALLS = 1000


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_per_call(call: Callable[[], object], count: int, device: torch.device) -> float:
    synchronize(device)
    before = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - before) / count


def timed(call: Callable[[], object], device: torch.device, budget: float) -> list[float]:
    """Seconds of a call, one value a block of calls, within about ``budget`` seconds.

    A call that takes the whole budget is made once. The caller has warmed it up.
    """
    first = seconds_per_call(call, 1, device)
    if first >= budget:
        return [first]
    count = min(max(int(budget / BLOCKS / max(first, 1e-7)), 1), _MOST_CALLS)
    return [seconds_per_call(call, count, device) for _ in range(BLOCKS)]


class PeakMemory:
    """Bytes of a CUDA device that a piece of work took beyond what was there; None elsewhere.

    >>> with PeakMemory(torch.device("cpu")) as peak:
    ...     _ = torch.zeros(1000)
    >>> peak.bytes is None
    True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before


def release(device: torch.device) -> None:
    """Give cached memory back, so that one method's pieces do not stand in another's way."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def message(error: BaseException) -> str:
    """An error as one line of a table, with what kind it is."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    short = text if len(text) <= 200 else f"{text[:197]}..."
    return f"{type(error).__name__}: {short}" if short else type(error).__name__


def seconds(work: Callable[[], object]) -> float:
    """Of one call, on a GPU if there is one."""
    return seconds_per_call(work, 1, usual_device())


def usual_device(name: str | None = None) -> torch.device:
    """A device by its name; a GPU if there is one without."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def in_turns(
    plain: Callable[[], float], other: Callable[[], float], rounds: int
) -> list[tuple[float, float]]:
    """(plain, other) of each round; who goes first changes from round to round."""
    pairs = []
    for index in range(rounds):
        if index % 2:
            b, a = other(), plain()
        else:
            a, b = plain(), other()
        pairs.append((a, b))
    return pairs


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def write_environment(folder: Path, name: str, about: dict[str, Any]) -> None:
    """Write ``name``.json: versions, device, command, and what was measured how."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {**environment(), "about": about}
    write_text(folder / f"{name}.json", json.dumps(content, indent=1) + "\n")


def where() -> str:
    """Device and versions in a line."""
    is_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if is_gpu else f"{platform.machine()} CPU"
    threads = "" if is_gpu else f", {torch.get_num_threads()} threads"
    return f"{device}, torch {torch.__version__}, timm {timm.__version__}{threads}"


def write(path: Path, comment: str, titles: list[str], rows: list[list[object]]) -> None:
    """A CSV file whose first line says where its numbers come from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(f"# {where()}; {comment}\n")
        writer = csv.writer(file)
        writer.writerow(titles)
        writer.writerows(rows)
