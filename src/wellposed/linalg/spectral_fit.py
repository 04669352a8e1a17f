r"""The numbers behind powers by squaring: a sum of a chain's members that is close to a power of x.

With x an eigenvalue of :math:`X X^T` over the largest one, the chain is

.. math::
    b_0 = (1 + \delta)\, x / 1.05, \qquad b_{k+1} = (1 + \delta)(2 b_k - b_k^2), \qquad k = 0 \ldots K - 1

and for x from floor^2 to 1

.. math::
    \text{gain}(x) = v_0 + \sum_{k=0}^{K} v_{k+1} b_k(x) \;\approx\; x^{-(1 - \epsilon)/2}

Each b_k rises from 0 to :math:`b_* = (1 + 2\delta)/(1 + \delta)`, at an x that is 2(1 + δ) times smaller than
that of the one before. So :math:`1 - b_k/b_*` are smooth steps down, evenly spaced in log x, and a decreasing
power is a sum of them with positive heights. Below the floor no step is left: the gain levels off at v_0.

>>> fit = fit_power(0.5, floor=1e-2)
>>> fit.steps, len(fit.coefficients)
(11, 13)
>>> x = torch.tensor([1e-4, 1e-2, 1.0])
>>> bool(((fit.gain(x) * x**0.25 - 1).abs() < 7e-4).all())
True
"""

# Shapes: T candidates of delta, E powers, n points of the grid of x, K + 2 terms: a constant and K + 1 steps.

import bisect
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from wellposed.linalg.execution import constant, is_traced

MARGIN = 1.05
"""The chain divides by this much more than lambda_max, for a lambda_max that was found a little too small."""

REACH = 1.1
"""The fit goes on this far below the floor: its slope is poor at its end, and slopes make the gradient."""

SMALLEST_FLOOR = 1e-6
"""The eigenvalue of a smaller singular value drowns in the float64 rounding of X X^T."""

LARGEST_DELTA = 0.6
"""The chain is bounded while b_0 <= 2. With this delta it is so up to x = 1.3."""

PAIR_LIMIT = 7e-5
"""The smallest eigenvalue that a step in pairs of float16 may carry: it rounds by 1e-7 of the largest."""

GAIN_LIMIT = 300
"""Tensor cores round sums downwards by 1e-7: times the gain, the error of the largest singular values."""

_DELTAS = 25  # from 0 to the largest, for a first look
_RIDGE = 1e-8  # on the heights: some steps look alike on the grid, and would grow and cancel without it
_DAMPING = 0.01  # a point that the fit meets exactly keeps this part of its weight for the next round
_POINTS = 10  # of the grid, for each unit of log x
_NODES = 24  # eps at which a family is fitted
_FAMILY_POWERS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)  # that choose its delta and weights; then all are checked


Numbers = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Fit:
    """Coefficients of the chain for one power.

    Attributes:
        steps: K.
        coefficients: v_0 to v_{K+1}.
        error: largest relative error of the gain for x in [floor^2, 1], and a little below.
    """

    eps: float
    floor: float
    steps: int
    delta: float
    coefficients: tuple[float, ...]
    error: float

    def gain(self, x: Tensor) -> Tensor:
        """In float64, for x of any shape."""
        b = _chain(x.double(), self.steps, self.delta)
        return self.coefficients[0] + b @ b.new_tensor(self.coefficients[1:])


@dataclass(frozen=True)
class FitFamily:
    """One chain for every eps in [0, 1], with coefficients that are smooth in eps.

    Attributes:
        steps: K.
        error: largest relative error of the gain for x in [floor^2, 1] and any eps.
        table: Chebyshev series in eps, a row for each degree, a column for each coefficient.
    """

    floor: float
    steps: int
    delta: float
    error: float
    table: tuple[tuple[float, ...], ...]

    def coefficients(self, eps: Tensor) -> Tensor:
        """Those of eps (...): (..., K + 2), in float64 on its device. No gradient flows to eps.

        An eps outside of [0, 1] counts as the nearer end.
        """
        return series_at(eps, family_table(self, eps.device))


def fit_power(eps: float, floor: float = 1e-4, tolerance: float = 7e-4) -> Fit:
    """The shortest chain whose gain is within ``tolerance`` of the power, relatively, for x in [floor^2, 1].

    Made once for the same arguments; ``torch.compiler.assume_constant_result`` may wrap it.
    """
    # That is why the cache is inside: torch.compile looks through a cache at the function behind it.
    if not 0 <= eps <= 1:
        raise ValueError(f"eps must be in [0, 1], got {eps}; 1 leaves singular values, 0 makes them equal.")
    _check(floor, tolerance)
    return _fit_power(float(eps), float(floor), float(tolerance))


def fit_family(floor: float = 1e-4, tolerance: float = 7e-4) -> FitFamily:
    """The shortest chain that meets ``tolerance`` for every eps in [0, 1]; see :func:`fit_power`."""
    _check(floor, tolerance)
    return _fit_family(float(floor), float(tolerance))


@functools.lru_cache(maxsize=32)
def family_table(family: FitFamily, device: torch.device) -> Tensor:
    """On a device, put there once: a copy from the host would stop the capture of a CUDA graph."""
    with torch.inference_mode(False):  # a tensor made in inference mode would be of no use in training
        return torch.tensor(family.table, dtype=torch.float64, device=device)


def series_at(eps: Tensor, table: Tensor) -> Tensor:
    """What ``coefficients`` returns, for compiled code, where a constant's methods cannot be called."""
    angle = torch.acos(2 * eps.detach().double().clamp(0, 1) - 1)
    degrees = torch.arange(len(table), dtype=torch.float64, device=eps.device)
    coefficients: Tensor = torch.cos(angle[..., None] * degrees) @ table
    return coefficients


@functools.cache
@torch.no_grad()
def _fit_power(eps: float, floor: float, tolerance: float) -> Fit:
    powers = _powers(eps)
    reached = math.inf
    for steps in range(_least_steps(eps, floor, tolerance), _most_steps(floor) + 1):
        best = _best_delta(powers, floor, steps, rounds=40)
        error = _measured(powers, floor, steps, best.delta, best.coefficients)
        if error <= tolerance:
            return Fit(eps, floor, steps, best.delta.item(), tuple(best.coefficients[0].tolist()), error)
        reached = min(reached, error)
    raise _unreachable(tolerance, floor, reached)


@functools.cache
@torch.no_grad()
def _fit_family(floor: float, tolerance: float) -> FitFamily:
    powers = _powers(*_FAMILY_POWERS)
    checked = _evenly(0, 1, 41)
    reached = math.inf
    for steps in range(_least_steps(min(_FAMILY_POWERS), floor, tolerance), _most_steps(floor) + 1):
        best = _best_delta(powers, floor, steps, rounds=20)
        table = _series_in_eps(floor, steps, best.delta, best.weights)
        error = _measured(checked, floor, steps, best.delta, series_at(checked, table))
        if error <= tolerance:
            return FitFamily(floor, steps, best.delta.item(), error, tuple(map(tuple, table.tolist())))
        reached = min(reached, error)
    raise _unreachable(tolerance, floor, reached)


def wide_steps(steps: int, delta: float, largest_gain: float) -> int:
    """How many steps of a chain need float64 where the others run in pairs of float16.

    Those until the smallest eigenvalue of use has grown to PAIR_LIMIT: it reaches 1 at the last step, and
    grows by 2 (1 + delta) in each. All of them where large singular values come of large gains that cancel.

    >>> wide_steps(20, 0.3, largest_gain=16), wide_steps(22, 0.2, largest_gain=600)
    (10, 22)
    """
    if largest_gain > GAIN_LIMIT:
        return steps
    return max(steps - math.floor(math.log(1 / PAIR_LIMIT) / math.log(2 * (1 + delta))), 0)


def check_floor(floor: float) -> None:
    if not SMALLEST_FLOOR <= floor < 1:
        raise ValueError(f"floor must be in [{SMALLEST_FLOOR:g}, 1), got {floor}; it is relative to s_max.")


def _check(floor: float, tolerance: float) -> None:
    check_floor(floor)
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}; the default is 7e-4.")


def _unreachable(tolerance: float, floor: float, reached: float) -> ValueError:
    times = math.ceil(10 * reached / tolerance) / 10
    return ValueError(
        f"the fit's part of the tolerance must be at least {reached:.1e} for floor {floor:g}, got "
        f"{tolerance:g}; no chain of squarings does better: raise the tolerance {times:g} times or more, or "
        "take an SVD."
    )


def _powers(*eps: float) -> Tensor:
    return torch.tensor(eps, dtype=torch.float64, device="cpu")


def _evenly(low: float, high: float, count: int) -> Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64, device="cpu")


def _grid(floor: float, largest: float, density: int) -> Tensor:
    low, high = 2 * math.log(floor / REACH), math.log(largest)
    return _evenly(low, high, 40 + math.ceil(density * (high - low))).exp()


def _chain(x: Tensor, steps: int, delta: float | Tensor) -> Tensor:
    """b_0 to b_K in a new last axis."""
    b = (1 + delta) * x / MARGIN
    members = [b]
    for _ in range(steps):
        b = (1 + delta) * (2 * b - b * b)
        members.append(b)
    return torch.stack(members, -1)


def _most_steps(floor: float) -> int:
    """With these, b_K rises before the floor even for delta = 0; more of them have nothing left to fit."""
    return math.ceil(math.log2(MARGIN * (REACH / floor) ** 2)) + 2


def _least_steps(eps: float, floor: float, tolerance: float) -> int:
    """The fewest steps whose quick fits are nearly within tolerance: where the exact search begins."""

    def nearly(steps: int) -> bool:
        quick = _reweighted(_powers(eps), floor, steps, _evenly(0, LARGEST_DELTA, _DELTAS), rounds=5)
        return quick.error.min().item() <= 1.2 * tolerance

    return bisect.bisect_left(range(_most_steps(floor)), True, lo=1, key=nearly)


def _best_delta(powers: Tensor, floor: float, steps: int, rounds: int) -> "_Candidates":
    """One candidate, without the axis T. The error has one valley in delta: look quickly, then closely."""
    quick = _reweighted(powers, floor, steps, _evenly(0, LARGEST_DELTA, _DELTAS), rounds=8)
    near = quick.delta[quick.error.argmin()] + _evenly(-0.02, 0.02, 9)
    close = _reweighted(powers, floor, steps, near.clamp(0, LARGEST_DELTA), rounds)
    best = close.error.argmin()
    return _Candidates(*(values[best] for values in close))


class _Candidates(NamedTuple):
    delta: Tensor  # (T,)
    error: Tensor  # (T,) largest relative error over the powers and the grid
    coefficients: Tensor  # (T, E, K + 2)
    weights: Tensor  # (T, n) of the grid's points


def _reweighted(powers: Tensor, floor: float, steps: int, delta: Tensor, rounds: int) -> _Candidates:
    """Minimax fits by Lawson's reweighted least squares; all powers (E,) share the weights of a delta (T,).

    Raising the weights where the error is large makes it even over the grid, which is what a minimax fit has.
    """
    x = _grid(floor, MARGIN, _POINTS)
    columns = _Columns(x, powers, steps, delta[:, None])
    weights = x.new_full((len(delta), len(x)), 1 / len(x))
    found = _Candidates(delta, x.new_full(delta.shape, math.inf), x.new_zeros(*columns.shape), weights)
    for _ in range(rounds):
        heights, residual = columns.fit(weights)
        residual = residual.amax(1)
        error = residual.amax(-1)
        better = error < found.error
        found = _Candidates(
            delta,
            torch.where(better, error, found.error),
            torch.where(better[:, None, None], columns.coefficients(heights), found.coefficients),
            torch.where(better[:, None], weights, found.weights),
        )
        weights = weights * (residual / error[:, None] + _DAMPING)
        weights = weights / weights.sum(-1, keepdim=True)
    return found


class _Columns:
    """The constant and the steps down on the grid, divided by the wanted power: their sum should be 1."""

    def __init__(self, x: Tensor, powers: Tensor, steps: int, delta: Tensor) -> None:
        self._top = ((1 + 2 * delta) / (1 + delta))[..., None]  # (T, 1, 1)
        down = 1 - _chain(x, steps, delta) / self._top
        terms = torch.cat([torch.ones_like(down[..., :1]), down], -1)
        relative = terms[:, None] * (x ** ((1 - powers[:, None]) / 2))[..., None]
        self._scale = 1 / relative.abs().amax(-2)  # to magnitudes of 1, for well conditioned normal equations
        self._matrix = relative * self._scale[..., None, :]  # (T, E, n, K + 2)
        self.shape = self._scale.shape

    def fit(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled heights (T, E, K + 2) and the size of the residual (T, E, n) for weights (T, n)."""
        weighted = (self._matrix * weights[:, None, :, None]).mT
        ridge = _RIDGE * torch.eye(self.shape[-1], dtype=weights.dtype, device=weights.device)
        factor = torch.linalg.cholesky(weighted @ self._matrix + ridge)
        heights = torch.cholesky_solve(weighted.sum(-1, keepdim=True), factor)
        # A step up would turn the gain back below the floor. It is left out; the residual tells its price.
        heights[..., 1:, :].clamp_(min=0)
        return heights[..., 0], (self._matrix @ heights - 1)[..., 0].abs()

    def coefficients(self, heights: Tensor) -> Tensor:
        """From heights of the steps down to v: c + sum a (1 - b / b*) = (c + sum a) - sum (a / b*) b."""
        heights = heights * self._scale
        return torch.cat([heights.sum(-1, keepdim=True), -heights[..., 1:] / self._top], -1)


def _measured(powers: Tensor, floor: float, steps: int, delta: Tensor, coefficients: Tensor) -> float:
    """Largest relative error of coefficients (E, K + 2), on a grid much finer than that of the fit."""
    x = _grid(floor, 1.0, 12 * _POINTS)
    gain = coefficients[:, :1] + coefficients[:, 1:] @ _chain(x, steps, delta).mT
    return (gain * x ** ((1 - powers[:, None]) / 2) - 1).abs().max().item()


def _series_in_eps(floor: float, steps: int, delta: Tensor, weights: Tensor) -> Tensor:
    """Chebyshev series (degrees, K + 2): with fixed weights the fit is smooth in eps, so it is short."""
    degrees = _evenly(0, _NODES - 1, _NODES)
    angles = (degrees + 0.5) * (math.pi / _NODES)
    columns = _Columns(_grid(floor, MARGIN, _POINTS), (angles.cos() + 1) / 2, steps, delta.reshape(1, 1))
    heights, _ = columns.fit(weights[None])
    series = torch.cos(degrees[:, None] * angles) @ columns.coefficients(heights)[0] * (2 / _NODES)
    series[0] /= 2
    return series


# On a device. A copy to it would make an eager step wait and cannot be recorded in a CUDA graph, so numbers
# are kept there. In a traced program they are constants: a tensor made by a tracer must not be kept.


def chain_coefficients(
    eps: float | Tensor, floor: float, tolerance: float, device: torch.device
) -> tuple[Tensor, float]:
    """Coefficients (1 or B, K + 2) of the powers eps, a number or a tensor (1 or B), and their delta."""
    # With dynamic=True torch.compile takes numbers for symbols, also those of a module; not of __float__.
    floor, tolerance = floor.__float__(), tolerance.__float__()
    if not isinstance(eps, Tensor):
        eps = eps.__float__()
        return _of_power(eps, floor, tolerance, device), _delta_of_power(eps, floor, tolerance)
    # The series is read off in float64, which MPS lacks, and the result rounded once.
    wide = torch.device("cpu") if device.type == "mps" else device
    series = _of_family(floor, tolerance, wide)
    coefficients = series_at(eps.detach().to(wide), series)
    return coefficients.to(device, _widest(device)), _delta_of_family(floor, tolerance)


# torch.compile runs these when it traces, and takes what they return for constants.


@constant
def _of_power(eps: float, floor: float, tolerance: float, device: torch.device) -> Tensor:
    with _disable_current_modes():
        numbers = (fit_power(eps, floor, tolerance).coefficients,)
    return _on(numbers, device)


@constant
def _of_family(floor: float, tolerance: float, device: torch.device) -> Tensor:
    with _disable_current_modes():
        numbers = fit_family(floor, tolerance).table
    return _on(numbers, device)


@constant
def _delta_of_power(eps: float, floor: float, tolerance: float) -> float:
    with _disable_current_modes():
        return fit_power(eps, floor, tolerance).delta


@constant
def _delta_of_family(floor: float, tolerance: float) -> float:
    with _disable_current_modes():
        return fit_family(floor, tolerance).delta


def _on(numbers: Numbers, device: torch.device) -> Tensor:
    make = _made if is_traced() else _kept
    return make(numbers, device)


@functools.lru_cache(maxsize=64)
def _kept(numbers: Numbers, device: torch.device) -> Tensor:
    # A tensor made inside inference mode could not serve a later training step.
    with torch.inference_mode(False), torch.no_grad():
        return _made(numbers, device)


def _made(numbers: Numbers, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=_widest(device), device=device)


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
