"""Products of tokens with tokens and with symmetric matrices, summed in float64."""

import triton
import triton.language as tl

from wellposed.linalg.hopper.tiles import lower_tile, store_both, symmetric


@triton.jit
def _add_product(P, Q, out, n, d, pb, pn, pd, qb, qn, qd, b, rows, cols, BK: tl.constexpr):
    """Add a tile of P Q^T of image b."""
    ks = tl.arange(0, BK)
    left = P + b * pb + rows[:, None] * pn + ks[None, :] * pd
    right = Q + b * qb + cols[None, :] * qn + ks[:, None] * qd
    for k in range(0, d, BK):
        p = tl.load(left, mask=(rows[:, None] < n) & (k + ks[None, :] < d), other=0.0).to(tl.float64)
        q = tl.load(right, mask=(cols[None, :] < n) & (k + ks[:, None] < d), other=0.0).to(tl.float64)
        out += tl.dot(p, q, out_dtype=tl.float64)
        left += BK * pd
        right += BK * qd
    return out


@triton.jit
def gram_kernel(X, OUT, NARROW, n, d, L, xb, xn, xd, TILES, BM: tl.constexpr, BK: tl.constexpr):
    """X X^T in float64, and a float32 copy."""
    b = (tl.program_id(0) // TILES).to(tl.int64)
    i, j = lower_tile(tl.program_id(0) % TILES)
    rows, cols = i * BM + tl.arange(0, BM), j * BM + tl.arange(0, BM)
    out = tl.zeros((BM, BM), tl.float64)
    out = _add_product(X, X, out, n, d, xb, xn, xd, xb, xn, xd, b, rows, cols, BK)
    store_both(OUT + b * L * L, out, i, j, L, rows, cols)
    store_both(NARROW + b * L * L, out.to(tl.float32), i, j, L, rows, cols)


@triton.jit
def symmetric_product_kernel(
    G, X, OUT, PART, n, d, L, gb, gn, gd, xb, xn, xd, TILES, BM: tl.constexpr, BK: tl.constexpr
):
    """(G X^T + X G^T) / 2, summed in float64, kept in float32; PART gets each tile's share of its square."""
    b = (tl.program_id(0) // TILES).to(tl.int64)
    tile = tl.program_id(0) % TILES
    i, j = lower_tile(tile)
    rows, cols = i * BM + tl.arange(0, BM), j * BM + tl.arange(0, BM)
    out = tl.zeros((BM, BM), tl.float64)
    out = _add_product(G, X, out, n, d, gb, gn, gd, xb, xn, xd, b, rows, cols, BK)
    if i == j:
        # On the diagonal X G^T is the mirror image of G X^T.
        out += tl.trans(out)
    else:
        out = _add_product(X, G, out, n, d, xb, xn, xd, gb, gn, gd, b, rows, cols, BK)
    out = symmetric(out * 0.5, i, j)
    store_both(OUT + b * L * L, out.to(tl.float32), i, j, L, rows, cols)
    tl.store(PART + b * TILES + tile, tl.sum(tl.sum(out * out, axis=1), axis=0) * tl.where(i == j, 1.0, 2.0))


@triton.jit
def apply_kernel(
    Z, G, C, X, SCALE, TURN, U, LAMBDA, OUT, n, d, L, gb, gn, gd, xb, xn, xd, ob, on, od, ROWS, COLS,
    BACKWARD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Z G, and backward Z G + (scale C + turn u u^T) X; summed in float64.

    Backward gives zeros for an image that is not finite.
    """
    b = (tl.program_id(0) // (ROWS * COLS)).to(tl.int64)
    tile = tl.program_id(0) % (ROWS * COLS)
    rows = tile % ROWS * BM + tl.arange(0, BM)
    cols = tile // ROWS * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    left = Z + b * L * L + rows[:, None] * L + ks[None, :]
    right = G + b * gb + ks[:, None] * gn + cols[None, :] * gd
    out = tl.zeros((BM, BN), tl.float64)
    for k in range(0, n, BK):
        p = tl.load(left, mask=rows[:, None] < L, other=0.0).to(tl.float64)
        q = tl.load(right, mask=(k + ks[:, None] < n) & (cols[None, :] < d), other=0.0).to(tl.float64)
        out += tl.dot(p, q, out_dtype=tl.float64)
        left += BK
        right += BK * gn
    if BACKWARD:
        left = C + b * L * L + rows[:, None] * L + ks[None, :]
        right = X + b * xb + ks[:, None] * xn + cols[None, :] * xd
        scale, turn = tl.load(SCALE + b), tl.load(TURN + b)
        u_left = tl.load(U + b * L + rows, mask=rows < L, other=0.0) * turn
        for k in range(0, n, BK):
            u = tl.load(U + b * L + k + ks)
            p = tl.load(left, mask=rows[:, None] < L, other=0.0) * scale + u_left[:, None] * u[None, :]
            q = tl.load(right, mask=(k + ks[:, None] < n) & (cols[None, :] < d), other=0.0).to(tl.float64)
            out += tl.dot(p.to(tl.float64), q, out_dtype=tl.float64)
            left += BK
            right += BK * xn
        out = tl.where(tl.abs(tl.load(LAMBDA + b)) < float("inf"), out, 0.0)
    target = OUT + b * ob + rows[:, None] * on + cols[None, :] * od
    tl.store(target, out.to(tl.float32), mask=(rows[:, None] < n) & (cols[None, :] < d))
