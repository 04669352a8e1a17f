r"""Symmetric matrices by tiles, and as pairs of float16 matrices.

Only the tiles on and below the diagonal are computed; each is stored twice. A pair is

.. math::
    B = B_{hi} + 2^{-11} B_{lo}

It holds 22 bits and takes what one float32 matrix takes. A product of two pairs is three products of float16
matrices, at the tensor cores' full speed and without a conversion in the inner loop.
"""

# Shapes: x (B, n, d); matrices (B, L, L), zero beyond n, L a multiple of 32; a pair (2, B, L, L).
# Programs run over the tiles of one image first, so that they meet in the cache.

import triton
import triton.language as tl

LOW_BITS = tl.constexpr(2048.0)
"""2^11: float16 keeps that much of a number, and so the scale of what it drops."""


@triton.jit
def lower_tile(t):
    """Row and column of the t-th tile on or below the diagonal."""
    i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    return i, t - i * (i + 1) // 2


@triton.jit
def symmetric(value, i, j):
    """A tile on the diagonal made symmetric: what rounding leaves of asymmetry would grow with every step."""
    if i == j:
        value = (value + tl.trans(value)) * 0.5
    return value


@triton.jit
def store_both(target, value, i, j, L, rows, cols):
    """A tile and its mirror image."""
    tl.store(
        target + rows[:, None] * L + cols[None, :], value, mask=(rows[:, None] < L) & (cols[None, :] < L)
    )
    if i != j:
        mirrored = target + cols[:, None] * L + rows[None, :]
        tl.store(mirrored, tl.trans(value), mask=(cols[:, None] < L) & (rows[None, :] < L))


@triton.jit
def store_pair(target, low, value, i, j, L, rows, cols):
    high = value.to(tl.float16)
    rest = ((value - high.to(value.dtype)) * LOW_BITS).to(tl.float16)
    store_both(target, high, i, j, L, rows, cols)
    store_both(target + low, rest, i, j, L, rows, cols)


@triton.jit
def load_pair(source, low, L, rows, cols):
    at = rows[:, None] * L + cols[None, :]
    inside = (rows[:, None] < L) & (cols[None, :] < L)
    high = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    return high + tl.load(source + low + at, mask=inside, other=0.0).to(tl.float32) / LOW_BITS
