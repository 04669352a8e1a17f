r"""Raise the singular values of a matrix to a power by matrix products, without an SVD.

.. math::
    X = U \operatorname{diag}(s) V^T \;\mapsto\; U \operatorname{diag}(g) V^T
    = (X X^T / s_{\max}^2)^{-(1 - \epsilon)/2} X, \qquad g_i = s_{\max} (s_i / s_{\max})^\epsilon

The power of X X^T is a sum over a short chain of squarings (:mod:`wellposed.linalg.spectral_chain`), whose
coefficients are fitted once for each eps (:mod:`wellposed.linalg.spectral_fit`). The gradient is that of the
chain; nothing is divided by differences of singular values, so they may repeat or vanish.

>>> x = torch.diag(torch.tensor([4.0, 1.0, 1.0])).requires_grad_()
>>> y = spectral_power(x, 0.5)
>>> [round(value, 2) for value in y.diagonal().tolist()]
[4.0, 2.0, 2.0]
>>> y.sum().backward()
>>> bool(x.grad.isfinite().all())
True
"""

# Shapes: x (..., N, D) outside; inside X (B, n, d) with n <= d, Z (B, n, n), lam (B,), u (B, n or more).

import math
from typing import Any

import torch
from torch import Tensor

from wellposed.linalg import spectral_chain
from wellposed.linalg.hopper.wide import wide_steps
from wellposed.linalg.once import once
from wellposed.linalg.precision import without_autocast
from wellposed.linalg.spectral_coefficients import chain_coefficients
from wellposed.linalg.spectral_plan import (
    DEFAULT_TOLERANCE,
    Engine,
    Plan,
    Precision,
    spectral_plan,
)


def spectral_power(
    x: Tensor,
    eps: float | Tensor,
    *,
    rescale: bool = True,
    floor: float | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    precision: Precision = "auto",
) -> Tensor:
    """Singular values s -> s_max (s / s_max)^eps, singular vectors kept.

    Args:
        x: (..., N, D), floating point. A matrix that holds a non-finite value gives NaN and no gradient, for
            that matrix only. Zeros give zeros, and pass their gradient on as it is.
        eps: the power, in [0, 1]. A tensor on x's device, one number or one for each matrix (...), may change
            without compiling again; it gets no gradient.
        rescale: False leaves out the factor s_max, so that the largest singular value becomes 1.
        floor: singular values above ``floor * s_max`` are right to ``tolerance``; well below it the map is
            linear, which bounds the gradient. None is 1e-4, or 1/300 where the arithmetic is float32.
        tolerance: relative error of a singular value, before the rounding of float32 where that is used. A
            smaller one takes a longer chain.
        precision: of the arithmetic; ``"auto"`` is float64 where that is fast or needed, see
            :func:`wellposed.linalg.spectral_plan`.

    Backward needs about 20 matrices n x n for each image, n being the smaller of N and D.
    """
    plan = _constant_plan(x, floor, tolerance, precision)
    if isinstance(eps, Tensor):
        eps = eps.reshape(-1) if eps.numel() == 1 else eps.expand(x.shape[:-2]).reshape(-1)
    else:
        eps = eps.__float__()  # as in _constant_plan
    coefficients, delta = chain_coefficients(eps, plan.floor, plan.fit_tolerance, x.device)
    largest_gain = math.inf if isinstance(eps, Tensor) else plan.floor ** (eps - 1)
    return _apply_chain(x, coefficients, delta, plan, rescale, largest_gain)


def spectral_condition(
    x: Tensor,
    *,
    floor: float | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    precision: Precision = "auto",
) -> Tensor:
    r"""Singular values s -> s + s_max, singular vectors kept (arXiv 2505.12789).

    .. math::
        X \mapsto X + s_{\max} U V^T

    so that the condition number is at most 2, if no singular value is below the floor: zero stays zero.
    Arguments as for :func:`spectral_power`.

    >>> y = spectral_condition(torch.diag(torch.tensor([3.0, 1.0])))
    >>> [round(value, 2) for value in y.diagonal().tolist()]
    [6.0, 4.0]
    """
    plan = _constant_plan(x, floor, tolerance, precision)
    coefficients, delta = chain_coefficients(0.0, plan.floor, plan.fit_tolerance, x.device)
    # gain + 1 is one more on the diagonal.
    one = torch.nn.functional.pad(torch.ones_like(coefficients[:, :1]), (0, coefficients.size(1) - 1))
    return _apply_chain(x, coefficients + one, delta, plan, rescale=True, largest_gain=1 / plan.floor)


def _constant_plan(x: Tensor, floor: float | None, tolerance: float, precision: Precision) -> Plan:
    """The plan, of numbers that torch.compile takes for constants: float(number) would be a symbol."""
    constant = None if floor is None else floor.__float__()
    return spectral_plan(x, floor=constant, tolerance=tolerance.__float__(), precision=precision)


def _apply_chain(
    x: Tensor, coefficients: Tensor, delta: float, plan: Plan, rescale: bool, largest_gain: float
) -> Tensor:
    X = x.flatten(0, -3) if x.ndim > 2 else x[None]
    is_tall = x.shape[-2] > x.shape[-1]
    keep = x.requires_grad and torch.is_grad_enabled()
    out: Tensor = _Chain.apply(
        X.mT if is_tall else X,
        coefficients,
        delta,
        plan.engine,
        getattr(torch, plan.precision),
        keep,
        rescale,
        wide_steps(coefficients.size(1) - 2, delta, largest_gain),
    )[0]
    return (out.mT if is_tall else out).reshape(x.shape)


class _Chain(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        coefficients: Tensor,
        delta: float,
        engine: Engine,
        dtype: torch.dtype,
        keep: bool,
        rescale: bool,
        wide: int,
    ) -> tuple[Tensor, ...]:
        with without_autocast(x):
            y, Z, kept, lam, u = _forward(x, coefficients, delta, engine, dtype, keep, wide)
            if not rescale:
                y = y / _or_one(lam.sqrt()).to(y.dtype)[:, None, None]
        return y, Z, lam, u, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, coefficients, ctx.delta, ctx.engine, ctx.dtype, _, ctx.rescale, ctx.wide = inputs
        y, *others = output
        ctx.mark_non_differentiable(*others)
        # The literal form's gradient needs its result too.
        ctx.save_for_backward(x, coefficients, x if ctx.rescale else y, *others)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, coefficients, y, Z, lam, u, *stored = ctx.saved_tensors
        kept: tuple[Tensor, ...] = tuple(stored)
        # A caller may run backward inside autocast; these products need their digits.
        with without_autocast(grad):
            if not kept:  # forward did not expect a gradient
                kept = _forward(x, coefficients, ctx.delta, ctx.engine, ctx.dtype, True, ctx.wide)[2]
            if ctx.rescale:
                out = _backward(grad, x, Z, kept, lam, u, coefficients, ctx.delta, ctx.engine)
            else:
                upstream = grad.to(Z.dtype) / _or_one(lam.sqrt()).to(Z.dtype)[:, None, None]
                out = _backward(upstream, x, Z, kept, lam, u, coefficients, ctx.delta, ctx.engine)
                out = (out - _through_divisor(grad, x, y, lam, u)).to(grad.dtype)
            if ctx.rescale and ctx.engine == "hopper":  # it has seen to the two cases below
                return out, *[None] * 7
        zero, finite = (flag[:, None, None] for flag in (lam == 0, lam.isfinite()))
        return torch.where(zero, grad, torch.where(finite, out, 0)), *[None] * 7


def _through_divisor(grad: Tensor, x: Tensor, y: Tensor, lam: Tensor, u: Tensor) -> Tensor:
    """Y = X^eps / s_max, and s_max = |u^T X|: the gradient of that is <G, Y> / lambda u u^T X."""
    s_max, u = _or_one(lam.sqrt())[:, None, None], u[:, None, : x.shape[1]]
    inner = (grad.to(u.dtype) * y.to(u.dtype)).sum((-2, -1), keepdim=True)
    along = (u @ x.to(u.dtype)).to(lam.dtype) / s_max * (inner / s_max)
    return u.mT * along.to(u.dtype)


def _or_one(size: Tensor) -> Tensor:
    return torch.where(size == 0, 1, size)


def _forward(
    x: Tensor,
    coefficients: Tensor,
    delta: float,
    engine: Engine,
    dtype: torch.dtype,
    keep: bool,
    wide: int,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor, Tensor]:
    if engine == "hopper":
        y, Z, stack, lam, u = torch.ops.wellposed.chain_forward(x, coefficients, delta, wide)
        return y, Z, (stack,), lam, u
    return spectral_chain.chain_forward(x, coefficients, delta, dtype=dtype, keep=keep)


def _backward(
    grad: Tensor,
    x: Tensor,
    Z: Tensor,
    kept: tuple[Tensor, ...],
    lam: Tensor,
    u: Tensor,
    coefficients: Tensor,
    delta: float,
    engine: Engine,
) -> Tensor:
    if engine == "hopper":
        out: Tensor = torch.ops.wellposed.chain_backward(grad, x, Z, *kept, lam, u, coefficients, delta)
        return out
    return spectral_chain.chain_backward(grad, x, Z, kept, lam, u, coefficients, delta)
