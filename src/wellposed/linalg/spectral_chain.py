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

:math:`\lambda_{\max}` comes without an eigensolver (:func:`top_eigenpair`). All is products and sums: no
wait for the host, so it runs inside ``torch.compile``, ``vmap`` and a CUDA graph.
"""

# Shapes: x, y, grad (B, n, d) with n <= d, Z and the B_k (B, n, n), s_max and unit (B,), u (B, n),
# coefficients (1 or B, K + 2). Of Lanczos: basis (B, k, n) with orthonormal rows, T (B, k, k).
# All products are torch.bmm, one operation of a traced program where @ is five.

from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.linalg.execution import is_traced
from wellposed.linalg.precision import scaled, unit_of
from wellposed.linalg.spectral_fit import MARGIN

LANCZOS_STEPS = 32

START_SQUARINGS = 5
"""Up to the power of the start. At the worst they leave the value of 196 tokens 1.18 times too low, with
which the chain does not diverge yet; python -m benchmarks largest shows what is seen."""

_SQUARINGS = 14  # the 16,384th power: eigenvalues of the small matrix that differ by 1e-3 are told apart


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


def top_eigenpair(
    A: Tensor, steps: int = LANCZOS_STEPS, squarings: int = START_SQUARINGS
) -> tuple[Tensor, Tensor]:
    r"""The largest eigenvalue of positive semidefinite matrices A (B, n, n) and its vector.

    The start is made of A^32. Of its columns the one with the largest diagonal entry is taken: that entry is
    at least :math:`\lambda_{\max}^{32} / n`, so already this vector's value is within a factor of n^(1/32) of
    the largest, whatever the matrix. A fixed vector times A^32 is added, for the directions that the column
    lacks. From there Lanczos with full reorthogonalisation makes a small tridiagonal matrix of it; powers of
    that, by repeated squaring, single out its leading vector.

    Returns:
        (B,) eigenvalues and (B, n) vectors of length one; zero for a zero matrix, NaN for one with a NaN.

    >>> A = torch.diag(torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64))
    >>> lam, u = top_eigenpair(A[None])
    >>> round(lam.item(), 12), [round(abs(entry), 6) for entry in u[0].tolist()]
    (4.0, [0.0, 1.0, 0.0])
    """
    steps = min(steps, A.shape[-1])
    smallest = torch.finfo(A.dtype).tiny
    basis = power_start(A, squarings)
    alphas, betas = [], []
    for step in range(steps):
        last = basis[:, -1:]
        w = torch.bmm(last, A)
        alphas.append((w * last).sum(-1))
        if step == steps - 1:
            break
        for _ in range(2):  # once leaves rounding errors that grow
            w = torch.baddbmm(w, torch.bmm(w, basis.mT), basis, alpha=-1)
        beta = torch.linalg.vector_norm(w, dim=-1)
        # Nothing new is left to see: what remains is rounding, and its direction means nothing.
        is_new = beta > 8 * torch.finfo(A.dtype).eps * alphas[0].abs().clamp(min=smallest)
        betas.append(torch.where(is_new, beta, 0))
        following = torch.where(is_new[..., None], w / beta.clamp(min=smallest)[..., None], 0)
        basis = torch.cat((basis, following), 1)
    lam, weights = _leading(_tridiagonal(torch.cat(alphas, 1), betas))
    u = torch.bmm(weights.to(A.dtype)[:, None], basis)[:, 0]
    return lam.to(A.dtype), u


def power_start(A: Tensor, squarings: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A direction (B, 1, n) near the leading vector, from the power 2^squarings of A made in ``dtype``."""
    n = A.shape[-1]
    # Positive, as the leading vector of tokens with a common mean is, and like no eigenvector by chance.
    index = torch.arange(1, n + 1, device=A.device, dtype=torch.float32)
    fixed = (0.5 + torch.frac(index * 0.61803399)).expand(A.shape[0], 1, n)
    if squarings == 0:
        return _normalized(fixed.to(A.dtype))
    power = _unit(A).to(dtype)  # a start needs no more digits
    for _ in range(squarings):
        power = _unit(torch.bmm(power, power))
    mixed = _normalized(torch.bmm(fixed.to(dtype), power).float())
    column = _normalized(_largest_column(power).mT.float())
    # With the sign that keeps them from cancelling.
    is_opposite = (mixed * column).sum(-1, keepdim=True) < 0
    return _normalized(torch.where(is_opposite, mixed - column, mixed + column).to(A.dtype))


def _normalized(v: Tensor) -> Tensor:
    """Of length one, but a zero vector stays zero."""
    length: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return v / length.clamp(min=torch.finfo(v.dtype).tiny)


def _tridiagonal(alpha: Tensor, betas: list[Tensor]) -> Tensor:
    # The small matrix costs nothing, so it gets all digits there are.
    wide = torch.float32 if alpha.device.type == "mps" else torch.float64
    T = torch.diag_embed(alpha.to(wide))
    if not betas:
        return T
    off = torch.diag_embed(torch.cat(betas, 1).to(wide), offset=1)
    return T + off + off.mT


def _leading(T: Tensor) -> tuple[Tensor, Tensor]:
    """The largest eigenvalue (B,) of positive semidefinite T and its vector (B, k)."""
    power = _unit(T)
    for done in range(_SQUARINGS):
        power = torch.bmm(power, power)
        # The largest entry of a square is at least 1 again and at most k: float32 holds four of them.
        power = _unit(power) if done % 4 == 3 else power
    y = _largest_column(power)
    y = y / torch.linalg.vector_norm(y, dim=1, keepdim=True).clamp(min=torch.finfo(T.dtype).tiny)
    return torch.bmm(y.mT, torch.bmm(T, y))[:, 0, 0], y[..., 0]


def _largest_column(power: Tensor) -> Tensor:
    """(B, k, 1), with the largest diagonal entry: it has the largest share of the leading vector."""
    index = power.diagonal(dim1=-2, dim2=-1).argmax(-1)[:, None, None]
    return power.gather(-1, index.expand(-1, power.shape[-1], 1))


def _unit(T: Tensor) -> Tensor:
    """A positive semidefinite matrix with entries of at most one."""
    largest = T.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]
    return T / largest.clamp(min=torch.finfo(T.dtype).tiny)
