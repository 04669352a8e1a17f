"""Random tokens whose singular values are known."""

from dataclasses import dataclass

import torch
from torch import Tensor

KAPPA = 1e3


@dataclass(frozen=True)
class KnownTokens:
    """Images x (B, N, D) = U diag(+-s) V^T with the same s, up to the signs of each image."""

    x: Tensor
    U: Tensor  # (N, k), float64 on the CPU, with the signs of the first image
    s: Tensor  # (k,), from 1 down to 1/kappa
    V: Tensor  # (D, k)

    def error(self, grayed: Tensor, eps: float, above: float = 0.0) -> float:
        """Largest relative error of the first image's singular values, which should be s^eps, of s > above.

        By the known vectors: an error of second order in what the vectors turn is not seen.
        """
        first = grayed[0].detach().cpu().double()
        found = torch.einsum("nk,nd,dk->k", self.U, first, self.V)
        return (found / self.s**eps - 1).abs()[self.s > above].max().item()


def power_law_tokens(
    batch: int, tokens: int, channels: int, device: torch.device, *, kappa: float = KAPPA, seed: int = 0
) -> KnownTokens:
    """Tokens with the singular values i^-a, a such that the condition number is kappa; largest 1.

    >>> known = power_law_tokens(2, 8, 16, torch.device("cpu"))
    >>> round(torch.linalg.cond(known.x[1]).item())
    1000
    """
    generator = torch.Generator().manual_seed(seed)
    rank = min(tokens, channels)

    def orthonormal(rows: int) -> Tensor:
        # QR of a square or tall Gaussian matrix
        Q: Tensor = torch.linalg.qr(torch.randn(rows, rank, generator=generator, dtype=torch.float64)).Q
        return Q

    U, V = orthonormal(tokens), orthonormal(channels)
    s = kappa ** -(torch.arange(1, rank + 1, dtype=torch.float64).log() / torch.tensor(float(rank)).log())
    s = torch.ones_like(s) if rank == 1 else s
    signs = 1 - 2 * torch.randint(2, (batch, 1, rank), generator=generator).double()
    left = (U * s).to(device, torch.float32)
    right = V.mT.to(device, torch.float32)
    # One QR for all images: what is timed does not see the vectors.
    x = (left * signs.to(device, torch.float32)) @ right
    return KnownTokens(x, U * signs[0], s, V)
