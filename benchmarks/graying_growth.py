"""How the cost of graying alone grows with tokens, channels and batch, and which method is faster where.

>>> operation("dct").eps
0.95
>>> def row(method, tokens, time):
...     size = {"tokens": tokens, "channels": 768, "batch": 1}
...     return GrowthRow(axis="tokens", method=method, passes="forward", microseconds=time, **size)
>>> rows = [row("spectral", 64, 2), row("spectral", 196, 5), row("dct", 64, 3), row("dct", 196, 4)]
>>> [str(found) for found in crossovers(rows)]
['tokens, forward: spectral is faster than dct up to 64, dct from 196 on']
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from benchmarks.floors import Floor, Peaks, floor_of, work_of
from benchmarks.timing import PeakMemory, message, release, timed
from wellposed.linalg.spectral_plan import spectral_plan
from wellposed.linalg.svd_power import power_gain
from wellposed.nn.functional import Method, gray
from wellposed.nn.graying import DEFAULT_EPS

KAPPA = 1e3


@dataclass(frozen=True)
class KnownTokens:
    """Images x (B, N, D) = U diag(+-s) V^T with the same s, up to the signs of each image."""

    x: Tensor
    U: Tensor  # (N, k), float64 on the CPU, with the signs of the first image
    s: Tensor  # (k,), from 1 down to 1/kappa
    V: Tensor  # (D, k)

    def error(self, grayed: Tensor, eps: float, above: float = 0.0) -> float:
        """Largest relative error of the first image's singular values, which should be s^eps, of s > above.

        By the known vectors: an error of second order in what the vectors turn is not seen.
        """
        first = grayed[0].detach().cpu().double()
        found = torch.einsum("nk,nd,dk->k", self.U, first, self.V)
        return (found / self.s**eps - 1).abs()[self.s > above].max().item()


def power_law_tokens(
    batch: int, tokens: int, channels: int, device: torch.device, *, kappa: float = KAPPA, seed: int = 0
) -> KnownTokens:
    """Tokens with the singular values i^-a, a such that the condition number is kappa; largest 1.

    >>> known = power_law_tokens(2, 8, 16, torch.device("cpu"))
    >>> round(torch.linalg.cond(known.x[1]).item())
    1000
    """
    generator = torch.Generator().manual_seed(seed)
    rank = min(tokens, channels)

    def orthonormal(rows: int) -> Tensor:
        # QR of a square or tall Gaussian matrix
        Q: Tensor = torch.linalg.qr(torch.randn(rows, rank, generator=generator, dtype=torch.float64)).Q
        return Q

    U, V = orthonormal(tokens), orthonormal(channels)
    s = kappa ** -(torch.arange(1, rank + 1, dtype=torch.float64).log() / torch.tensor(float(rank)).log())
    s = torch.ones_like(s) if rank == 1 else s
    signs = 1 - 2 * torch.randint(2, (batch, 1, rank), generator=generator).double()
    left = (U * s).to(device, torch.float32)
    right = V.mT.to(device, torch.float32)
    # One QR for all images: what is timed does not see the vectors.
    x = (left * signs.to(device, torch.float32)) @ right
    return KnownTokens(x, U * signs[0], s, V)


_COMPILED = "-compiled"


@dataclass(frozen=True)
class Operation:
    """Graying of x (B, N, D) by one method."""

    name: str
    call: Callable[[Tensor], Tensor]
    eps: float
    is_slow: bool
    """Warmed up on one image: a whole batch would cost as much as the measurement."""
    is_exact: bool
    """Whether the singular values of the result are those of the input to the power eps."""
    cuda_only: bool = False

    def exact_above(self, x: Tensor) -> float:
        """The singular value, relative to the largest, from which on the result is right."""
        return spectral_plan(x).floor if self.name.startswith("spectral") else 0.0

    def ready(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """The function to call for one size."""
        if self.cuda_only and device.type != "cuda":
            raise ValueError(
                f"{self.name} needs an NVIDIA GPU, got {device.type}; leave it out of --methods."
            )
        if not self.name.endswith(_COMPILED):
            return self.call
        # Else the sizes before count against the number of times that a function may be compiled.
        torch._dynamo.reset()
        return cast(Callable[[Tensor], Tensor], torch.compile(self.call, dynamic=False))


METHODS = ("spectral", "dct", "svd-gesvda", "eigh", "svd")
"""The fast ones first, so that a run that is cut short has them."""


def operation(name: str) -> Operation:
    """The operation of a name of :data:`METHODS`, with ``-compiled`` behind it through torch.compile."""
    plain = name.removesuffix(_COMPILED)
    if plain not in METHODS:
        raise ValueError(
            f"methods must be some of {', '.join(METHODS)}, with or without {_COMPILED}, got {name!r}."
        )
    base = plain.partition("-")[0]
    eps = DEFAULT_EPS[base] if base in DEFAULT_EPS else DEFAULT_EPS["svd"]
    references: dict[str, Any] = {"svd-gesvda": gray_by_gesvda, "eigh": gray_by_eigh}
    if plain in references:
        function = references[plain]

        def call(x: Tensor) -> Tensor:
            return cast(Tensor, function(x, eps))
    else:

        def call(x: Tensor) -> Tensor:
            # As in training on a GPU; of the methods only the DCT goes by it.
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                return gray(x, eps, cast(Method, plain))

    return Operation(
        name,
        call,
        eps,
        is_slow=plain in ("svd", "eigh", "svd-gesvda"),
        is_exact=plain != "dct",
        cuda_only=plain == "svd-gesvda",
    )


def spectral_code(device: torch.device) -> str:
    """What ``method="spectral"`` runs on a device: a time says nothing without it.

    By its digits, not by its name: where they are those of the SVD to the last bit, it is the SVD.
    """
    x = torch.randn(2, 12, 20, generator=torch.Generator().manual_seed(0)).to(device)
    eps = DEFAULT_EPS["spectral"]
    if torch.equal(gray(x, eps, "spectral"), gray(x, eps, "svd")):
        return "the SVD: equal to method svd to the last bit, so its times are those of svd"
    return str(spectral_plan(x))


def gray_by_gesvda(x: Tensor, eps: float) -> Tensor:
    """By cuSOLVER's approximate batched SVD, with autograd's own gradient."""
    U, s, Vh = torch.linalg.svd(x, full_matrices=False, driver="gesvda")
    gain = power_gain(s / s[..., :1], eps)
    grayed: Tensor = (U * (s * gain)[..., None, :]) @ Vh
    return grayed


def gray_by_eigh(x: Tensor, eps: float) -> Tensor:
    """By the eigenvalues of the smaller Gram matrix in float64, with autograd's own gradient."""
    if x.shape[-2] > x.shape[-1]:
        return gray_by_eigh(x.mT, eps).mT
    wide = x.double()
    values, vectors = torch.linalg.eigh(wide @ wide.mT)
    relative = (values / values[..., -1:]).clamp(min=1e-14).sqrt()
    gain = power_gain(relative, eps)
    Z = (vectors * gain[..., None, :]) @ vectors.mT
    grayed: Tensor = Z.to(x.dtype) @ x
    return grayed


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


@dataclass(frozen=True)
class Crossover:
    """Two methods over one axis; ``faster`` names the one that wins at each size."""

    axis: str
    passes: str
    pair: tuple[str, str]
    sizes: tuple[int, ...]
    faster: tuple[str, ...]

    @property
    def changes(self) -> list[int]:
        """The sizes from which on another one is faster than before."""
        return [
            size
            for size, before, now in zip(self.sizes[1:], self.faster, self.faster[1:], strict=False)
            if before != now
        ]

    def __str__(self) -> str:
        first, where = self.faster[0], f"{self.axis}, {self.passes}"
        other = next(name for name in self.pair if name != first)
        if not self.changes:
            span = f"{self.sizes[0]} to {self.sizes[-1]}" if len(self.sizes) > 1 else f"{self.sizes[0]}"
            return f"{where}: {first} is faster than {other} at every size measured ({span})"
        until = self.sizes[self.sizes.index(self.changes[0]) - 1]
        winners = (self.faster[self.sizes.index(size)] for size in self.changes)
        then = ", ".join(
            f"{winner} from {size} on" for winner, size in zip(winners, self.changes, strict=True)
        )
        return f"{where}: {first} is faster than {other} up to {until}, {then}"


def crossovers(rows: Iterable[GrowthRow], of: str = "spectral") -> list[Crossover]:
    """``of`` against each other method, for each axis and pass, at the sizes where both were measured."""
    return list(_crossovers(list(rows), of))


def _crossovers(rows: list[GrowthRow], of: str) -> Iterator[Crossover]:
    others = dict.fromkeys(row.method for row in rows if row.method != of)
    for axis in AXES:
        for passes in PASSES:
            here = [row for row in rows if (row.axis, row.passes) == (axis, passes)]
            for other in others:
                own, theirs = _times(here, of), _times(here, other)
                sizes = tuple(sorted(own.keys() & theirs.keys()))
                if sizes:
                    faster = tuple(of if own[size] <= theirs[size] else other for size in sizes)
                    yield Crossover(axis, passes, (of, other), sizes, faster)


def _times(rows: list[GrowthRow], method: str) -> dict[int, float]:
    return {
        row.size: row.microseconds for row in rows if row.method == method and row.microseconds is not None
    }
