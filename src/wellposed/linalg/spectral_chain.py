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
"""

# Shapes: x, y, grad (B, n, d) with n <= d, Z and the B_k (B, n, n), lam (B,), u (B, n),
# coefficients (1 or B, K + 2).

import torch
from torch import Tensor

from wellposed.linalg.spectral_fit import MARGIN
from wellposed.linalg.top_eigen import top_eigenpair


def chain_forward(
    x: Tensor, coefficients: Tensor, delta: float, *, dtype: torch.dtype, keep: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor, Tensor]:
    """Y in x's dtype, Z, the B_k (with ``keep`` only), lambda_max and its vector.

    A zero matrix gives zeros and lambda_max = 0, one that is not finite gives NaN.
    """
    largest = torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True))
    # One rounding of tokens of any size keeps the squares in the range of the dtype.
    X, scale = _scaled(x, largest, dtype)
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
    y = torch.bmm(Z * scale, X).to(x.dtype)
    wide = _widest(x)
    return y, Z, tuple(kept), lam.to(wide) * scale.to(wide)[:, 0, 0].square(), u


def chain_backward(
    grad: Tensor,
    x: Tensor,
    Z: Tensor,
    kept: tuple[Tensor, ...],
    lam: Tensor,
    u: Tensor,
    coefficients: Tensor,
    delta: float,
) -> Tensor:
    """The adjoint of :func:`chain_forward`'s Y at x, applied to grad; in grad's dtype."""
    dtype = Z.dtype
    X, _ = _scaled(x, lam.sqrt()[:, None, None], dtype)  # all below is for tokens with lambda_max = 1
    G = grad.to(dtype)
    v = coefficients.to(dtype)[..., None, None]
    Zb = torch.bmm(G, X.mT)
    Zb = (Zb + Zb.mT) / 2
    Bb = v[:, len(kept) + 1] * Zb
    for k in reversed(range(len(kept))):
        M = torch.bmm(kept[k], Bb)
        # M + M^T is symmetric to the last bit. Anything less grows at 2 (1 + delta) a step.
        Bb = v[:, k + 1] * Zb + (1 + delta) * (2 * Bb - (M + M.mT))
    inner = (Bb * kept[0]).sum((-2, -1))[:, None, None]
    # Both terms in X as one product, the second through lambda_max.
    left = 2 * (1 + delta) / MARGIN * Bb - 2 * inner * (u[:, :, None] * u[:, None])
    return torch.baddbmm(torch.bmm(Z, G), left, X).to(grad.dtype)


def _plus(Z: Tensor, v: Tensor, B: Tensor) -> Tensor:
    """Z + v B, in place where that can be: new memory costs a CPU more than the sum."""
    # vmap has no rule for the operation in place, only a slow way around.
    is_mapped = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    return torch.addcmul(Z, v, B) if is_mapped else Z.addcmul_(v, B)


def _scaled(x: Tensor, size: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """X / size in ``dtype``, and the size (B, 1, 1), which is kept from being zero."""
    common = torch.promote_types(x.dtype, dtype)
    size = size.to(common).clamp(min=torch.finfo(common).tiny)
    return (x * size.reciprocal()).to(dtype), size.to(dtype)


def _widest(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64
