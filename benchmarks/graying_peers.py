"""Graying on a CPU compared with other ways to it, in turns in one process.

Every round measures all of them, so that the noise of the machine meets all. A ratio is to ``spectral`` in
the same round. Process time counts the work of all threads, wall clock is what a user waits.

    chain          the products that other devices take, in float32
    eigh           the Gram matrix's eigenvalues in float64, with autograd's own gradient
    scipy eigh     scipy.linalg.eigh of each Gram matrix and the products in float64; forward only
    scipy dct      scipy.fft.dctn and back without a gradient; forward only
    svd            torch.linalg.svd with Daleckii and Krein's gradient
    polar          Newton-Schulz steps of fifth order (PolarExpress with fixed coefficients): eps = 0 only
    dct products   the DCT as two matrix products
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from scipy import fft, linalg
from torch import Tensor

from benchmarks.graying_growth import BOTH, FORWARD, gray_by_eigh
from benchmarks.timing import write_environment
from wellposed.files import write_cells
from wellposed.linalg import dct_matrix
from wellposed.linalg.spectral_fit import chain_coefficients
from wellposed.linalg.spectral_plan import FLOOR_FLOAT32
from wellposed.linalg.spectral_power import _Chain
from wellposed.linalg.svd_power import power_gain
from wellposed.nn.functional import gray

PEERS = "graying-peers"
SHAPES = ((16, 196, 768), (16, 196, 192), (64, 64, 192), (8, 576, 384))
EPS, DCT_EPS = 0.7, 0.95
CLOCKS: dict[str, tuple[int, Callable[[], float]]] = {
    "process time, one thread": (1, time.process_time),
    "wall clock, two threads": (2, time.perf_counter),
}
STEPS = 20
"""Of Newton and Schulz, which bring singular values of 1e-3 to 1."""


@dataclass(frozen=True)
class PeerRow:
    """Milliseconds of a call, and its ratio to that of ``spectral``: medians, smallest and largest."""

    shape: str
    clock: str
    passes: str
    method: str
    milliseconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int


def gray_by_chain(x: Tensor) -> Tensor:
    coefficients, delta = chain_coefficients(EPS, FLOOR_FLOAT32, 7e-4, x.device)
    tokens = x if x.shape[1] <= x.shape[2] else x.mT
    y: Tensor = _Chain.apply(tokens, coefficients, delta, True, torch.float32, x.requires_grad)[0]
    return y if x.shape[1] <= x.shape[2] else y.mT


def polar_factor(x: Tensor) -> Tensor:
    """U V^T."""
    if x.shape[1] > x.shape[2]:
        return polar_factor(x.mT).mT
    y: Tensor = x / torch.linalg.matrix_norm(x)[:, None, None]
    for _ in range(STEPS):
        A = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(A, A, A, beta=-1.25, alpha=0.375), y, beta=1.875)
    return y


def gray_by_dct_products(x: Tensor) -> Tensor:
    rows, columns = dct_matrix(x.shape[1], like=x), dct_matrix(x.shape[2], like=x)
    coefficients = rows @ x @ columns.mT
    magnitude = coefficients.abs()
    gain = power_gain(magnitude / magnitude.amax((-2, -1), keepdim=True), DCT_EPS)
    y: Tensor = rows.mT @ (coefficients * gain) @ columns
    return y


def gray_by_scipy(x: Tensor) -> Tensor:
    if x.shape[1] > x.shape[2]:
        return gray_by_scipy(x.mT).mT
    grayed = []
    for tokens in x.double():
        values, vectors = linalg.eigh((tokens @ tokens.mT).numpy(), driver="evd")
        gain = torch.from_numpy(values / values[-1]) ** ((EPS - 1) / 2)
        Q = torch.from_numpy(vectors)
        grayed.append(((Q * gain) @ (Q.mT @ tokens)).to(x.dtype))
    return torch.stack(grayed)


def gray_by_scipy_dct(x: Tensor) -> Tensor:
    coefficients = torch.from_numpy(fft.dctn(x.numpy(), axes=(-2, -1), norm="ortho"))
    magnitude = coefficients.abs()
    gain = power_gain(magnitude / magnitude.amax((-2, -1), keepdim=True), DCT_EPS)
    return torch.from_numpy(fft.idctn((coefficients * gain).numpy(), axes=(-2, -1), norm="ortho"))


METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "spectral": lambda x: gray(x, EPS),
    "spectral float32": lambda x: gray(x, EPS, precision="float32"),
    "chain": gray_by_chain,
    "eigh": lambda x: gray_by_eigh(x, EPS),
    "svd": lambda x: gray(x, EPS, "svd"),
    "polar": polar_factor,
    "dct": lambda x: gray(x, DCT_EPS, "dct"),
    "dct products": gray_by_dct_products,
    "scipy eigh": gray_by_scipy,
    "scipy dct": gray_by_scipy_dct,
}
FORWARD_ONLY = ("scipy eigh", "scipy dct")


def measure_peers(shapes: tuple[tuple[int, int, int], ...] = SHAPES, rounds: int = 3) -> Iterator[PeerRow]:
    """All methods at each shape, forward alone and with the gradient."""
    for name, (threads, clock) in CLOCKS.items():
        for shape in shapes:
            x, upstream = (
                torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + shift
                for seed, shift in ((0, 0.3), (1, 0.0))
            )
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                for passes in (FORWARD, BOTH):
                    yield from _in_turns(shape, x, upstream if passes == BOTH else None, name, clock, rounds)
            finally:
                torch.set_num_threads(before)


def _in_turns(
    shape: tuple[int, int, int],
    x: Tensor,
    upstream: Tensor | None,
    clock_name: str,
    clock: Callable[[], float],
    rounds: int,
) -> Iterator[PeerRow]:
    methods = {k: f for k, f in METHODS.items() if upstream is None or k not in FORWARD_ONLY}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for index in range(rounds + 1):
        for name, method in methods.items():
            start = clock()
            _call(method, x, upstream)
            if index:  # the first warms up
                seconds[name].append(clock() - start)
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, seconds["spectral"], strict=True)]
        numbers = (1e3 * statistics.median(own), statistics.median(ratios), min(ratios), max(ratios))
        passes = FORWARD if upstream is None else BOTH
        yield PeerRow(" x ".join(map(str, shape)), clock_name, passes, name, *numbers, rounds)


def _call(method: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor | None) -> None:
    if upstream is None:
        with torch.no_grad():
            method(x)
        return
    leaf = x.detach().requires_grad_()
    torch.autograd.grad(method(leaf), leaf, upstream)


def run_peers(out: Path | None, console: Console) -> list[PeerRow]:
    """Measure, print the table; with ``out`` write it after every line."""
    if out is not None:
        write_environment(out, PEERS, {"eps": EPS, "dct_eps": DCT_EPS, "polar_steps": STEPS})
    rows: list[PeerRow] = []
    for row in measure_peers():
        rows.append(row)
        if out is not None:
            cells = ([f"{v:.4g}" if isinstance(v, float) else v for v in astuple(row)] for row in rows)
            columns = [field.name for field in fields(PeerRow)]
            write_cells(out / f"{PEERS}.csv", [columns, *cells], lineterminator="\n")
    table = Table(title="Graying on a CPU: ratio to spectral (range), milliseconds")
    for column in ("shape", "clock", "pass", "method", "ratio", "ms"):
        table.add_column(column)
    for row in rows:
        ratio = f"{row.ratio:.2f} ({row.ratio_low:.2f} to {row.ratio_high:.2f})"
        table.add_row(row.shape, row.clock, row.passes, row.method, ratio, f"{row.milliseconds:.1f}")
    console.print(table)
    return rows
