r"""The squaring chain by batched products, in float32 or float64, on any device.

With A = X X^T of the smaller side, and coefficients v from :mod:`wellposed.linalg.spectral_fit`:

.. math::
    B_0 = \frac{(1 + \delta)}{1.05\,\lambda_{\max}} A, \qquad B_{k+1} = (1 + \delta)(2 B_k - B_k^2), \qquad
    Z = v_0 I + \sum_{k=0}^{K} v_{k+1} B_k, \qquad Y = Z X

Small eigenvalues are small entries of B_k here, so they keep their digits; as 1 - B_k they would not.

The adjoint needs B_0 to B_{K-1}: K matrices of n x n an image. With G the gradient of Y:

.. math::
    \bar Z = \operatorname{sym}(G X^T), \qquad \bar B_K = v_{K+1} \bar Z, \qquad
    \bar B_k = v_{k+1} \bar Z + (1 + \delta) (2 \bar B_{k+1} - B_k \bar B_{k+1} - \bar B_{k+1} B_k)

and, because every eigenvalue is taken relative to the largest one, with u its vector,

.. math::
    X' = Z G + \frac{2 (1 + \delta)}{1.05\,\lambda_{\max}} \bar B_0 X
        - \frac{2 \langle \bar B_0, B_0 \rangle}{\lambda_{\max}} u u^T X

Y over s_max, the literal form, has one more term through it: :math:`- \langle Z, \bar Z \rangle u u^T X`.
"""

# Shapes: x, y, grad (B, n, d) with n <= d, Z and the B_k (B, n, n), s_max and unit (B,), u (B, n),
# coefficients (1 or B, K + 2).

from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.linalg.eager import is_traced
from wellposed.linalg.precision import scaled, unit_of
from wellposed.linalg.spectral_fit import MARGIN
from wellposed.linalg.top_eigen import top_eigenpair


class Chain(NamedTuple):
    """What the adjoint needs."""

    Z: Tensor
    s_max: Tensor  # over the unit; 0 of a zero matrix, NaN of one that is not finite
    unit: Tensor
    u: Tensor
    kept: tuple[Tensor, ...]  # the B_k


def chain_forward(
    x: Tensor, coefficients: Tensor, delta: float, *, rescale: bool, dtype: torch.dtype, keep: bool
) -> tuple[Tensor, Chain]:
    """Y in x's dtype, and the chain, with its members if ``keep``."""
    unit = unit_of(x, dtype)
    X = scaled(x, unit, dtype)
    A = torch.bmm(X, X.mT)
    lam, u = top_eigenpair(A)
    # A matrix that is not finite ends here: all of B_0 is NaN.
    per_lam = torch.where(lam == 0, 0, (1 + delta) / MARGIN / lam)
    v = coefficients.to(dtype)[..., None, None]
    B = A * per_lam[:, None, None]
    Z, kept = v[:, 1] * B, []
    for k in range(v.shape[1] - 2):
        if keep:
            kept.append(B)
        B = torch.baddbmm(B, B, B, beta=2 * (1 + delta), alpha=-(1 + delta))
        Z = _plus(Z, v[:, k + 2], B)
    Z = Z + v[:, 0] * torch.eye(Z.shape[-1], dtype=dtype, device=x.device)
    s_max = lam.sqrt()
    y = torch.bmm(Z, X)
    y = y * unit[:, None, None] if rescale else y / _or_one(s_max)[:, None, None]
    return y.to(x.dtype), Chain(Z, s_max, unit, u, tuple(kept))


def chain_backward(
    grad: Tensor, x: Tensor, chain: Chain, coefficients: Tensor, delta: float, *, rescale: bool
) -> Tensor:
    """The adjoint of :func:`chain_forward`'s Y at x, applied to grad; in grad's dtype."""
    Z, s_max, unit, u, kept = chain
    size = _or_one(s_max)
    X = scaled(x, unit, Z.dtype) / size[:, None, None]  # all below is for tokens with s_max = 1
    G = grad.to(Z.dtype)
    v = coefficients.to(Z.dtype)[..., None, None]
    Zb = torch.bmm(G, X.mT)
    Zb = (Zb + Zb.mT) / 2
    Bb = v[:, len(kept) + 1] * Zb
    for k in reversed(range(len(kept))):
        M = torch.bmm(kept[k], Bb)
        # M + M^T is symmetric to the last bit. Anything less grows at 2 (1 + delta) a step.
        Bb = v[:, k + 1] * Zb + (1 + delta) * (2 * Bb - (M + M.mT))
    turn = 2 * (Bb * kept[0]).sum((-2, -1))
    if not rescale:
        turn = turn + (Z * Zb).sum((-2, -1))
    # Both terms in X as one product, the second through s_max.
    left = 2 * (1 + delta) / MARGIN * Bb - turn[:, None, None] * (u[:, :, None] * u[:, None])
    out = torch.baddbmm(torch.bmm(Z, G), left, X)
    if not rescale:
        out = out / size[:, None, None] / unit[:, None, None]
    zero, finite = (flag[:, None, None] for flag in (s_max == 0, s_max.isfinite()))
    return torch.where(zero, grad, torch.where(finite, out, 0).to(grad.dtype))


def _plus(Z: Tensor, v: Tensor, B: Tensor) -> Tensor:
    """Z + v B, in place where that can be: new memory costs more than the sum."""
    # vmap has no rule for the operation in place, only a slow way around.
    return torch.addcmul(Z, v, B) if is_traced() else Z.addcmul_(v, B)


def _or_one(size: Tensor) -> Tensor:
    return torch.where(size == 0, 1, size)
