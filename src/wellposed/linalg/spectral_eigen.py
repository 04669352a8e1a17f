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

# Shapes: x, y, grad (B, n, d) with n <= d; Q (B, n, n), W (B, n, d), t (B, n), s_max and unit (B,).

import itertools
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

    Q: Tensor
    W: Tensor
    t: Tensor  # (B, n) float64, ascending: squares of the singular values over that of the largest
    s_max: Tensor  # (B,) float64, over the unit; 0 of zero tokens, NaN of those that are not finite
    unit: Tensor  # (B,) float64

    def of(self, chunk: slice) -> "Eigen":
        return Eigen(*(each[chunk] for each in self))


def eigen_forward(x: Tensor, power: Power) -> tuple[Tensor, Eigen]:
    """Y in x's dtype, and the decomposition."""
    if is_traced():
        return _forward(x, power, None)
    count, n, _ = x.shape
    y, W = torch.empty_like(x), torch.empty_like(x, dtype=power.work)
    Q = x.new_empty((count, n, n), dtype=power.work)
    t, s_max, unit = (x.new_empty(shape, dtype=torch.float64) for shape in ((count, n), (count,), (count,)))
    eigen = Eigen(Q, W, t, s_max, unit)

    def some(chunk: slice) -> None:
        _forward(x[chunk], power.of(chunk), (y[chunk], eigen.of(chunk)))

    over_chunks(some, count, n)
    return y, eigen


def eigen_backward(grad: Tensor, eigen: Eigen, power: Power) -> Tensor:
    """The adjoint of :func:`eigen_forward`'s Y, applied to grad; in grad's dtype."""
    if is_traced():
        return _backward(grad, eigen, power, None)
    out = torch.empty_like(grad)

    def some(chunk: slice) -> None:
        _backward(grad[chunk], eigen.of(chunk), power.of(chunk), out[chunk])

    over_chunks(some, len(grad), eigen.Q.shape[-1])
    return out


def gram_matrix(x: Tensor) -> Tensor:
    """X X^T (B, n, n); of large matrices only the blocks on and below the diagonal, which eigh reads."""
    n = x.shape[1]
    if n < 128 or is_traced():
        return torch.bmm(x, x.mT)
    A = x.new_empty((x.shape[0], n, n))
    edges = [n * part // 4 for part in range(5)]
    for start, stop in itertools.pairwise(edges):
        A[:, start:stop, :stop] = torch.bmm(x[:, start:stop], x[:, :stop].mT)
    return A


def _forward(x: Tensor, power: Power, into: tuple[Tensor, Eigen] | None) -> tuple[Tensor, Eigen]:
    """With ``into`` the results are written there."""
    work, dtype, rescale = power.work, power.dtype, power.rescale
    y, kept = into or (None, None)
    # Squares of narrower tokens are in the range of dtype as they are.
    is_narrow = x.dtype.itemsize < dtype.itemsize
    unit = x.new_ones(x.shape[:1], dtype=dtype) if is_narrow else unit_of(x, dtype)
    X = x.to(dtype) if is_narrow else scaled(x, unit, dtype)
    A = gram_matrix(X)
    # LAPACK refuses the whole batch for one NaN: bad matrices pass through it as zeros.
    finite = A.diagonal(dim1=1, dim2=2).sum(-1).isfinite()
    eigenvalues, Q = torch.linalg.eigh(_where(finite, A, 0))
    top = eigenvalues[:, -1:].double()
    t = torch.where(top > 0, eigenvalues.double() / _or_one(top), 1)
    s_max = top.clamp(min=0).sqrt()[:, 0]
    if is_narrow:  # for W, which is rounded to theirs
        unit = _or_one(s_max).clamp(2.0**-100, 2.0**100)
        s_max = s_max / unit
        W = _product((Q / unit[:, None, None]).mT, X, work, kept and kept.W)
    else:
        W = _product(Q.mT, X, work, kept and kept.W)
    s_max, Q = torch.where(finite, s_max, torch.nan), Q.to(work) if kept is None else kept.Q.copy_(Q)
    gain = power.gain(t) + power.shift
    # Only float64 tokens can be beyond a narrower dtype.
    fits = x.dtype.itemsize <= work.itemsize
    size = (unit if fits else torch.ones_like(unit)) if rescale else 1 / _or_one(s_max)
    gain = gain * torch.where(finite, size, torch.nan)[:, None]
    scaled_Q = Q * gain[:, None].to(work)
    if rescale and not fits:
        wide = torch.bmm(scaled_Q, W) * unit[:, None, None]
        out = wide.to(x.dtype) if y is None else y.copy_(wide)
    else:
        out = _product(scaled_Q, W, x.dtype, y)
    eigen = Eigen(Q, W, t, s_max, unit.double())
    if kept is not None:
        for place, value in zip(kept[2:], eigen[2:], strict=True):
            place.copy_(value)
    return out, eigen


def _backward(grad: Tensor, eigen: Eigen, power: Power, into: Tensor | None) -> Tensor:
    Q, W, t, s_max, unit = eigen
    work = Q.dtype
    size = _or_one(s_max)
    gain = power.gain(t)
    P = torch.bmm(Q.mT, grad.to(work))
    per_size = (1 / size)[:, None, None].to(work)
    K = torch.bmm(P, W.mT) * per_size
    core = _divided_differences(t, gain, power).to(work) * (K + K.mT)
    # All t_i are relative to the largest. Where that repeats it has no derivative; the mean over the tied
    # directions is taken, which is the central difference for a tie of two.
    pulled = (core.diagonal(dim1=1, dim2=2) * t).sum(-1, keepdim=True)
    gain = gain + power.shift
    if not power.rescale:
        pulled = pulled + (K.diagonal(dim1=1, dim2=2) * gain).sum(-1, keepdim=True)
    tied = (t >= 1 - _TIED * torch.finfo(work).eps).to(t.dtype)
    core.diagonal(dim1=1, dim2=2).sub_((pulled * tied / tied.sum(-1, keepdim=True)).to(work))
    inner = torch.baddbmm(P * gain[..., None].to(work), core * per_size, W)
    zero, finite = s_max == 0, s_max.isfinite()
    if power.rescale and not is_traced() and not zero.any() and finite.all():
        return _product(Q, inner, grad.dtype, into)
    out = torch.bmm(Q, inner)
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


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, into: Tensor | None) -> Tensor:
    """A B in ``dtype``, written to ``into`` if there is one."""
    if into is None:
        return torch.bmm(a, b).to(dtype)
    return torch.bmm(a, b, out=into) if a.dtype == dtype else into.copy_(torch.bmm(a, b))


def _where(good: Tensor, values: Tensor, other: float) -> Tensor:
    """Matrices, or ``other`` for those that are not good; eager code does nothing where all are."""
    if not is_traced() and good.all():
        return values
    return torch.where(good[:, None, None], values, other)


def _or_one(size: Tensor) -> Tensor:
    return torch.where(size > 0, size, 1)
