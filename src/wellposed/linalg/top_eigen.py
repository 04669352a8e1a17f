"""The largest eigenvalue of positive semidefinite matrices and its vector, batched, without an eigensolver.

A few products with each matrix turn a start towards its leading vectors. From there Lanczos with full
reorthogonalisation makes a small tridiagonal matrix of it; powers of that, by repeated squaring, single out
its leading vector. Products and sums only: no wait for the host, so it runs inside ``torch.compile``,
``vmap`` and a CUDA graph.

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
"""The kernel for Hopper GPUs works on rows of a power of two: 40 steps take twice as long there as 32."""

PRODUCTS = 16
"""Of the start with the matrix, which take the small eigenvalues out of it. Where no singular value stands
out, the largest of 196 tokens is then right to 4e-4, else to 5e-3 (benchmarks/largest_singular_value.py)."""

_SQUARINGS = 14  # the 16,384th power: eigenvalues of the small matrix that differ by 1e-3 are told apart


def top_eigenpair(A: Tensor, steps: int = LANCZOS_STEPS, products: int = PRODUCTS) -> tuple[Tensor, Tensor]:
    """(B,) eigenvalues and (B, n) vectors of length one; zero for a zero matrix, NaN for one with a NaN."""
    steps = min(steps, A.shape[-1])
    smallest = torch.finfo(A.dtype).tiny
    basis = _start(A, products)
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


def _start(A: Tensor, products: int) -> Tensor:
    """Positive, as the leading vector of tokens with a common mean is, and like no eigenvector by chance."""
    n = A.shape[-1]
    index = torch.arange(1, n + 1, device=A.device, dtype=torch.float32)
    start = (0.5 + torch.frac(index * 0.61803399)).to(A.dtype)
    v: Tensor = start.expand(A.shape[0], 1, n)
    for _ in range(products):
        v = torch.bmm(_normalized(v), A)
    return _normalized(v)


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
    # The column with the largest diagonal entry has the largest share of that eigenvector.
    index = power.diagonal(dim1=-2, dim2=-1).argmax(-1)[:, None, None]
    y = power.gather(-1, index.expand(-1, power.shape[-1], 1))
    y = y / torch.linalg.vector_norm(y, dim=1, keepdim=True).clamp(min=torch.finfo(T.dtype).tiny)
    return torch.bmm(y.mT, torch.bmm(T, y))[:, 0, 0], y[..., 0]


def _unit(T: Tensor) -> Tensor:
    """A positive semidefinite matrix with entries of at most one."""
    largest = T.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]
    return T / largest.clamp(min=torch.finfo(T.dtype).tiny)
