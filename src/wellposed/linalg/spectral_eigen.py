r"""Powers of singular values by the eigendecomposition of the Gram matrix, on a CPU.

With X X^T = Q diag(λ) Q^T of the smaller side, t_i = λ_i / λ_max, and a gain f(t) such as t^(-(1-ε)/2):

.. math::
    W = Q^T X, \qquad Y = Q \operatorname{diag}(f) W

The rows of W are orthogonal and as long as the singular values. Made in float64 and rounded after, each row
keeps its digits however short it is, so all that follows may be done in the dtype of the tokens.

The adjoint is that of Daleckii and Krein. With G the gradient of Y, P = Q^T G and W relative to s_max:

.. math::
    K = P W^T, \qquad C = F \circ (K + K^T), \quad F_{ij} = \frac{f(t_i) - f(t_j)}{t_i - t_j}, \qquad
    X' = Q (C W + \operatorname{diag}(f) P)

where C_{11} of the largest eigenvalue, to which all t_i are relative, has :math:`\sum_i C_{ii} t_i` less. F
has finite limits f'(t) where eigenvalues repeat.
"""

# Shapes: x, y, grad (B, n, d) with n <= d; QT (B, n, n), W (B, n, d), t (B, n), s_max and unit (B,).

import itertools
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.linalg.execution import is_traced, over_chunks
from wellposed.linalg.precision import scaled, unit_of

_NEAR = 1e-5  # eigenvalues closer than this, relatively: the slope is better than the divided difference
_TIED = 16  # times eps: the largest eigenvalue repeats


class Power(NamedTuple):
    """What becomes of the singular values."""

    eps: Tensor  # (1 or B,) float64
    floor: float
    rescale: bool
    shift: float  # added to the gain
    dtype: torch.dtype  # of the Gram matrix and its eigenvectors
    work: torch.dtype  # of the products after that, at least float32

    def of(self, chunk: slice) -> "Power":
        return self if len(self.eps) == 1 else self._replace(eps=self.eps[chunk])

    def gain(self, t: Tensor) -> Tensor:
        gain: Tensor = t.clamp(min=self.floor**2) ** ((self.eps[:, None] - 1) / 2)
        return gain


class Eigen(NamedTuple):
    """Tokens over ``unit`` as Q W, and what is known of them."""

    QT: Tensor
    W: Tensor
    t: Tensor  # (B, n) float64, ascending: squares of the singular values over that of the largest
    s_max: Tensor  # (B,) float64, over the unit; 0 of zero tokens, NaN of those that are not finite
    unit: Tensor  # (B,) float64

    def of(self, chunk: slice) -> "Eigen":
        return Eigen(*(each[chunk] for each in self))


Take = Callable[[str, tuple[int, ...], torch.dtype], Tensor | None]
"""Memory by a name, for a result to be written to; None is new memory."""


def _memory() -> Take:
    """The same for every chunk of a thread, each at most as large as its first: new pages cost much."""
    of_thread = threading.local()

    def take(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        held = vars(of_thread)
        if name not in held or len(held[name]) < shape[0]:
            held[name] = torch.empty(shape, dtype=dtype)
        found: Tensor = held[name][: shape[0]]
        return found

    return take


def _new(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    return None


def eigen_forward(x: Tensor, power: Power, keep: bool) -> tuple[Tensor, Eigen | None]:
    """Y in x's dtype, and the decomposition if it is to be kept."""
    if is_traced():
        y, eigen = _forward(x, power, _new, None, None)
        return y, eigen if keep else None
    take, (count, n, d) = _memory(), x.shape
    y, kept = torch.empty_like(x), None
    if keep:
        t, s_max, unit = (x.new_empty(shape, dtype=torch.float64) for shape in ((count, n), count, count))
        QT, W = x.new_empty((count, n, n), dtype=power.work), torch.empty_like(x, dtype=power.work)
        kept = Eigen(QT, W, t, s_max, unit)

    def some(chunk: slice) -> None:
        into = kept and kept.of(chunk)
        found = _forward(x[chunk], power.of(chunk), take, y[chunk], into)[1]
        if into is not None:
            for place, value in zip(into[2:], found[2:], strict=True):
                place.copy_(value)

    over_chunks(some, count, n * d)
    return y, kept


def eigen_backward(grad: Tensor, eigen: Eigen, power: Power) -> Tensor:
    """The adjoint of :func:`eigen_forward`'s Y, applied to grad; in grad's dtype."""
    if is_traced():
        return _backward(grad, eigen, power, _new, None)
    take, out = _memory(), torch.empty_like(grad)

    def some(chunk: slice) -> None:
        _backward(grad[chunk], eigen.of(chunk), power.of(chunk), take, out[chunk])

    over_chunks(some, len(grad), grad.shape[1] * grad.shape[2])
    return out


def gram_matrix(x: Tensor, into: Tensor | None = None) -> Tensor:
    """X X^T (B, n, n); of large matrices only the blocks on and below the diagonal, which eigh reads."""
    n = x.shape[1]
    if n < 128 or is_traced():
        return torch.bmm(x, x.mT, out=into)
    # The blocks above the diagonal of the transpose: LAPACK takes columns, so eigh has nothing to turn.
    A = x.new_empty((x.shape[0], n, n)) if into is None else into
    edges = [n * part // 4 for part in range(5)]
    for start, stop in itertools.pairwise(edges):
        A[:, start:stop, start:] = torch.bmm(x[:, start:stop], x[:, start:].mT)
    return A.mT


def _forward(
    x: Tensor, power: Power, take: Take, y: Tensor | None, kept: Eigen | None
) -> tuple[Tensor, Eigen]:
    """Y and the matrices of ``kept`` are written there, if they are given."""
    work, dtype, rescale = power.work, power.dtype, power.rescale
    shape, square = x.shape, (*x.shape[:2], x.shape[1])
    # Squares of narrower tokens are in the range of dtype as they are.
    is_narrow = x.dtype.itemsize < dtype.itemsize
    unit = x.new_ones(shape[:1], dtype=dtype) if is_narrow else unit_of(x, dtype)
    X = _converted(x, dtype, take("X", shape, dtype)) if is_narrow else scaled(x, unit, dtype)
    A = gram_matrix(X, take("A", square, dtype))
    # LAPACK refuses the whole batch for one NaN: bad matrices pass through it as zeros.
    finite = A.diagonal(dim1=1, dim2=2).sum(-1).isfinite()
    eigenvalues, Q = _eigh(_where(finite, A, 0), take("Q", square, dtype))
    top = eigenvalues[:, -1:].double()
    t = torch.where(top > 0, eigenvalues.double() / _or_one(top), 1)
    s_max = top.clamp(min=0).sqrt()[:, 0]
    QT = Q.mT
    if is_narrow:  # W is rounded to their dtype
        unit = _or_one(s_max).clamp(2.0**-100, 2.0**100)
        s_max = s_max / unit
    s_max = torch.where(finite, s_max, torch.nan)
    # Only float64 tokens can be beyond a narrower dtype.
    fits = x.dtype.itemsize <= work.itemsize
    size = (unit if fits else torch.ones_like(unit)) if rescale else 1 / _or_one(s_max)
    gain = (power.gain(t) + power.shift) * torch.where(finite, size, torch.nan)[:, None]
    wide = take("wide", shape, dtype)
    # One product less, as many digits; it has to be in dtype, so that it pays for long matrices only.
    if y is not None and kept is None and fits and (not is_narrow or 2 * shape[1] <= shape[2]):
        by_column = (gain / unit[:, None] if is_narrow else gain)[..., None].to(dtype)
        Z = torch.bmm(torch.mul(QT, by_column).mT, QT, out=take("A", square, dtype))
        return _product(Z, X, x.dtype, y, wide), Eigen(QT, X, t, s_max, unit.double())
    into = take("W", shape, work) if kept is None else kept.W
    W = _product((QT / unit[:, None, None]).to(dtype) if is_narrow else QT, X, work, into, wide)
    QT = QT.to(work) if kept is None else kept.QT.copy_(QT)
    scaled_Q = (QT * gain[..., None].to(work)).mT
    if rescale and not fits:
        wide = torch.bmm(scaled_Q, W) * unit[:, None, None]
        out = wide.to(x.dtype) if y is None else y.copy_(wide)
    else:
        out = _product(scaled_Q, W, x.dtype, y)
    return out, Eigen(QT, W, t, s_max, unit.double())


def _backward(grad: Tensor, eigen: Eigen, power: Power, take: Take, into: Tensor | None) -> Tensor:
    QT, W, t, s_max, unit = eigen
    work, shape = QT.dtype, grad.shape
    size = _or_one(s_max)
    gain = power.gain(t)
    into_P = take("P", shape, work)
    P = torch.bmm(QT, grad.to(work), out=into_P)
    per_size = (1 / size)[:, None, None].to(work)
    K = torch.bmm(P, W.mT, out=take("K", QT.shape, work)).mul(per_size)
    core = _divided_differences(t, gain, power).to(work) * (K + K.mT)
    # All t_i are relative to the largest. Where that repeats it has no derivative; the mean over the tied
    # directions is taken, which is the central difference for a tie of two.
    pulled = (core.diagonal(dim1=1, dim2=2) * t).sum(-1, keepdim=True)
    gain = gain + power.shift
    if not power.rescale:
        pulled = pulled + (K.diagonal(dim1=1, dim2=2) * gain).sum(-1, keepdim=True)
    tied = (t >= 1 - _TIED * torch.finfo(work).eps).to(t.dtype)
    core.diagonal(dim1=1, dim2=2).sub_((pulled * tied / tied.sum(-1, keepdim=True)).to(work))
    P = torch.mul(P, gain[..., None].to(work), out=into_P)
    inner = torch.baddbmm(P, core * per_size, W, out=into_P)
    zero, finite = s_max == 0, s_max.isfinite()
    if power.rescale and not is_traced() and not zero.any() and finite.all():
        return _product(QT.mT, inner, grad.dtype, into)
    out = torch.bmm(QT.mT, inner)
    if not power.rescale:  # by both in turn, since their product may be subnormal
        out = out / size[:, None, None].to(work) / unit[:, None, None]
    zero, finite = zero[:, None, None], finite[:, None, None]
    out = torch.where(zero, grad, torch.where(finite, out, 0).to(grad.dtype))
    return out if into is None else into.copy_(out)


def _divided_differences(t: Tensor, gain: Tensor, power: Power) -> Tensor:
    """F (B, n, n), in float64."""
    low = power.floor**2
    slope = torch.where(t >= low, (power.eps[:, None] - 1) / 2 * gain / t, 0)
    gap = t[:, :, None] - t[:, None]
    if not is_traced() and not (t.diff() <= _NEAR * t[:, 1:].clamp(min=low)).any():
        # They ascend, so no two are near if no neighbours are: only the diagonal is to be seen to.
        gap.diagonal(dim1=1, dim2=2).fill_(1)
        difference = (gain[:, :, None] - gain[:, None]).div_(gap)
        difference.diagonal(dim1=1, dim2=2).copy_(slope)
        return difference
    near = gap.abs() <= _NEAR * t[:, None].clamp(min=low)
    difference = (gain[:, :, None] - gain[:, None]) / torch.where(near, 1, gap)
    return torch.where(near, (slope[:, :, None] + slope[:, None]) / 2, difference)


def _product(
    a: Tensor, b: Tensor, dtype: torch.dtype, into: Tensor | None, wide: Tensor | None = None
) -> Tensor:
    """A B in ``dtype``, written to ``into`` if there is one; ``wide`` is memory for it as it is made."""
    if into is None:
        return torch.bmm(a, b).to(dtype)
    return torch.bmm(a, b, out=into) if a.dtype == dtype else into.copy_(torch.bmm(a, b, out=wide))


def _eigh(A: Tensor, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors, these written to the transpose of ``into``, as LAPACK has them."""
    if into is None:
        values, vectors = torch.linalg.eigh(A)
        return values, vectors
    values, vectors = A.new_empty(A.shape[:2]), into.mT
    torch.linalg.eigh(A, out=(values, vectors))
    return values, vectors


def _converted(x: Tensor, dtype: torch.dtype, into: Tensor | None) -> Tensor:
    return x.to(dtype) if into is None else into.copy_(x)


def _where(good: Tensor, values: Tensor, other: float) -> Tensor:
    """Matrices, or ``other`` for those that are not good; eager code does nothing where all are."""
    if not is_traced() and good.all():
        return values
    return torch.where(good[:, None, None], values, other)


def _or_one(size: Tensor) -> Tensor:
    return torch.where(size > 0, size, 1)
