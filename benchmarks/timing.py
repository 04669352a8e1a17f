"""Timing two things in turns, in one process, so that the noise of the machine meets both."""

import csv
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def compare(plain: Callable[[], float], other: Callable[[], float], rounds: int) -> list[tuple[float, float]]:
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


def environment() -> str:
    is_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if is_gpu else f"{platform.machine()} CPU"
    threads = "" if is_gpu else f", {torch.get_num_threads()} threads"
    return f"{device}, torch {torch.__version__}, timm {timm.__version__}{threads}"


def write(path: Path, comment: str, titles: list[str], rows: list[list[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.write(f"# {environment()}; {comment}\n")
        writer = csv.writer(file)
        writer.writerow(titles)
        writer.writerows(rows)
