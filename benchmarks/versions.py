"""Graying by two versions of wellposed, in turns.

    git worktree add ../before TAG
    python -m benchmarks versions ../before/src [--rounds 7] [--out DIR]

Each version has a process of its own, and only one works at a time: a round measures both, so that the noise
of the machine meets both. A ratio is the other version's time over that of this one in the same round, so
more than 1 means that this one is faster. On a CPU the time is that of the process with one thread, and the
wall clock with two; on a GPU that of CUDA events.
"""

# A worker knows no more of wellposed than gray and broadcast, which every version has.

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

SHAPES = ((64, 196, 768), (64, 196, 192), (256, 64, 192), (32, 576, 384))
PASSES = ("forward", "forward+backward")
CLOCKS = {"cpu": ("process time, one thread", "wall clock, two threads"), "cuda": ("CUDA events",)}
METHODS = ("spectral", "spectral float32", "spectral floor 1e-4", "dct", "broadcast")
USUAL = {"cpu": METHODS[:2], "cuda": METHODS}


@dataclass(frozen=True)
class Case:
    """One call to measure."""

    shape: tuple[int, ...]
    method: str
    passes: str
    clock: str
    repeats: int = 1


@dataclass(frozen=True)
class Row:
    """Milliseconds of both versions, and ratios of the rounds: medians, first and third quartile, ends."""

    device: str
    shape: str
    clock: str
    passes: str
    method: str
    milliseconds: float
    other_milliseconds: float
    ratio: float
    ratio_first_quartile: float
    ratio_third_quartile: float
    ratio_low: float
    ratio_high: float


def _function(method: str) -> Callable[[Tensor], Tensor]:
    from wellposed.nn.functional import broadcast, gray  # here: the version that PYTHONPATH names

    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "spectral": lambda x: gray(x, 0.7),
        "spectral float32": lambda x: gray(x, 0.7, precision="float32"),
        "spectral floor 1e-4": lambda x: gray(x, 0.7, floor=1e-4),
        "dct": lambda x: gray(x, 0.95, "dct"),
        "broadcast": broadcast,
    }
    return calls[method]


def _call(case: Case, device: str) -> Callable[[], Any]:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(case.shape, generator=generator) + 0.3).to(device)
    upstream = torch.randn(case.shape, generator=generator).to(device)
    function = _function(case.method)

    def forward() -> Tensor:
        with torch.no_grad():
            return function(x)

    def both() -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, upstream)[0]

    return forward if case.passes == "forward" else both


def _milliseconds(call: Callable[[], Any], case: Case) -> float:
    if case.clock == "CUDA events":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(case.repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / case.repeats
    clock = time.process_time if case.clock.startswith("process") else time.perf_counter
    before = clock()
    for _ in range(case.repeats):
        call()
    return 1e3 * (clock() - before) / case.repeats


def work(device: str) -> None:
    """Answer each case on standard input with its milliseconds, until there are no more."""
    known: dict[Case, Callable[[], Any]] = {}
    for line in sys.stdin:
        values = json.loads(line)
        case = Case(**values | {"shape": tuple(values["shape"])})
        threads = 2 if case.clock == "wall clock, two threads" else 1
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if case not in known:  # the first call warms up
            known = {case: _call(case, device)} if device == "cpu" else known | {case: _call(case, device)}
            known[case]()
        print(json.dumps(_milliseconds(known[case], case)), flush=True)


class _Version:
    """A process that has one version."""

    def __init__(self, source: Path, device: str) -> None:
        here = Path(__file__).resolve().parent.parent
        path = os.pathsep.join([str(source.resolve()), str(here), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from benchmarks.versions import work; work({device!r})"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, case: Case) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(vars(case)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("expected a time, but the process of a version ended; its error is above.")
        return float(json.loads(line))

    def measure(self, case: Case) -> float:
        self.ask(case)
        return self.answer()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Versions:
    """Both versions, to be used as a context."""

    def __init__(self, other: Path, device: str) -> None:
        if not (other / "wellposed").is_dir():
            raise ValueError(f"expected a folder that holds the package wellposed, got {other}.")
        self.device = device
        self.both = (_Version(Path(__file__).parent.parent / "src", device), _Version(other, device))

    def __enter__(self) -> "Versions":
        return self

    def __exit__(self, *_: object) -> None:
        for version in self.both:
            version.end()

    def begin(self, cases: list[Case]) -> None:
        """Have both warm up the cases at the same time; :meth:`warmed` waits for them."""
        for case in cases:
            for version in self.both:
                version.ask(case)

    def warmed(self, cases: list[Case]) -> None:
        for _ in cases:
            for version in self.both:
                version.answer()

    def row(self, case: Case, rounds: int) -> Row:
        pairs = []
        for index in range(rounds):
            order = self.both if index % 2 == 0 else self.both[::-1]
            pair = {version: version.measure(case) for version in order}
            pairs.append([pair[version] for version in self.both])
        ratios = [other / own for own, other in pairs]
        low, middle, high = (
            statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
        )
        own, other = (statistics.median(times) for times in zip(*pairs, strict=True))
        shape = " x ".join(map(str, case.shape))
        about = (self.device, shape, case.clock, case.passes, case.method)
        return Row(*about, own, other, middle, low, high, min(ratios), max(ratios))


def cases(device: str, shapes: tuple[tuple[int, ...], ...] = SHAPES, repeats: int = 1) -> list[Case]:
    return [
        Case(shape, method, passes, clock, repeats)
        for shape in shapes
        for clock in CLOCKS[device]
        for passes in PASSES
        for method in USUAL[device]
    ]


def rows(other: Path, device: str, rounds: int, clock: str | None = None) -> Iterator[Row]:
    chosen = [
        case for case in cases(device, repeats=10 if device == "cuda" else 1) if clock in (None, case.clock)
    ]
    with Versions(other, device) as versions:
        for case in chosen:
            yield versions.row(case, rounds)


def show(row: Row) -> None:
    spread = f"{row.ratio_first_quartile:.2f} to {row.ratio_third_quartile:.2f}"
    print(
        f"{row.shape}, {row.clock}, {row.passes}, {row.method}: other / this {row.ratio:.2f} ({spread}), "
        f"{row.milliseconds:.4g} ms, other {row.other_milliseconds:.4g} ms",
        flush=True,
    )


def write(found: list[Row], path: Path) -> None:
    from wellposed.files import write_cells

    path.parent.mkdir(parents=True, exist_ok=True)
    cells = ([f"{v:.4g}" if isinstance(v, float) else v for v in astuple(row)] for row in found)
    write_cells(path, [[field.name for field in fields(Row)], *cells], lineterminator="\n")


def main(
    other: Annotated[Path, typer.Argument(help="folder with the other version's package wellposed")],
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    device: Annotated[str | None, typer.Option(help=r"cpu or cuda \[default: a GPU if there is one]")] = None,
    clock: Annotated[str | None, typer.Option(help=r"one of them alone \[default: all]")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for graying-versions-DEVICE.csv")] = None,
) -> None:
    """Graying by this version and by another, in turns."""
    on = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if on not in CLOCKS:
        raise SystemExit(f"error: device must be cpu or cuda, got {on}.")
    found = []
    if clock not in (None, *CLOCKS[on]):
        raise SystemExit(f"error: clock must be one of {', '.join(CLOCKS[on])}, got {clock!r}.")
    if out is not None:
        from benchmarks.timing import write_environment

        write_environment(out, f"graying-versions-{on}", {"rounds": rounds, "clock": clock})
    for row in rows(other, on, rounds, clock):
        show(row)
        found.append(row)
        if out is not None:
            write(found, out / f"graying-versions-{on}.csv")
