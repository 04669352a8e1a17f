r"""Raise the singular values of a matrix to a power by its Gram matrix.

.. math::
    X = U \operatorname{diag}(s) V^T \;\mapsto\; U \operatorname{diag}(g) V^T
    = (X X^T / s_{\max}^2)^{-(1 - \epsilon)/2} X, \qquad g_i = s_{\max} (s_i / s_{\max})^\epsilon

On a CPU by its eigendecomposition (:mod:`wellposed.linalg.spectral_eigen`). Elsewhere the power of X X^T is a
sum over a short chain of squarings (:mod:`wellposed.linalg.spectral_chain`), whose coefficients are fitted
once for each eps (:mod:`wellposed.linalg.spectral_fit`). No gradient is divided by differences of singular
values, so they may repeat or vanish.

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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellposed.linalg.execution import is_jit_traced, once
from wellposed.linalg.precision import in_float64, without_autocast
from wellposed.linalg.spectral_chain import Chain, chain_backward, chain_forward, top_eigenpair
from wellposed.linalg.spectral_eigen import Eigen, Power, eigen_backward, eigen_forward
from wellposed.linalg.spectral_fit import chain_coefficients, wide_steps
from wellposed.linalg.spectral_plan import (
    DEFAULT_TOLERANCE,
    Plan,
    Precision,
    rounds_float32,
    spectral_plan,
)
from wellposed.linalg.spectrum import inverse_factor, smallest_value


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

    How it is computed hangs on the device, see :func:`wellposed.linalg.spectral_plan`.

    Args:
        x: (..., N, D), floating point. A matrix that holds a non-finite value gives NaN and no gradient, for
            that matrix only. Zeros give zeros, and pass their gradient on as it is.
        eps: the power, in [0, 1]. A tensor on x's device, one number or one for each matrix (...), may change
            without compiling again; it gets no gradient.
        rescale: False leaves out the factor s_max, so that the largest singular value becomes 1.
        floor: singular values above ``floor * s_max`` get the power; below it the map is linear, which bounds
            the gradient. None is 1e-6 on a CPU, 1e-5 elsewhere, or 1/300 where the arithmetic is float32. A
            model that is to be the same on several devices takes one that all of them hold.
        tolerance: relative error of a singular value, before the rounding of float32 where that is used. A
            smaller one takes a longer chain, or a higher floor of the eigendecomposition.
        precision: of the arithmetic; ``"auto"`` is float64 where that is fast or needed.

    Backward needs one matrix n x n and one N x D for each image on a CPU, and about 20 n x n elsewhere, n
    being the smaller of N and D.
    """
    plan = _constant_plan(x, floor, tolerance, precision)
    if isinstance(eps, Tensor):
        eps = eps.reshape(-1) if eps.numel() == 1 else eps.expand(x.shape[:-2]).reshape(-1)
    else:
        eps = eps.__float__()  # as in _constant_plan
    if plan.engine == "eigen":
        return _apply_eigen(x, eps, plan, rescale=rescale)
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
    if plan.engine == "eigen":
        return _apply_eigen(x, 0.0, plan, shift=1.0)
    coefficients, delta = chain_coefficients(0.0, plan.floor, plan.fit_tolerance, x.device)
    # gain + 1 is one more on the diagonal.
    one = torch.nn.functional.pad(torch.ones_like(coefficients[:, :1]), (0, coefficients.size(1) - 1))
    return _apply_chain(x, coefficients + one, delta, plan, rescale=True, largest_gain=1 / plan.floor)


def power_for_kappa(x: Tensor, target: float, floor: float) -> Tensor:
    r"""The power that gives each matrix a chosen condition number: eps = log(target) / log(kappa).

    kappa counts up to ``1 / floor`` only, so that a matrix without full rank has a power too. The largest
    eigenvalue of X X^T comes from Lanczos' method, the smallest from powers of its inverse, both in float64
    and without waiting for the host.

    Returns:
        Powers (...) for x (..., N, D), float64: 1 where kappa is below the target already. They get no
        gradient.

    >>> x = torch.stack([torch.diag(torch.tensor([100.0, 1.0])), torch.eye(2)])
    >>> power_for_kappa(x, 10.0, floor=1e-4)
    tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    with torch.no_grad(), without_autocast(x):
        wide = in_float64(x)
        wide = wide if x.shape[-2] <= x.shape[-1] else wide.mT
        wide = wide.flatten(0, -3) if x.ndim > 2 else wide[None]
        size = wide.abs().amax((-2, -1), keepdim=True)
        wide = wide / torch.where(size > 0, size, 1)
        A = wide @ wide.mT
        largest = top_eigenpair(A)[0].sqrt()
        log_kappa = (largest / smallest_value(inverse_factor(A), wide)).log()
        eps = math.log(target) / log_kappa.clamp(min=0, max=-math.log(floor))
        # Zeros have no kappa; what is not finite stays so at any power.
        return eps.clamp(max=1).nan_to_num(1.0).reshape(x.shape[:-2]).to(x.device)


def _constant_plan(x: Tensor, floor: float | None, tolerance: float, precision: Precision) -> Plan:
    """The plan, of numbers that torch.compile takes for constants: float(number) would be a symbol."""
    constant = None if floor is None else floor.__float__()
    return spectral_plan(x, floor=constant, tolerance=tolerance.__float__(), precision=precision)


def _apply_eigen(
    x: Tensor, eps: float | Tensor, plan: Plan, *, shift: float = 0.0, rescale: bool = True
) -> Tensor:
    if isinstance(eps, Tensor):
        power = eps.detach().double().clamp(0, 1)
    else:
        power = x.new_full((1,), eps, dtype=torch.float64)
    # Where the user lets float32 products be rounded, the products that follow are float64 too.
    is_narrow = plan.precision == "float32" or (
        x.dtype != torch.float64 and not rounds_float32(x.device.type)
    )
    dtype, work = getattr(torch, plan.precision), torch.float32 if is_narrow else torch.float64
    settings = Power(power, plan.floor, rescale, shift, dtype, work)
    keep = _needs_gradient(x)
    run = _Eigen.forward if is_jit_traced() else _Eigen.apply
    return _over_wide(x, lambda X: run(X, keep, *settings)[0])


def _apply_chain(
    x: Tensor, coefficients: Tensor, delta: float, plan: Plan, rescale: bool, largest_gain: float
) -> Tensor:
    if plan.engine == "hopper":
        from wellposed.linalg.hopper.engine import ChainPower  # here: it needs Triton

        wide = wide_steps(coefficients.size(1) - 2, delta, largest_gain)
        return _over_wide(x, lambda X: ChainPower.apply(X, coefficients, delta, rescale, wide)[0])
    dtype, keep = getattr(torch, plan.precision), _needs_gradient(x)
    run = _Chain.forward if is_jit_traced() else _Chain.apply
    return _over_wide(x, lambda X: run(X, coefficients, delta, rescale, dtype, keep)[0])


def _over_wide(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """The function of matrices (B, n, d) with n <= d, for x (..., N, D)."""
    X = x.flatten(0, -3) if x.ndim > 2 else x[None]
    is_tall = x.shape[-2] > x.shape[-1]
    out = function(X.mT if is_tall else X)
    return (out.mT if is_tall else out).reshape(x.shape)


def _needs_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


class _Eigen(torch.autograd.Function):
    """Of x, whether to keep the decomposition, and the fields of a :class:`Power`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, keep: bool, *power: Any) -> tuple[Tensor, ...]:
        with without_autocast(x):
            y, eigen = eigen_forward(x, Power(*power), keep)
        return (y,) if eigen is None else (y, *eigen)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, _, eps, *ctx.power = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, eps, *output[1:])

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, eps, *kept = ctx.saved_tensors
        power = Power(eps, *ctx.power)
        # A caller may run backward inside autocast; these products need their digits.
        with without_autocast(grad):
            # Nothing is kept where forward did not expect a gradient.
            eigen = Eigen(*kept) if kept else eigen_forward(x, power, True)[1]
            assert eigen is not None
            out = eigen_backward(grad, eigen, power)
        return out, *[None] * 7


class _Chain(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, coefficients: Tensor, delta: float, rescale: bool, dtype: torch.dtype, keep: bool
    ) -> tuple[Tensor, ...]:
        with without_autocast(x):
            y, (*chain, kept) = chain_forward(x, coefficients, delta, rescale=rescale, dtype=dtype, keep=keep)
        return y, *chain, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, coefficients, ctx.delta, ctx.rescale, ctx.dtype, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, coefficients, *output[1:])

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, coefficients, Z, s_max, unit, u, *kept = ctx.saved_tensors
        # A caller may run backward inside autocast; these products need their digits.
        with without_autocast(grad):
            chain = Chain(Z, s_max, unit, u, tuple(kept))
            if not chain.kept:  # forward did not expect a gradient
                chain = chain_forward(
                    x, coefficients, ctx.delta, rescale=ctx.rescale, dtype=ctx.dtype, keep=True
                )[1]
            out = chain_backward(grad, x, chain, coefficients, ctx.delta, rescale=ctx.rescale)
        return out, *[None] * 5
