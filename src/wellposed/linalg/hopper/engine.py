"""The squaring chain by Triton kernels: forward and adjoint, as a sequence of launches.

See :mod:`wellposed.linalg.spectral_chain` for the algebra. Backward needs the chain's K + 1 matrices, 4 bytes
a number: 4 MB for an image of 196 tokens.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from wellposed.linalg.hopper import lanczos, products
from wellposed.linalg.hopper import steps as chain
from wellposed.linalg.spectral_fit import MARGIN
from wellposed.linalg.top_eigen import LANCZOS_STEPS

EDGE = 32
"""Matrices are padded to a multiple of this: rows start on a line of memory, loops have no remainder."""


def padded(n: int) -> int:
    return EDGE * ((n + EDGE - 1) // EDGE)


def _tiles(L: int, side: int) -> int:
    across = math.ceil(L / side)
    return across * (across + 1) // 2


def forward(
    x: Tensor, coefficients: Tensor, delta: float, wide: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`chain_forward`; x in float32, Y in ``dtype``."""
    B, n, d = x.shape
    L, steps, factor, on = padded(n), coefficients.shape[1] - 2, 1 + delta, x.device
    low, tiles, small = B * L * L, _tiles(L, 64), _tiles(L, 32)
    current = torch.empty(B, L, L, dtype=torch.float64, device=on)
    narrow = torch.empty(B, L, L, device=on)
    products.gram_kernel[(small * B,)](
        x, current, narrow, n, d, L, *x.stride(), small, BM=32, BK=16, num_warps=2, num_stages=3
    )
    lam, u = top_eigenpair(narrow, n)
    stack = torch.empty(steps + 1, 2, B, L, L, dtype=torch.float16, device=on)
    _start(current, factor / (MARGIN * torch.where(lam == 0, 1, lam).double()), stack[0], keep=True)
    following = torch.empty_like(current)
    for k in range(steps):
        if k < wide:
            chain.wide_step_kernel[(small * B,)](
                current, following, stack[k + 1], low, factor, L, small,
                KEEP=k + 1 < wide, BM=32, BK=16, num_warps=2, num_stages=3,
            )  # fmt: skip
            current, following = following, current
        else:
            chain.step_kernel[(tiles * B,)](
                stack[k], stack[k + 1], low, factor, L, tiles, BM=64, BK=32, num_warps=4, num_stages=3
            )
    z = torch.empty(B, L, L, device=on)
    chain.readout_kernel[(tiles * B,)](
        stack,
        coefficients,
        lam,
        z,
        low,
        2 * low,
        _per_image(coefficients),
        L,
        tiles,
        K=steps,
        BM=64,
        num_warps=4,
    )
    y = torch.empty_strided(x.shape, dense_like(x), dtype=dtype, device=on)
    _apply(z, x, y)
    return y, z, stack, lam, u


def backward(
    grad: Tensor,
    x: Tensor,
    z: Tensor,
    stack: Tensor,
    lam: Tensor,
    u: Tensor,
    coefficients: Tensor,
    delta: float,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """See :func:`chain_backward`; grad and x in float32, the result in ``dtype``."""
    B, n, d = x.shape
    L, steps, factor, on = z.shape[-1], len(stack) - 1, 1 + delta, x.device
    low, tiles, vb = B * L * L, _tiles(L, 64), _per_image(coefficients)
    zb = torch.empty(B, L, L, device=on)
    part = torch.empty(2, B, tiles, device=on)
    products.symmetric_product_kernel[(tiles * B,)](
        grad, x, zb, part[1], n, d, L, *grad.stride(), *x.stride(), tiles,
        BM=64, BK=16, num_warps=4, num_stages=3,
    )  # fmt: skip
    norm = part[1].sum(1).sqrt()
    inverse = torch.where(norm > 0, 1 / norm, 0)
    pair = torch.empty(2, 2, B, L, L, dtype=torch.float16, device=on)
    _start(zb, inverse, pair[0], keep=False)
    part[0] = part[1] * inverse.square()[:, None]
    scale = torch.empty(2, B, device=on)
    scale[0] = coefficients[:, -1].float() * norm
    final = torch.empty(B, L, L, device=on)
    for k in reversed(range(steps)):
        here = (steps - 1 - k) % 2
        there = 1 - here
        chain.adjoint_step_kernel[(tiles * B,)](
            stack[k], pair[here], scale[here], part[here], zb, norm, coefficients[:, k + 1 :],
            pair[there], scale[there], part[there], final, low, factor, vb, L, tiles,
            T=triton.next_power_of_2(tiles), LAST=k == 0, BM=64, BK=32, num_warps=4, num_stages=3,
        )  # fmt: skip
    safe = torch.where(lam == 0, 1, lam)
    # Through lambda_max: every eigenvalue is taken relative to it.
    turn = -2 * part[steps % 2].sum(1) / safe
    out = torch.empty_strided(x.shape, dense_like(x), dtype=dtype, device=on)
    _apply(z, grad, out, Sum(final, x, 2 * factor / (MARGIN * safe), turn, u, lam))
    return out


def top_eigenpair(a: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Largest eigenvalue and vector of float32 matrices (B, L, L) that are zero beyond n, by Lanczos."""
    B, L, _ = a.shape
    lam, u = torch.empty(B, device=a.device), torch.empty(B, L, device=a.device)
    across, steps = triton.next_power_of_2(L), min(LANCZOS_STEPS, n)
    basis = torch.zeros(B, steps + 1, across, device=a.device)
    lanczos.lanczos_kernel[(B,)](
        a, basis, lam, u, n, L, STEPS=steps, S=max(triton.next_power_of_2(steps), 16), BN=across,
        BR=min(32, max(8192 // across, 1)), num_warps=min(max(across // 64, 4), 16),
    )  # fmt: skip
    return lam, u


def _start(matrix: Tensor, scale: Tensor, pair: Tensor, *, keep: bool) -> None:
    """Matrix times the scale of its image as a pair, and in place where it is to be kept."""
    B, L, _ = matrix.shape
    chain.start_kernel[(math.ceil(L * L / 1024), B)](
        matrix, scale, matrix, pair, B * L * L, L * L, KEEP=keep, BLOCK=1024, num_warps=4
    )


def _per_image(coefficients: Tensor) -> int:
    return 0 if coefficients.shape[0] == 1 else coefficients.stride(0)


def dense_like(x: Tensor) -> tuple[int, ...]:
    """Strides of a dense tensor whose fastest axis is x's."""
    _, n, d = x.shape
    return (n * d, 1, n) if x.stride(1) == 1 and x.stride(2) != 1 else (n * d, d, 1)


class Sum(NamedTuple):
    """What backward adds to Z G."""

    c: Tensor
    x: Tensor
    scale: Tensor
    turn: Tensor
    u: Tensor
    lam: Tensor


def _apply(z: Tensor, g: Tensor, out: Tensor, more: Sum | None = None) -> None:
    B, n, d = g.shape
    rows, cols = math.ceil(n / 32), math.ceil(d / 64)
    c, x, *others = more or (z, g, z, z, z, z)
    products.apply_kernel[(rows * cols * B,)](
        z, g, c, x, *others, out, n, d, z.shape[-1], *g.stride(), *x.stride(), *out.stride(), rows, cols,
        BACKWARD=more is not None, BM=32, BN=64, BK=16, num_warps=4, num_stages=3,
    )  # fmt: skip
