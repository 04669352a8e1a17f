"""Matrices with prescribed singular values, and graying them in float64, written for clarity.

A matrix made here remembers the factors it was made from, so what graying must give follows from
the formula alone, without any SVD.

>>> import torch
>>> tokens = with_singular_values(geometric(3, kappa=100), tokens=5, channels=3)
>>> torch.linalg.svdvals(tokens.matrix())
tensor([1.0000, 0.1000, 0.0100], dtype=torch.float64)
"""

# Shapes: matrix (..., N, D), k = min(N, D), U (..., N, r), s (r,), V (..., D, r) with r <= k.

import math
from typing import NamedTuple

import numpy as np
import scipy.fft
import torch
from torch import Tensor

FLOOR = 1e-7


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def geometric(k: int, kappa: float, largest: float = 1.0) -> Tensor:
    """K values in equal ratios from ``largest`` to ``largest / kappa``; one value knows no kappa."""
    if k == 1:
        return values(largest)
    return largest * torch.logspace(0, -math.log10(kappa), k, dtype=torch.float64)


def power_law(k: int, exponent: float, largest: float = 1.0) -> Tensor:
    """Largest / i^exponent: a few strong directions and a long tail, as real tokens have."""
    return largest * torch.arange(1, k + 1, dtype=torch.float64) ** -exponent


def repeated(distinct: Tensor, times: int = 2) -> Tensor:
    """Every value ``times`` times over, the largest too."""
    return distinct.repeat_interleave(times)


def clustered(distinct: Tensor, gap: float) -> Tensor:
    """Every value and a second one below it, closer than it by the relative ``gap``."""
    return torch.stack((distinct, distinct * (1 - gap)), -1).flatten()


def rank_deficient(nonzero: Tensor, zeros: int) -> Tensor:
    """``nonzero`` followed by values that vanish."""
    return torch.cat((nonzero, nonzero.new_zeros(zeros)))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthogonal(n: int, batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """A random orthogonal matrix (*batch, n, n)."""
    gaussian = torch.randn(*batch, n, n, dtype=torch.float64, generator=generator(seed))
    return torch.linalg.qr(gaussian).Q


class Factored(NamedTuple):
    """U diag(s) V^T, not yet multiplied out."""

    U: Tensor
    s: Tensor
    V: Tensor

    def matrix(self) -> Tensor:
        return (self.U * self.s) @ self.V.mT

    def grayed(self, eps: float, *, rescale: bool = True, floor: float = FLOOR) -> "Factored":
        return self._replace(s=grayed_values(self.s, eps, rescale=rescale, floor=floor))


def with_singular_values(
    s: Tensor, tokens: int, channels: int, batch: tuple[int, ...] = (), seed: int = 0
) -> Factored:
    """Random orthonormal U and V around s; every matrix of the batch has its own."""
    left = orthogonal(tokens, batch, seed=2 * seed)
    right = orthogonal(channels, batch, seed=2 * seed + 1)
    return Factored(left[..., : len(s)], s, right[..., : len(s)])


def grayed_values(s: Tensor, eps: float, *, rescale: bool = True, floor: float = FLOOR) -> Tensor:
    """The formula on magnitudes: s_max (s / s_max)^eps, linear below the floor."""
    largest = s.max()
    if largest == 0:
        return s
    t = s / largest
    flattened = torch.where(t >= floor, t**eps, t * floor ** (eps - 1))
    return largest * flattened if rescale else flattened


def gray_by_svd(x: Tensor, eps: float, *, rescale: bool = True) -> Tensor:
    """Graying of (..., N, D) by NumPy's SVD in float64, one matrix after the other."""
    grayed = []
    for matrix in x.detach().double().reshape(-1, *x.shape[-2:]).numpy():
        U, s, Vh = np.linalg.svd(matrix, full_matrices=False)
        g = grayed_values(torch.from_numpy(s), eps, rescale=rescale).numpy()
        grayed.append(U @ np.diag(g) @ Vh)
    return torch.from_numpy(np.stack(grayed)).reshape(x.shape)


def gray_by_dct(x: Tensor, eps: float, *, rescale: bool = True, floor: float = FLOOR) -> Tensor:
    """DCT graying of (..., N, D) by SciPy in float64, one matrix after the other."""
    grayed = []
    for matrix in x.detach().double().reshape(-1, *x.shape[-2:]).numpy():
        coefficients = scipy.fft.dctn(matrix, type=2, norm="ortho")
        magnitudes = torch.from_numpy(np.abs(coefficients))
        g = grayed_values(magnitudes, eps, rescale=rescale, floor=floor).numpy()
        grayed.append(scipy.fft.idctn(np.sign(coefficients) * g, type=2, norm="ortho"))
    return torch.from_numpy(np.stack(grayed)).reshape(x.shape)
