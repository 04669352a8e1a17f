"""How the cost of graying alone grows with tokens, channels and batch."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from wellposed.bench.floors import Floor, Peaks, floor_of, work_of
from wellposed.bench.inputs import KnownTokens, power_law_tokens
from wellposed.bench.operations import Operation
from wellposed.bench.timing import PeakMemory, message, release, timed

Axis = Literal["tokens", "channels", "batch"]
AXES: tuple[Axis, ...] = ("tokens", "channels", "batch")
FORWARD, BOTH = "forward", "forward+backward"
PASSES = (FORWARD, BOTH)

TOKENS, CHANNELS = 196, 768
"""Of ViT-B at 224 pixels: what stays the same while another axis grows."""

_BUDGET = 0.15
"""Seconds that one measurement aims at."""


@dataclass(frozen=True)
class Point:
    """One size."""

    axis: Axis
    tokens: int
    channels: int
    batch: int

    @property
    def size(self) -> int:
        """Where on its axis it lies."""
        return {"tokens": self.tokens, "channels": self.channels, "batch": self.batch}[self.axis]

    @property
    def cost(self) -> float:
        """Of one image, up to a factor: all the exact methods cost N D min(N, D)."""
        return self.tokens * self.channels * min(self.tokens, self.channels)


@dataclass(frozen=True, kw_only=True)
class GrowthRow:
    """One measurement; times are microseconds an image, memory MiB an image."""

    axis: str
    tokens: int
    channels: int
    batch: int
    method: str
    passes: str
    microseconds: float | None = None
    low: float | None = None
    high: float | None = None
    peak_mib: float | None = None
    floor: float | None = None
    floor_bytes: float | None = None
    floor_operations: float | None = None
    error: float | None = None
    """Largest relative error of a singular value that the method promises, of one image; None for DCT."""
    status: str = "ok"
    note: str = ""

    @property
    def size(self) -> int:
        return int(getattr(self, self.axis))


def points(axis: Axis, tokens: Sequence[int], channels: Sequence[int], batches: Sequence[int]) -> list[Point]:
    """The sizes of an axis, ascending; of larger matrices fewer, so that all hold the same numbers."""
    most = max(batches)
    if axis == "batch":
        return [Point(axis, TOKENS, CHANNELS, batch) for batch in sorted(batches)]

    def point(n: int, d: int) -> Point:
        return Point(axis, n, d, min(most, max(most * TOKENS * CHANNELS // (n * d), 1)))

    if axis == "tokens":
        return [point(n, CHANNELS) for n in sorted(tokens)]
    return [point(TOKENS, d) for d in sorted(channels)]


def batch_within(point: Point, before: Point, seconds: float, limit: float) -> int:
    """How many images of a point one call does in ``limit`` seconds, by what another point took.

    Only as many as the point has; a power of two where it must be fewer.

    >>> batch_within(Point("tokens", 200, 800, 64), Point("tokens", 100, 800, 64), seconds=1.0, limit=2.0)
    32
    """
    predicted = seconds / before.batch * point.cost / before.cost
    if predicted * point.batch <= limit:
        return point.batch
    return int(2 ** max(int(limit / predicted), 1).bit_length()) // 2


def grow(
    operation: Operation,
    sizes: Sequence[Point],
    device: torch.device,
    *,
    limit: float,
    peaks: Peaks | None = None,
    seed: int = 0,
    known: dict[tuple[str, Point], "Measured"] | None = None,
) -> Iterator[GrowthRow]:
    """Measure one method over the sizes of one axis, smallest first.

    A slow method gets fewer images where a call with all of them would take longer than ``limit`` seconds,
    except on the batch axis. If a call took longer all the same, larger sizes are skipped.

    Args:
        known: what was measured already, filled and used: axes cross.
    """
    known = {} if known is None else known
    last: tuple[Point, float] | None = None
    for point in sizes:
        if last is not None and last[1] > limit:
            taken = f"{last[0].axis} {last[0].size} took {last[1]:.2g} s, over the limit of {limit:g} s"
            yield from _empty_rows(operation.name, point, "skipped", taken)
            continue
        if last is not None and point.axis != "batch":
            point = replace(point, batch=batch_within(point, *last, limit))
        key = (operation.name, replace(point, axis="tokens"))
        if key not in known:
            known[key] = measure(operation, point, device, peaks, seed)
        measured = known[key]
        yield from (replace(row, axis=point.axis) for row in measured.rows)
        if measured.seconds is not None:
            last = (point, measured.seconds)


@dataclass(frozen=True)
class Measured:
    """The rows of one method at one size, and the seconds of its longest call."""

    rows: list[GrowthRow]
    seconds: float | None


def measure(
    operation: Operation, point: Point, device: torch.device, peaks: Peaks | None, seed: int = 0
) -> Measured:
    """Forward, and forward with backward; what goes wrong is a row too."""
    rows: list[GrowthRow] = []
    longest: float | None = None
    try:
        ready = operation.ready(device)
        known = power_law_tokens(point.batch, point.tokens, point.channels, device, seed=seed)
    except Exception as error:
        return Measured(_empty_rows(operation.name, point, "failed", message(error)), None)
    for passes in PASSES:
        try:
            call = _forward(ready) if passes == FORWARD else _forward_and_backward(ready, known.x)
            row, seconds = _measure_pass(operation, point, passes, call, known, device)
            rows.append(_with_floor(row, operation, peaks))
            longest = max(seconds, longest or 0.0)
        except Exception as error:
            note = message(error)
            rows += [
                row for row in _empty_rows(operation.name, point, "failed", note) if row.passes == passes
            ]
    del known, ready
    release(device)
    return Measured(rows, longest)


def _measure_pass(
    operation: Operation,
    point: Point,
    passes: str,
    call: Callable[[Tensor], Tensor],
    known: KnownTokens,
    device: torch.device,
) -> tuple[GrowthRow, float]:
    call(known.x[:1] if operation.is_slow else known.x)
    with PeakMemory(device) as peak:
        seconds = timed(lambda: call(known.x), device, _BUDGET)
    error = None
    if operation.is_exact and passes == FORWARD:
        # Of the whole batch where that is quick: some drivers have other code for a single matrix.
        checked = known.x if seconds[-1] < _BUDGET else known.x[:1]
        error = known.error(call(checked), operation.eps, operation.exact_above(known.x))
    scale = 1e6 / point.batch
    row = GrowthRow(
        axis=point.axis,
        tokens=point.tokens,
        channels=point.channels,
        batch=point.batch,
        method=operation.name,
        passes=passes,
        microseconds=statistics.median(seconds) * scale,
        low=min(seconds) * scale,
        high=max(seconds) * scale,
        peak_mib=None if peak.bytes is None else peak.bytes / 2**20 / point.batch,
        error=error,
    )
    # What the method takes, not what the machine did beside it, decides about larger sizes.
    return row, min(seconds)


def _forward(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            return function(x)

    return call


def _forward_and_backward(function: Callable[[Tensor], Tensor], like: Tensor) -> Callable[[Tensor], Tensor]:
    # Not the tokens themselves, whose gradient has a special form.
    upstream = torch.randn(like.shape, generator=torch.Generator().manual_seed(1)).to(like)

    def call(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf, upstream[: len(x)])
        return gradient

    return call


def _with_floor(row: GrowthRow, operation: Operation, peaks: Peaks | None) -> GrowthRow:
    if peaks is None:
        return row
    backward = row.passes == BOTH
    work = work_of(row.method, row.tokens, row.channels, backward=backward, eps=operation.eps)
    if work is None:
        return row
    floor: Floor = floor_of(work, peaks)
    return replace(
        row,
        floor=floor.seconds * 1e6,
        floor_bytes=floor.moving * 1e6,
        floor_operations=floor.computing * 1e6,
    )


def _empty_rows(method: str, point: Point, status: str, note: str) -> list[GrowthRow]:
    return [
        GrowthRow(
            axis=point.axis,
            tokens=point.tokens,
            channels=point.channels,
            batch=point.batch,
            method=method,
            passes=passes,
            status=status,
            note=note,
        )
        for passes in PASSES
    ]
