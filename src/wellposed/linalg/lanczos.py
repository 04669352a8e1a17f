r"""Singular values of a matrix that is known only by its products: Golub-Kahan-Lanczos.

From a unit vector v_1 the products with A and its adjoint build orthonormal bases and a bidiagonal B:

.. math::
    A V_j = U_j B_j, \qquad A^T U_j = V_j B_j^T + \beta_j v_{j+1} e_j^T

The singular values of B (Ritz values) approach those of A, from the ends of the spectrum inwards. The
i-th largest is never above A's i-th largest, the i-th smallest never below A's i-th smallest, and within
:math:`\beta_j |p_j| / \sqrt 2` of each there is a singular value of A, p_j being the last entry of its left
singular vector. The same B is a Gauss quadrature of the distribution of the singular values.

>>> import torch
>>> A = torch.diag(torch.tensor([5.0, 3.0, 2.0, 1.0], dtype=torch.float64))
>>> found = extreme_singular_values(A.mv, A.mT.mv, 4, k=1, dtype=torch.float64)
>>> round(found.largest.values.item(), 6), round(found.smallest.values.item(), 6)
(5.0, 1.0)

Rules that hold throughout: A has at least as many rows as columns (swap the two products of a wide one,
the singular values are the same), and vectors are flat. A value that repeats exactly is found once: one
start vector meets one direction of its space only. So the i-th value is the i-th of the different ones, and
where the smallest is zero nothing is claimed of those next to it.
"""

# Shapes: A (rows, size), v (size,), u (rows,), B (steps, steps).

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
OnStep = Callable[[int, int], None]
"""Gets the number of steps done and the most that there will be."""

ROUNDING = 16
"""Times eps times the largest value: below this the arithmetic cannot tell a singular value from zero."""

Ends = Literal["largest", "both"]

_CHUNK = 32
_TEST_EVERY = 5


@dataclass
class Bidiagonal:
    """B: ``diagonal`` and the entries above it; the last of ``above`` leads out of B."""

    diagonal: list[float] = field(default_factory=list)
    above: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.diagonal)

    def ritz(self) -> "Ritz":
        """Its singular values, in float64 on the CPU."""
        B = torch.diag(torch.tensor(self.diagonal, dtype=torch.float64))
        B = B + torch.diag(torch.tensor(self.above[:-1], dtype=torch.float64), 1)
        P, s, Qh = torch.linalg.svd(B)
        return Ritz(s, self.above[-1] * P[-1].abs() / math.sqrt(2), Qh[:, 0].square())


class Ritz(NamedTuple):
    """Singular values of B, descending, with the distance to A's and the weights of the quadrature."""

    values: Tensor
    residuals: Tensor
    weights: Tensor


class _Basis:
    """Orthonormal vectors, the rows of matrices of ``_CHUNK`` rows: growing copies nothing."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.chunks: list[Tensor] = []
        self.count = 0

    def add(self, vector: Tensor) -> None:
        row = self.count % _CHUNK
        if row == 0:
            self.chunks.append(self.like.new_zeros((_CHUNK, vector.numel())))
        self.chunks[-1][row] = vector
        self.count += 1

    def orthogonalised(self, vector: Tensor) -> Tensor:
        # Once leaves the rounding of a vector that may be much longer than what remains; twice is enough.
        for rows in self.chunks * 2:
            vector = vector - rows.mT @ (rows @ vector)
        return vector

    def unit(self, vector: Tensor, negligible: float, generator: torch.Generator) -> tuple[Tensor, float]:
        """The direction of ``vector`` that is new, and its length; a random one where nothing is new."""
        vector = self.orthogonalised(vector)
        length = vector.norm().item()
        if not math.isfinite(length):
            raise ValueError(
                f"a product with the operator gave a vector of norm {length}; expected finite values, "
                "look for an overflow or a NaN in the weights or the input."
            )
        if length > negligible:
            return vector / length, length
        vector = self.orthogonalised(random_unit(vector.numel(), like=vector, generator=generator))
        return vector / vector.norm(), 0.0


def random_unit(size: int, *, like: Tensor, generator: torch.Generator) -> Tensor:
    """A direction uniform on the sphere; drawn on the CPU, so that every device gets the same one."""
    vector = torch.randn(size, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(vector, dim=0).to(like)


def golub_kahan(
    apply: Product, apply_adjoint: Product, start: Tensor, *, generator: torch.Generator
) -> Iterator[Bidiagonal]:
    """B after one step, after two, ...; one object, that grows. Ends once the basis is complete.

    Both bases are kept and every new vector is made orthogonal to them, in the dtype of ``start``. Where
    nothing new is left (an invariant subspace, or a rank that is exhausted) a random direction goes on.
    """
    size, eps = start.numel(), torch.finfo(start.dtype).eps
    B = Bidiagonal()
    v = start / start.norm()
    image = apply(v)
    if image.numel() < size:
        raise ValueError(
            f"expected at least as many rows as columns, got {image.numel()} x {size}; swap apply and "
            "apply_adjoint, the singular values are the same."
        )
    right, left = _Basis(v), _Basis(image)
    negligible = 0.0
    while True:
        right.add(v)
        u, alpha = left.unit(image, negligible, generator)
        left.add(u)
        B.diagonal.append(alpha)
        is_complete = B.steps == size
        if is_complete:
            beta = 0.0
        else:
            negligible = ROUNDING * eps * max(B.diagonal + B.above)
            v, beta = right.unit(apply_adjoint(u), negligible, generator)
        B.above.append(beta)
        yield B
        if is_complete:
            return
        image = apply(v)


class Estimates(NamedTuple):
    """Singular values, descending, and what is known of each: all (k,), float64 but for ``converged``."""

    values: Tensor
    low: Tensor
    high: Tensor
    converged: Tensor


@dataclass(frozen=True)
class ExtremeValues:
    """Both ends of a spectrum.

    The error bars are the Lanczos residual, on the side where the true value is, widened by ``rounding``.
    What has not converged is a bound: a largest value is at least ``low``, a smallest at most ``high``. A
    value below ``rounding`` never converges. That no other value lies beyond a converged one rests on the
    random start, which has a share of every direction.
    """

    largest: Estimates
    smallest: Estimates
    steps: int
    rounding: float
    bidiagonal: Bidiagonal


def extreme_singular_values(
    apply: Product,
    apply_adjoint: Product,
    size: int,
    *,
    k: int = 5,
    tolerance: float = 1e-2,
    max_steps: int = 300,
    ends: Ends = "both",
    lost: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    on_step: OnStep | None = None,
) -> ExtremeValues:
    """The ``k`` largest and the ``k`` smallest singular values of an operator on vectors of ``size``.

    Stops when every one is known to the relative ``tolerance`` or is below rounding, at ``max_steps`` at
    the latest. The two bases take 2 * steps * size numbers.

    Args:
        ends: ``"largest"`` does not wait for the smallest, which need many more steps; they are bounds then.
        lost: (k, size) orthonormal directions that the operator may take to zero. If it takes all of them
        below
            rounding, so many singular values are zero, and the smallest are not waited for either.
    """
    if not 1 <= k <= size:
        raise ValueError(f"k must be within 1 and the size {size} of the operator, got {k}.")
    if max_steps < k:
        raise ValueError(f"max_steps must be at least k = {k}, got {max_steps}; a step finds one value.")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}; 0.01 is usual.")
    generator = torch.Generator().manual_seed(seed)
    start = random_unit(size, like=torch.empty(0, dtype=dtype, device=device), generator=generator)
    last = min(max_steps, size)
    remains = (
        math.inf if lost is None or len(lost) < k else torch.stack([apply(v) for v in lost]).norm().item()
    )
    rounding = ROUNDING * torch.finfo(dtype).eps
    for B in itertools.islice(golub_kahan(apply, apply_adjoint, start, generator=generator), last):
        if on_step is not None:
            on_step(B.steps, last)
        if B.steps == last or (B.steps >= 2 * k and B.steps % _TEST_EVERY == 0):
            found = _extremes(B, k, tolerance, rounding, remains)
            waited_for = (found.largest,) if ends == "largest" else (found.largest, found.smallest)
            if all(_is_settled(part, found.rounding) for part in waited_for):
                break
    return found


def _is_settled(part: Estimates, rounding: float) -> bool:
    """Whether more steps would tell nothing new."""
    return bool((part.converged | (part.high <= 2 * rounding)).all())


def _extremes(B: Bidiagonal, k: int, tolerance: float, rounding: float, remains: float) -> ExtremeValues:
    """What B tells of both ends; ``remains`` is how long the operator leaves k directions together."""
    s, residuals, _ = B.ritz()
    rounding *= s[0].item()
    # Which side of a Ritz value the true one is on is known at both ends.
    largest = _estimates(s[:k], s[:k] - rounding, s[:k] + residuals[:k] + rounding, tolerance, rounding)
    low = s[-k:] - residuals[-k:] - rounding
    smallest = _estimates(s[-k:], low, s[-k:] + rounding, tolerance, rounding)
    if remains <= rounding:
        zero = torch.zeros_like(s[-k:])
        smallest = Estimates(zero + remains, zero, zero + rounding, zero > 0)
    else:
        # Each is the i-th smallest only if those below it are known; of zeros one start finds one.
        known = smallest.converged.flip(0).cummin(0).values.flip(0)
        smallest = smallest._replace(low=torch.where(known, smallest.low, 0), converged=known)
    return ExtremeValues(largest, smallest, B.steps, rounding, B)


def _estimates(s: Tensor, low: Tensor, high: Tensor, tolerance: float, rounding: float) -> Estimates:
    low = low.clamp(min=0)
    within = torch.maximum(high - s, s - low) <= tolerance * s
    return Estimates(s, low, high, within & (s > rounding))


class Averaged(NamedTuple):
    """An average over the probe vectors and its standard error, NaN for a single probe."""

    value: Tensor
    standard_error: Tensor


@dataclass(frozen=True)
class SpectralDensity:
    """The distribution of all singular values, as one quadrature a probe vector.

    Args:
        nodes: singular values, ascending, one tensor a probe.
        weights: the share of the spectrum that each stands for; their sum is 1.
    """

    nodes: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]

    def average(self, function: Callable[[Tensor], Tensor]) -> Averaged:
        """The mean of ``function`` over the spectrum; it maps (steps,) nodes to (..., steps)."""
        each = [
            (function(nodes) * weights).sum(-1)
            for nodes, weights in zip(self.nodes, self.weights, strict=True)
        ]
        probes = torch.stack(each)
        deviation = probes.std(0) if len(each) > 1 else torch.full_like(probes[0], torch.nan)
        return Averaged(probes.mean(0), deviation / math.sqrt(len(each)))

    def cumulative(self, sigma: Tensor | float) -> Averaged:
        """The share of singular values <= sigma: a staircase, :meth:`bracket` says how coarse."""
        at = torch.as_tensor(sigma, dtype=torch.float64)[..., None]
        return self.average(lambda nodes: nodes <= at)

    def bracket(self, sigma: Tensor | float) -> tuple[Tensor, Tensor]:
        """Bounds of :meth:`cumulative` (Chebyshev, Markov, Stieltjes), but for the chance of the probes.

        Of a Gauss quadrature, the node below sigma and the one above it may each be anywhere up to their
        neighbours.
        """
        at = torch.as_tensor(sigma, dtype=torch.float64)
        lows, highs = [], []
        for nodes, weights in zip(self.nodes, self.weights, strict=True):
            total = torch.cat((weights.new_zeros(1), weights.cumsum(0)))
            below = torch.searchsorted(nodes, at, right=True)
            lows.append(total[(below - 1).clamp(min=0)])
            highs.append(total[(below + 1).clamp(max=len(nodes))])
        return torch.stack(lows).mean(0), torch.stack(highs).mean(0)

    def histogram(self, edges: Tensor) -> Averaged:
        """The share of singular values between successive ``edges``; an edge belongs to the bin below."""
        low, high = edges[:-1, None].double(), edges[1:, None].double()
        return self.average(lambda nodes: (nodes > low) & (nodes <= high))

    def quantiles(self, count: int) -> Tensor:
        """A spectrum of ``count`` values, descending from the largest node to the smallest."""
        shares = torch.linspace(1, 0, count, dtype=torch.float64)
        # A node stands for the values around it, so half of its weight lies below.
        each = [
            _interpolate(shares, weights.cumsum(0) - weights / 2, nodes)
            for nodes, weights in zip(self.nodes, self.weights, strict=True)
        ]
        values = torch.stack(each).mean(0)
        values[0], values[-1] = max(nodes[-1] for nodes in self.nodes), min(nodes[0] for nodes in self.nodes)
        return values


def _interpolate(x: Tensor, points: Tensor, values: Tensor) -> Tensor:
    """Linear between ascending points, constant beyond."""
    right = torch.searchsorted(points, x).clamp(1, len(points) - 1)
    left = right - 1
    width = points[right] - points[left]
    part = ((x - points[left]) / torch.where(width > 0, width, 1)).clamp(0, 1)
    return torch.lerp(values[left], values[right], part)


def spectral_density(
    apply: Product,
    apply_adjoint: Product,
    size: int,
    *,
    probes: int = 4,
    steps: int = 40,
    known: Sequence[Bidiagonal] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    on_step: OnStep | None = None,
) -> SpectralDensity:
    """The distribution of the singular values by stochastic Lanczos quadrature.

    Args:
        probes: how many random starts are averaged.
        steps: nodes of each quadrature. Small singular values beside large ones need many.
        known: bidiagonalisations from the first starts of this ``seed``, not to be done again.
    """
    if min(probes, steps) < 1:
        raise ValueError(f"probes and steps must be positive, got {probes} and {steps}; 4 and 40 are usual.")
    generator = torch.Generator().manual_seed(seed)
    like = torch.empty(0, dtype=dtype, device=device)
    starts = [random_unit(size, like=like, generator=generator) for _ in range(probes)]
    found = list(known)[:probes]
    for start in starts[len(found) :]:
        for B in itertools.islice(golub_kahan(apply, apply_adjoint, start, generator=generator), steps):
            if on_step is not None:
                on_step(B.steps, min(steps, size))
        found.append(B)
    ritz = [B.ritz() for B in found]
    return SpectralDensity(tuple(r.values.flip(0) for r in ritz), tuple(r.weights.flip(0) for r in ritz))
