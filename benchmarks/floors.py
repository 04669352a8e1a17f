"""The least time that an algorithm can take on a chip: bytes over bandwidth, operations over peak.

A matrix of tokens is n x d with n <= d: the smaller side is that of the Gram matrix. A product of a x b and
b x c is 2abc operations; one whose result is symmetric needs half of them. A product in float32's digits is
counted as three of halves (each number the sum of two float16), the cheapest way that keeps them. Bytes are
what must be moved: the input once, the result once, and what the backward pass keeps, once out and once in.
What stays on the chip costs nothing, so a real program is always slower.

    spectral   float64: Gram n^2 d, ``wide`` squarings n^3, Z X 2 n^2 d; halves: K - wide squarings 3 n^3
    backward   float64: sym(G X^T) 2 n^2 d, Z G + C X 4 n^2 d; halves: K times B C + C B 6 n^3; keeps K n x n
    dct        halves: D_N X D_D^T and back, 4 N D (N + D)
    backward   the same again; keeps the coefficients
    svd        float32: 6 n^2 d + 20 n^3 (Golub and Van Loan, R-SVD), U g V^T 2 n^2 d
    eigh       float64: Gram n^2 d, 9 n^3 with vectors (the same book), U g U^T n^3; float32: Z X 2 n^2 d

>>> peaks = Peaks(bandwidth=1e12, operations={"half": 1e12})
>>> floor_of(dct_work(10, 20, backward=False), peaks).seconds  # 24,000 operations at 1e12
2.4e-08
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

FLOAT, HALF = 4, 2
"""Bytes of a number."""


@dataclass(frozen=True)
class Peaks:
    """What a chip does in a second: bytes of its memory, operations by their kind."""

    bandwidth: float
    operations: Mapping[str, float]


_PEAKS = {
    "H200": Peaks(4.8e12, {"fp64": 67e12, "fp32": 67e12, "half": 990e12}),
}


def peaks_of(device_name: str) -> Peaks | None:
    """The peaks of a device by its name; None where they are not known.

    >>> peaks_of("NVIDIA H200").bandwidth, peaks_of("CPU")
    (4800000000000.0, None)
    """
    return next((peaks for name, peaks in _PEAKS.items() if name in device_name.split()), None)


@dataclass(frozen=True)
class Work:
    """Bytes to move, and operations by their kind."""

    bytes: float = 0.0
    operations: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: "Work") -> "Work":
        kinds = {*self.operations, *other.operations}
        summed = {kind: self.operations.get(kind, 0) + other.operations.get(kind, 0) for kind in kinds}
        return Work(self.bytes + other.bytes, summed)

    def __mul__(self, times: float) -> "Work":
        return Work(self.bytes * times, {kind: count * times for kind, count in self.operations.items()})


@dataclass(frozen=True)
class Floor:
    """Seconds for the bytes alone and for the operations alone; they may overlap."""

    moving: float
    computing: float

    @property
    def seconds(self) -> float:
        return max(self.moving, self.computing)


def floor_of(work: Work, peaks: Peaks) -> Floor:
    computing = sum(count / peaks.operations[kind] for kind, count in work.operations.items())
    return Floor(work.bytes / peaks.bandwidth, computing)


@dataclass(frozen=True)
class Chain:
    """Squarings of the spectral method, and how many of them, the first, are in float64."""

    steps: int
    wide: int


def chain_of(eps: float, floor: float = 1e-4, tolerance: float = 5e-4) -> Chain:
    """The chain for a power where float64 is fast."""
    from wellposed.linalg.spectral_fit import fit_power, wide_steps

    fit = fit_power(eps, floor, tolerance)
    return Chain(fit.steps, wide_steps(fit.steps, fit.delta, floor ** (eps - 1)))


def spectral_work(tokens: int, channels: int, chain: Chain, *, backward: bool, itemsize: int = FLOAT) -> Work:
    """Of one image, forward or forward and backward."""
    n, d = sorted((tokens, channels))
    square, cube, moved = n * n * d, n**3, n * d * itemsize
    narrow = chain.steps - chain.wide
    work = Work(2 * moved, {"fp64": 3 * square + chain.wide * cube, "half": 3 * narrow * cube})
    if not backward:
        return work
    kept = chain.steps * n * n * FLOAT
    return work + Work(3 * moved + 2 * kept, {"fp64": 6 * square, "half": 6 * chain.steps * cube})


def dct_work(tokens: int, channels: int, *, backward: bool, itemsize: int = FLOAT) -> Work:
    """Of one image, forward or forward and backward."""
    moved = tokens * channels * itemsize
    there_and_back = Work(2 * moved, {"half": 4 * tokens * channels * (tokens + channels)})
    if not backward:
        return there_and_back
    return there_and_back * 2 + Work(2 * tokens * channels * FLOAT)


def svd_work(tokens: int, channels: int, *, backward: bool) -> Work:
    """Of one image; the backward pass is seven products with tokens and two n x n ones (Daleckii-Krein)."""
    n, d = sorted((tokens, channels))
    square, cube, moved = n * n * d, n**3, n * d * FLOAT
    work = Work(2 * moved, {"fp32": 8 * square + 20 * cube})
    if not backward:
        return work
    kept = (n * n + n * d) * FLOAT
    return work + Work(2 * moved + 2 * kept, {"fp32": 14 * square + 4 * cube})


def eigh_work(tokens: int, channels: int, *, backward: bool) -> Work:
    """Of one image; backward: G X^T, Z G, C X, and six n x n products to get from the one to the other."""
    n, d = sorted((tokens, channels))
    square, cube, moved = n * n * d, n**3, n * d * FLOAT
    work = Work(2 * moved, {"fp64": square + 10 * cube, "fp32": 2 * square})
    if not backward:
        return work
    return work + Work(3 * moved + 4 * n * n * FLOAT, {"fp32": 4 * square, "fp64": 2 * square + 12 * cube})


def work_of(method: str, tokens: int, channels: int, *, backward: bool, eps: float) -> Work | None:
    """Of one image by a method's name as the growth table has it."""
    match method.removesuffix("-compiled"):
        case "spectral":
            return spectral_work(tokens, channels, chain_of(eps), backward=backward)
        case "dct":
            return dct_work(tokens, channels, backward=backward)
        case "svd" | "svd-gesvda":
            return svd_work(tokens, channels, backward=backward)
        case "eigh":
            return eigh_work(tokens, channels, backward=backward)
    return None


def broadcast_work(tokens: int, channels: int, *, scaled: bool, itemsize: int) -> Work:
    """Of one image and block, forward and backward, beyond the step without it.

    The mean is known when all tokens are, so the tokens are read once more on each way; the gradient of the
    scales reads them a third time.
    """
    return Work((3 if scaled else 2) * tokens * channels * itemsize)
