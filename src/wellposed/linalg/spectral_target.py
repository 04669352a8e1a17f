r"""The power that gives each matrix a chosen condition number: eps = log(target) / log(kappa).

The largest eigenvalue of X X^T by Lanczos, the smallest by powers of its inverse, both in float64 and without
waiting for the host.

>>> x = torch.stack([torch.diag(torch.tensor([100.0, 1.0])), torch.eye(2)])
>>> power_for_kappa(x, 10.0, floor=1e-4)
tensor([0.5000, 1.0000], dtype=torch.float64)
"""

import math

import torch
from torch import Tensor

from wellposed.linalg.precision import in_float64, without_autocast
from wellposed.linalg.spectrum import _inverse_factor, _smallest
from wellposed.linalg.top_eigen import top_eigenpair


def power_for_kappa(x: Tensor, target: float, floor: float) -> Tensor:
    """Powers (...) for x (..., N, D), float64: 1 where kappa is below the target already.

    kappa counts up to ``1 / floor`` only, so that a matrix without full rank has a power too. They get no
    gradient.
    """
    with torch.no_grad(), without_autocast(x):
        wide = in_float64(x)
        wide = wide if x.shape[-2] <= x.shape[-1] else wide.mT
        wide = wide.flatten(0, -3) if x.ndim > 2 else wide[None]
        size = wide.abs().amax((-2, -1), keepdim=True)
        wide = wide / torch.where(size > 0, size, 1)
        A = wide @ wide.mT
        largest = top_eigenpair(A)[0].sqrt()
        log_kappa = (largest / _smallest(_inverse_factor(A), wide)).log()
        eps = math.log(target) / log_kappa.clamp(min=0, max=-math.log(floor))
        # Zeros have no kappa; what is not finite stays so at any power.
        return eps.clamp(max=1).nan_to_num(1.0).reshape(x.shape[:-2]).to(x.device)
