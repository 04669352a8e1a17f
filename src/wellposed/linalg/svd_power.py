r"""Raise the singular values of a matrix to a power, with a gradient that is exact and stable.

.. math::
    X = U \operatorname{diag}(s) V^T \;\mapsto\; U \operatorname{diag}(g) V^T,
    \qquad g_i = s_{\max}\, h(s_i / s_{\max}), \quad h(t) = t^\epsilon

The slope of :math:`t^\epsilon` at t = 0 is infinite, so a token matrix that lacks rank would have an infinite
gradient. Below a relative floor the map continues as a straight line through the origin:

.. math::
    h(t) = t \cdot \max(t, \text{floor})^{\epsilon - 1}

which is exact above the floor, continuous, monotone, and has the largest slope floor^(eps - 1).

Autograd through ``torch.linalg.svd`` divides by s_i^2 - s_j^2 and is non-finite where singular values
repeat. The map itself is smooth there: its derivative (Daleckii and Krein) holds only divided
differences of g, which have finite limits. That is what the backward pass computes.

>>> import torch
>>> x = torch.diag(torch.tensor([4.0, 1.0, 1.0])).requires_grad_()
>>> y = svd_power(x, 0.5)
>>> y.diagonal()
tensor([4., 2., 2.], grad_fn=<DiagonalBackward0>)
>>> y.sum().backward()
>>> bool(x.grad.isfinite().all())
True
"""

# Shapes: X (..., N, D), k = min(N, D), U (..., N, k), s (..., k), V (..., D, k), G like X.

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellposed.linalg.execution import once
from wellposed.linalg.precision import without_autocast

DEFAULT_FLOOR = 1e-7
"""Relative to the largest value. Condition numbers up to 1e7 are treated exactly."""


def power_gain(t: Tensor, eps: float | Tensor, floor: float = DEFAULT_FLOOR) -> Tensor:
    """h(t) / t: the factor that takes t in [0, 1] to t^eps, bounded by floor^(eps - 1).

    >>> t = torch.tensor([0.0, 0.25, 1.0])
    >>> t * power_gain(t, eps=0.5)
    tensor([0.0000, 0.5000, 1.0000])
    """
    gain: Tensor = t.clamp(min=floor) ** (eps - 1)
    return gain


class _Scaled(NamedTuple):
    """Singular values relative to the largest, and what turns h(t) into g."""

    t: Tensor  # (..., k), s / s_max, zero for a zero matrix
    s_max: Tensor  # (..., 1), one for a zero matrix
    gain: Tensor  # (..., k), h(t) / t


def _scaled(s: Tensor, eps: float | Tensor, floor: float) -> _Scaled:
    largest = s[..., :1]
    s_max = torch.where(largest > 0, largest, torch.ones_like(largest))
    t = s / s_max
    return _Scaled(t, s_max, power_gain(t, eps, floor))


def exprel(y: Tensor) -> Tensor:
    """(exp(y) - 1) / y, with its limit 1 at zero.

    Not by expm1: compiled for the CPU that may be exp(y) - 1, which is zero for a small y.
    """
    is_small = y.abs() <= 1
    # exp(y/2) sinh(y/2) / (y/2), of which the second factor is a short series in z = (y/2)^2
    z = torch.where(is_small, y / 2, 0).square()
    series = torch.ones_like(z)
    for k in range(7, 0, -1):
        series = 1 + z * series / (2 * k * (2 * k + 1))
    return torch.where(is_small, (y / 2).exp() * series, (y.exp() - 1) / torch.where(is_small, 1, y))


def _slopes(t: Tensor, gain: Tensor, eps: float | Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """(h_i - h_j) / (t_i - t_j) and (h_i + h_j) / (t_i + t_j), with their limits, each (..., k, k)."""
    steepest = floor ** (eps - 1)
    above = t.clamp(min=floor)
    # Part of the way from t_j to t_i that lies above the floor; the rest has the constant slope.
    gap = (t[..., :, None] - t[..., None, :]).abs()
    gap_above = (above[..., :, None] - above[..., None, :]).abs()
    at_or_above = (t >= floor).to(t.dtype)[..., :, None].expand_as(gap)
    share = torch.where(gap > 0, gap_above / torch.where(gap > 0, gap, 1), at_or_above).clamp(max=1)
    # (t_i^eps - t_j^eps) / (t_i - t_j) by the logarithm of t_j / t_i: it keeps all digits when two values
    # nearly coincide, where a plain difference has none left.
    log_above = above.log()
    r = log_above[..., None, :] - log_above[..., :, None]
    ratio = eps * exprel(eps * r) / exprel(r)
    difference = share * gain[..., :, None] * ratio + (1 - share) * steepest

    h = t * gain
    total = t[..., :, None] + t[..., None, :]
    h_total = h[..., :, None] + h[..., None, :]
    mean = torch.where(total > 0, h_total / torch.where(total > 0, total, 1), steepest)
    return difference, mean


def _adjoint(
    U: Tensor, s: Tensor, V: Tensor, G: Tensor, eps: float | Tensor, floor: float, rescale: bool
) -> Tensor:
    """The adjoint of the derivative of :func:`svd_power` at U diag(s) V^T, applied to G."""
    t, s_max, gain = _scaled(s, eps, floor)
    difference, mean = _slopes(t, gain, eps, floor)

    UtG, GV = U.mT @ G, G @ V
    H = UtG @ V
    symmetric, antisymmetric = (H + H.mT) / 2, (H - H.mT) / 2
    core = difference * symmetric + mean * antisymmetric

    # All g_i depend on s_max too. Where the largest value repeats, s_max has no derivative; the mean
    # over the tied directions is the central one for a tie of two.
    h = t * gain
    is_power = t >= floor
    if rescale:
        through_s_max = torch.where(is_power, (1 - eps) * h, 0)
    else:
        through_s_max = -torch.where(is_power, eps * h, h)
    pulled = (through_s_max * H.diagonal(dim1=-2, dim2=-1)).sum(-1, keepdim=True)
    tied = (t >= 1 - 4 * torch.finfo(t.dtype).eps).to(t.dtype)
    tied = tied / tied.sum(-1, keepdim=True).clamp(min=1)
    core = core + torch.diag_embed(tied * pulled)

    out = U @ core @ V.mT
    out = out + (U * gain[..., None, :]) @ (UtG - H @ V.mT)
    out = out + ((GV - U @ H) * gain[..., None, :]) @ V.mT
    out = out if rescale else out / s_max[..., None]
    # At a zero matrix no value is small beside another: the identity is its gradient there, not the floor's
    # slope, which float16 may not hold.
    return torch.where(s[..., :1, None] > 0, out, G)


class _SVDPower(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, eps: float | Tensor, floor: float, rescale: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        # LAPACK refuses the whole batch for one NaN: bad matrices pass through it as zeros.
        finite = x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        U, s, Vh = torch.linalg.svd(torch.where(finite, x, 0), full_matrices=False)
        t, _, gain = _scaled(s, eps, floor)
        g = s * gain if rescale else t * gain
        out = (U * g[..., None, :]) @ Vh
        return torch.where(finite, out, torch.nan), U, s, Vh, finite

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, ctx.eps, ctx.floor, ctx.rescale = inputs
        _, U, s, Vh, finite = output
        ctx.mark_non_differentiable(U, s, Vh, finite)
        ctx.save_for_backward(x, U, s, Vh, finite)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None, None]:
        _, U, s, Vh, finite = ctx.saved_tensors
        # A caller may run backward inside autocast; these products need their digits.
        with without_autocast(grad):
            out = _adjoint(U, s, Vh.mT, grad, ctx.eps, ctx.floor, ctx.rescale)
        return torch.where(finite, out, 0), None, None, None


def svd_power(
    x: Tensor, eps: float | Tensor, *, rescale: bool = True, floor: float = DEFAULT_FLOOR
) -> Tensor:
    """Singular values s -> s_max (s / s_max)^eps, singular vectors kept.

    Args:
        x: (..., N, D), float32 or float64. A matrix that holds a non-finite value gives NaN, for that
            matrix only.
        eps: the power, in (0, 1].
        rescale: False leaves out the factor s_max, so that the largest singular value becomes 1.
        floor: relative to s_max; below it the map is linear, which bounds the gradient.
    """
    if isinstance(eps, Tensor):
        eps = eps.to(x.dtype)
    out: Tensor = _SVDPower.apply(x, eps, floor, rescale)[0]
    return out
