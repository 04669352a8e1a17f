r"""Singular values, condition number and ranks of token matrices, batched, with float64 inside.

On a CPU the singular values are roots of the eigenvalues of the Gram matrix :math:`A = X X^T`. These have an
error of about 1e-16 of the largest, so where kappa is above 3e4 LAPACK's SVD takes over, after a QR
factorisation where the matrix is long. On a GPU both are slow, so the condition number comes from powers of A
and of its inverse: repeated squaring singles out the directions u of the largest and the smallest
singular value, and

.. math::
    \sigma = \|X^T u\| / \|u\|

reads the value off X itself. An error of u enters squared, so the digits lost in forming A come back; and
any u gives at most :math:`\sigma_{\max}` and at least :math:`\sigma_{\min}`, so kappa is never made up.

>>> x = torch.diag(torch.tensor([4.0, 2.0, 1.0]))
>>> condition_number(x)
ConditionNumber(kappa=tensor(4., dtype=torch.float64), at_least=tensor(False))
>>> condition_number(torch.ones(3, 5))
ConditionNumber(kappa=tensor(30000000., dtype=torch.float64), at_least=tensor(True))
"""

# Shapes: X (..., N, D) with N <= D inside, A (..., N, N), singular values (..., min(N, D)).

from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.linalg.execution import over_chunks
from wellposed.linalg.precision import in_float64, without_autocast
from wellposed.linalg.spectral_eigen import gram_matrix

KAPPA_LIMIT = 3e7
"""Condition numbers are told up to here. Float32 tokens hold no more, and beyond it the Gram matrix would
have no digit of the smallest singular value left."""

GPU_TOLERANCE, CPU_TOLERANCE = 5e-3, 1e-6
"""Relative error of :func:`condition_number` on a GPU, and on a CPU."""

ON_CPU = "float64 Gram eigenvalues, SVD above kappa 3e4"
"""How singular values are computed on a CPU."""

_SQUARINGS = 8
_SQUARINGS_FOR_LARGEST = 9  # in bfloat16, where they are cheap
_HARD_ON_CPU = 3e4  # kappa from which on the roots of the Gram matrix's eigenvalues have too few digits
_HARD = 3e5  # kappa from which on the Gram matrix alone has too few digits
_ENTRIES_AT_ONCE = 2**26
_SMALL = 1e-4  # singular values below this part of the largest are computed again without it


class ConditionNumber(NamedTuple):
    """Condition numbers (...), and where they are lower bounds only.

    ``kappa`` is NaN for a matrix that holds a non-finite value. Where ``at_least`` is True the true value
    is ``kappa`` or more: the smallest singular value is below what the arithmetic can tell.
    """

    kappa: Tensor
    at_least: Tensor


def condition_number(
    x: Tensor, *, singular_values: Tensor | None = None, roundings: float = 0.0
) -> ConditionNumber:
    """sigma_max / sigma_min of each matrix of x (..., N, D), over its min(N, D) singular values.

    Args:
        x: floating point.
        singular_values: of x, where they are known already.
        roundings: how many rounding errors of x's dtype each entry carries, in the mean; a kappa that only
            these decide is given as a lower bound. 0 takes the matrix as it is.
    """
    _check(x)
    if singular_values is None and len(parts := _parts(x)) > 1:
        found = [condition_number(part, roundings=roundings) for part in parts]
        kappas, flags = zip(*found, strict=True)
        return ConditionNumber(*(torch.cat(each).reshape(x.shape[:-2]) for each in (kappas, flags)))
    with torch.no_grad(), without_autocast(x):
        values = _cpu_values(x) if singular_values is None and _by_lapack(x) else singular_values
        if values is not None:
            largest, smallest, norm = values[..., 0], values[..., -1], values.square().sum(-1).sqrt()
        else:
            wide = _wide(x)
            in_range, scale = _in_range(x.dtype, wide)
            largest, smallest = (value * scale for value in _extremes_by_squaring(in_range))
            norm = in_range.square().sum((-2, -1)).sqrt() * scale
        kappa, limit = largest / smallest, _limit(x, norm, largest, roundings)
        at_least = largest.isfinite() & ~(kappa < limit)  # zero tokens too, whose kappa is 0 / 0
        return ConditionNumber(torch.where(at_least, limit, kappa), at_least)


def singular_values(x: Tensor) -> Tensor:
    """Singular values (..., min(N, D)) of each matrix of x (..., N, D), descending, float64.

    Accurate to 1e-4 of each value down to sigma_max / 1e6. NaN for a matrix with a non-finite value.
    """
    _check(x)
    if len(parts := _parts(x)) > 1:
        return torch.cat([singular_values(part) for part in parts]).reshape(*x.shape[:-2], -1)
    with torch.no_grad(), without_autocast(x):
        if _by_lapack(x):
            return _cpu_values(x)
        in_range, scale = _in_range(x.dtype, _wide(x))
        return _gram_values(in_range) * scale[..., None]


def effective_rank(values: Tensor) -> Tensor:
    """Exponential of the entropy of the normalised singular values (..., k) (Roy, Vetterli 2007): 1 to k."""
    p = values / values.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return entropy.exp()


def stable_rank(values: Tensor) -> Tensor:
    """Squared Frobenius norm over squared spectral norm, from the singular values (..., k): 1 to k."""
    return (values / values[..., :1]).square().sum(-1)


def estimator(x: Tensor) -> str:
    """How :func:`condition_number` and :func:`singular_values` work for x."""
    return ON_CPU if _by_lapack(x) else "float64 Gram matrix, values read off the tokens"


def tolerance(x: Tensor) -> float:
    """Relative error of :func:`condition_number` for x."""
    return CPU_TOLERANCE if _by_lapack(x) else GPU_TOLERANCE


def _by_lapack(x: Tensor) -> bool:
    return x.device.type != "cuda"


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """The matrices in parts (b, N, D) that a GPU has the memory for, with all that is made of them."""
    rows, columns = sorted(x.shape[-2:])
    at_once = max(1, _ENTRIES_AT_ONCE // (rows * (rows + columns)))
    matrices = x.numel() // (rows * columns)
    if _by_lapack(x) or matrices <= at_once:
        return (x,)
    return torch.split(x.reshape(-1, *x.shape[-2:]), at_once)


def _wide(x: Tensor) -> Tensor:
    """X in float64 with no more rows than columns."""
    x = in_float64(x)
    return x if x.shape[-2] <= x.shape[-1] else x.mT


def _cpu_values(x: Tensor) -> Tensor:
    x = x.detach().cpu()  # where MPS, which knows no float64, gets its own
    X = x.reshape(-1, *x.shape[-2:])
    values = X.new_empty((len(X), min(X.shape[1:])), dtype=torch.float64)
    if not len(X):
        return values.reshape(*x.shape[:-2], values.shape[1])
    values[:1] = _values(X[:1], svd_first=False)
    svd_first = bool(_is_hard(values[:1]).any())  # tokens of one position are much alike
    rest, of_rest = X[1:], values[1:]

    def some(chunk: slice) -> None:
        of_rest[chunk] = _values(rest[chunk], svd_first)

    over_chunks(some, len(rest), X.shape[1] * X.shape[2])
    return values.reshape(*x.shape[:-2], -1)


def _values(x: Tensor, svd_first: bool) -> Tensor:
    """Of matrices (B, N, D): from the Gram matrix, or where that finds a matrix hard, by the SVD.

    With ``svd_first`` they are the same, and hard matrices cost no Gram matrix.
    """
    # The same numbers may be rounded otherwise where they lie otherwise in memory. With rows that begin at
    # multiples of 64 bytes, and so each Gram matrix, a matrix has one kappa wherever in a batch it is.
    columns = x.shape[2]
    wide = x.new_zeros((*x.shape[:2], columns + -columns % 8), dtype=torch.float64)
    wide[..., :columns] = x
    wide = wide if x.shape[1] <= columns else wide[..., :columns].mT
    if not svd_first:
        return _gram_then_lapack(x.dtype, wide)
    values = wide.new_full(wide.shape[:2], torch.nan)
    finite = wide.isfinite().all(-1).all(-1)
    values[finite] = _lapack_values(wide[finite])
    # Near the limit the Gram matrix decides.
    is_open = finite & ~_is_hard(values, 2 * _HARD_ON_CPU)
    if is_open.any():
        values[is_open] = _gram_then_lapack(x.dtype, wide[is_open])
    return values


def _gram_then_lapack(dtype: torch.dtype, wide: Tensor) -> Tensor:
    """Of matrices (B, n, d), n <= d, that were in ``dtype``."""
    in_range, scale = _in_range(dtype, wide)
    grams = gram_matrix(in_range)
    # LAPACK refuses the whole batch for one NaN: bad matrices pass through it as zeros.
    finite = grams.diagonal(dim1=1, dim2=2).sum(-1).isfinite()
    if not finite.all():
        grams = torch.where(finite[:, None, None], grams, 0)
    is_aligned = grams.shape[1] % 8 == 0
    eigenvalues = (
        torch.linalg.eigvalsh(grams) if is_aligned else torch.stack([torch.linalg.eigvalsh(A) for A in grams])
    )
    values = eigenvalues.flip(-1).clamp(min=0).sqrt() * scale[:, None]
    is_hard = _is_hard(values)
    if is_hard.any():
        values[is_hard] = _lapack_values(wide[is_hard])
    return torch.where(finite[:, None], values, torch.nan)


def _is_hard(values: Tensor, kappa: float = _HARD_ON_CPU) -> Tensor:
    return values[:, -1] * kappa < values[:, 0]


def _lapack_values(x: Tensor) -> Tensor:
    if x.shape[-1] >= 2 * x.shape[-2]:
        x = torch.linalg.qr(x.mT, mode="r").R
    values: Tensor = torch.linalg.svdvals(x)
    return values


def _in_range(dtype: torch.dtype, wide: Tensor) -> tuple[Tensor, Tensor]:
    """``wide``, which was in ``dtype``, scaled so that float64 holds its squares; the scale (...)."""
    if dtype != torch.float64:  # squares of narrower types do anyway
        return wide, torch.ones(wide.shape[:-2], dtype=wide.dtype, device=wide.device)
    largest = wide.abs().amax((-2, -1), keepdim=True)
    scale = torch.where(largest > 0, largest, 1)
    return wide / scale, scale[..., 0, 0]


def _gram_values(x: Tensor) -> Tensor:
    finite = x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    x = torch.where(finite, x, 0)
    values, rotated = _rotate(x)
    # The Gram matrix has few digits of the small values beside a large one. Without the large ones it has
    # them all.
    is_small = values < _SMALL * values.amax(-1, keepdim=True)
    if bool(is_small.any()):
        small, _ = _rotate(torch.where(is_small[..., None], rotated, 0))
        ranked = small.sort(-1, descending=True).values
        place = (is_small.cumsum(-1) - 1).clamp(min=0)
        values = torch.where(is_small, ranked.gather(-1, place), values)
    return torch.where(finite[..., 0], values.sort(-1, descending=True).values, torch.nan)


def _rotate(x: Tensor) -> tuple[Tensor, Tensor]:
    """X turned to nearly orthogonal rows, and their lengths: its singular values."""
    _, U = torch.linalg.eigh(x @ x.mT)
    rotated = U.mT @ x
    return rotated.square().sum(-1).sqrt(), rotated


def _extremes_by_squaring(x: Tensor) -> tuple[Tensor, Tensor]:
    batch, x = x.shape[:-2], x.flatten(0, -3) if x.ndim > 2 else x[None]
    A = x @ x.mT
    # A wrong direction that bfloat16 mixes in cannot be longer than the largest singular value, but it can
    # be 1e7 times longer than the smallest: that one needs all digits.
    largest = _gain(A @ _dominant(A, _SQUARINGS_FOR_LARGEST, coarse=True), x)
    factor = inverse_factor(A)
    smallest = smallest_value(factor, x)
    # Where kappa is large, Cholesky has rounded the smallest eigenvalues away. What its factor makes of X is
    # well conditioned, so the Gram matrix of that has all their digits (shifted Cholesky QR).
    is_hard = largest > _HARD * smallest
    if bool(is_hard.any()):
        x, factor = x[is_hard], factor[is_hard]
        better = factor @ x
        factor = inverse_factor(better @ better.mT) @ factor
        # Both are upper bounds.
        smallest[is_hard] = torch.minimum(smallest[is_hard], smallest_value(factor, x))
    return largest.reshape(batch), smallest.reshape(batch)


def inverse_factor(A: Tensor) -> Tensor:
    """The inverse of the Cholesky factor of A."""
    # The shift keeps Cholesky going where rounding has made A indefinite; it moves no eigenvector.
    shift = 4 * torch.finfo(A.dtype).eps * A.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    L, _ = torch.linalg.cholesky_ex(A + torch.where(shift > 0, shift, 1) * identity)
    inverse: Tensor = torch.linalg.solve_triangular(L, identity.expand_as(L), upper=False)
    return inverse


def smallest_value(factor: Tensor, x: Tensor) -> Tensor:
    """The smallest singular value of x from the inverse Cholesky factor of X X^T."""
    return _gain(_dominant(factor.mT @ factor, _SQUARINGS), x)


def _aligned(A: Tensor) -> Tensor:
    """A with zeros up to a multiple of 8 rows and columns: products of odd sizes take a third longer."""
    missing = -A.shape[-1] % 8
    return torch.nn.functional.pad(A, (0, missing, 0, missing)) if missing else A


def _dominant(A: Tensor, squarings: int, *, coarse: bool = False) -> Tensor:
    """About the eigenvector (..., N, 1) of the largest eigenvalue of positive definite matrices."""
    n = A.shape[-1]
    A = _unit_diagonal(_aligned(A))
    A = A.bfloat16() if coarse else A
    for done in range(squarings):
        A = A @ A
        # An entry is at most N^(2^k - 1) after k squarings, which float64 holds for k = 6, bfloat16 for 3.
        A = _unit_diagonal(A) if done % (3 if coarse else 6) == 2 else A
    # The column with the largest diagonal entry has the largest share of that eigenvector.
    index = A.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
    return A.gather(-1, index.expand(*A.shape[:-1], 1))[..., :n, :].double()


def _unit_diagonal(A: Tensor) -> Tensor:
    """A positive definite matrix with entries of at most one."""
    largest = A.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    return A / largest.clamp(min=torch.finfo(A.dtype).tiny)


def _gain(u: Tensor, x: Tensor) -> Tensor:
    before, after = (v.square().sum((-2, -1)).sqrt() for v in (u, u.mT @ x))
    return after / before.clamp(min=torch.finfo(before.dtype).tiny)


def _limit(x: Tensor, norm: Tensor, largest: Tensor, roundings: float) -> Tensor:
    """The largest kappa that can be told; ``norm`` is Frobenius's."""
    limit = torch.full_like(largest, KAPPA_LIMIT)
    if roundings == 0:
        return limit
    # Independent errors of about u / sqrt(3) of each entry have this spectral norm.
    unit = roundings * torch.finfo(x.dtype).eps / 2
    rows, columns = x.shape[-2:]
    noise = unit / 3**0.5 * (rows**-0.5 + columns**-0.5) * norm
    return torch.where(largest > 0, (largest / noise).clamp(max=KAPPA_LIMIT), limit)


def _check(x: Tensor) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"expected a floating point tensor (..., N, D), got {got}; convert with x.float().")
    if x.ndim < 2 or x.shape[-1] == 0 or x.shape[-2] == 0:
        raise ValueError(
            f"expected matrices (..., N, D) with at least one row and column, got shape {tuple(x.shape)}."
        )
