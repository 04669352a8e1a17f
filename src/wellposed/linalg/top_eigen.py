r"""The largest eigenvalue of positive semidefinite matrices and its vector, batched, without an eigensolver.

The start is made of A^32. Of its columns the one with the largest diagonal entry is taken: that entry is at
least :math:`\lambda_{\max}^{32} / n`, so already this vector's value is within a factor of n^(1/32) of the
largest, whatever the matrix. A fixed vector times A^32 is added, for the directions that the column lacks.
From there Lanczos with full reorthogonalisation makes a small tridiagonal matrix of it; powers of that, by
repeated squaring, single out its leading vector. Products and sums only: no wait for the host, so it runs
inside ``torch.compile``, ``vmap`` and a CUDA graph.

>>> A = torch.diag(torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64))
>>> lam, u = top_eigenpair(A[None])
>>> round(lam.item(), 12), [round(abs(entry), 6) for entry in u[0].tolist()]
(4.0, [0.0, 1.0, 0.0])
"""

# Shapes: A (B, n, n), basis (B, k, n) with orthonormal rows, T (B, k, k).
# All products are torch.bmm, one operation of a traced program where @ is five.

import torch
from torch import Tensor

LANCZOS_STEPS = 32

START_SQUARINGS = 5
"""Up to the power of the start. At the worst they leave the value of 196 tokens 1.18 times too low, with
which the chain does not diverge yet; python -m benchmarks largest shows what is seen."""

_SQUARINGS = 14  # the 16,384th power: eigenvalues of the small matrix that differ by 1e-3 are told apart


def top_eigenpair(
    A: Tensor, steps: int = LANCZOS_STEPS, squarings: int = START_SQUARINGS
) -> tuple[Tensor, Tensor]:
    """(B,) eigenvalues and (B, n) vectors of length one; zero for a zero matrix, NaN for one with a NaN."""
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
