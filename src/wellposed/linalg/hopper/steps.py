"""The steps of the squaring chain there and back: one launch each, half of a symmetric product."""

import triton
import triton.language as tl

from wellposed.linalg.hopper.tiles import LOW_BITS, load_pair, lower_tile, store_both, store_pair, symmetric


@triton.jit
def start_kernel(A, SCALE, OUT, PAIR, low, size, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """Scale A of each image: as a pair, and KEEP also in A's dtype."""
    b = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(A + b * size + at, mask=at < size) * tl.load(SCALE + b)
    if KEEP:
        tl.store(OUT + b * size + at, value, mask=at < size)
    value = value.to(tl.float32)
    high = value.to(tl.float16)
    tl.store(PAIR + b * size + at, high, mask=at < size)
    rest = ((value - high.to(tl.float32)) * LOW_BITS).to(tl.float16)
    tl.store(PAIR + low + b * size + at, rest, mask=at < size)


@triton.jit
def wide_step_kernel(
    B, OUT, PAIR, low, factor, L, TILES, KEEP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    """B -> factor (2 B - B^2) in float64; KEEP stores it so for the next step, the pair is stored always."""
    b = (tl.program_id(0) // TILES).to(tl.int64)
    i, j = lower_tile(tl.program_id(0) % TILES)
    rows, cols, ks = i * BM + tl.arange(0, BM), j * BM + tl.arange(0, BM), tl.arange(0, BK)
    B += b * L * L
    left = B + rows[:, None] * L + ks[None, :]
    right = B + cols[None, :] * L + ks[:, None]
    square = tl.zeros((BM, BM), tl.float64)
    for _ in range(0, L, BK):
        p = tl.load(left, mask=rows[:, None] < L, other=0.0)
        q = tl.load(right, mask=cols[None, :] < L, other=0.0)
        square += tl.dot(p, q, out_dtype=tl.float64)
        left += BK
        right += BK
    inside = (rows[:, None] < L) & (cols[None, :] < L)
    here = tl.load(B + rows[:, None] * L + cols[None, :], mask=inside, other=0.0)
    out = symmetric((2 * here - square) * factor, i, j)
    if KEEP:
        store_both(OUT + b * L * L, out, i, j, L, rows, cols)
    store_pair(PAIR + b * L * L, low, out.to(tl.float32), i, j, L, rows, cols)


@triton.jit
def step_kernel(PAIR, OUT, low, factor, L, TILES, BM: tl.constexpr, BK: tl.constexpr):
    """B -> factor (2 B - B^2), a pair to a pair."""
    b = (tl.program_id(0) // TILES).to(tl.int64)
    i, j = lower_tile(tl.program_id(0) % TILES)
    rows, cols, ks = i * BM + tl.arange(0, BM), j * BM + tl.arange(0, BM), tl.arange(0, BK)
    PAIR += b * L * L
    left = PAIR + rows[:, None] * L + ks[None, :]
    right = PAIR + cols[None, :] * L + ks[:, None]
    high = tl.zeros((BM, BM), tl.float32)
    cross = tl.zeros((BM, BM), tl.float32)
    for _ in range(0, L, BK):
        in_row, in_col = rows[:, None] < L, cols[None, :] < L
        p, q = tl.load(left, mask=in_row, other=0.0), tl.load(right, mask=in_col, other=0.0)
        p_low = tl.load(left + low, mask=in_row, other=0.0)
        q_low = tl.load(right + low, mask=in_col, other=0.0)
        # Added up here, rounded to nearest: a tensor core rounds a running sum downwards.
        high -= tl.dot(p, q)
        cross = tl.dot(p, q_low, cross)
        cross = tl.dot(p_low, q, cross)
        left += BK
        right += BK
    out = (2 * load_pair(PAIR, low, L, rows, cols) - (cross / LOW_BITS - high)) * factor
    store_pair(OUT + b * L * L, low, symmetric(out, i, j), i, j, L, rows, cols)


@triton.jit
def readout_kernel(STACK, V, LAMBDA, OUT, low, slot, vb, L, TILES, K: tl.constexpr, BM: tl.constexpr):
    """v_0 I + sum_k v_{k+1} B_k, float32."""
    b = (tl.program_id(0) // TILES).to(tl.int64)
    i, j = lower_tile(tl.program_id(0) % TILES)
    rows, cols = i * BM + tl.arange(0, BM), j * BM + tl.arange(0, BM)
    # Zero tokens have no spectrum to flatten: they pass as they are, and so does their gradient.
    is_zero = tl.load(LAMBDA + b) == 0
    constant = tl.where(is_zero, 1.0, tl.load(V + b * vb).to(tl.float32))
    out = tl.where(rows[:, None] == cols[None, :], constant, 0.0)
    STACK += b * L * L
    for k in range(K + 1):
        weight = tl.load(V + b * vb + k + 1).to(tl.float32)
        out += weight * load_pair(STACK, low, L, rows, cols)
        STACK += slot
    store_both(OUT + b * L * L, out, i, j, L, rows, cols)


@triton.jit
def _add_product(P, Q, high, cross, low, L, rows, cols, BK: tl.constexpr):
    """Add a tile of P Q, pairs of symmetric matrices: the large part, and what has one small factor."""
    ks = tl.arange(0, BK)
    left = P + rows[:, None] * L + ks[None, :]
    right = Q + cols[None, :] * L + ks[:, None]
    for _ in range(0, L, BK):
        in_row, in_col = rows[:, None] < L, cols[None, :] < L
        p, q = tl.load(left, mask=in_row, other=0.0), tl.load(right, mask=in_col, other=0.0)
        p_low = tl.load(left + low, mask=in_row, other=0.0)
        q_low = tl.load(right + low, mask=in_col, other=0.0)
        high = tl.dot(p, q, high)
        cross = tl.dot(p, q_low, cross)
        cross = tl.dot(p_low, q, cross)
        left += BK
        right += BK
    return high, cross


@triton.jit
def adjoint_step_kernel(
    STEP, PAIR, SCALE, PART, ZB, NORM, V, OUT, OUT_SCALE, OUT_PART, FINAL, low, factor, vb, L, TILES,
    T: tl.constexpr, LAST: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """C -> v ZB + factor (2 C - B C - C B), the way back through one step.

    C is a pair times a scale of its image: the scale follows from the norm of the C before, of which PART
    holds a share of the square for each tile. The last step gives C itself in float32, and its product with B
    in OUT_PART.
    """
    b = (tl.program_id(0) // TILES).to(tl.int64)
    tile = tl.program_id(0) % TILES
    i, j = lower_tile(tile)
    rows, cols = i * BM + tl.arange(0, BM), j * BM + tl.arange(0, BM)
    shares = tl.arange(0, T)
    norm = tl.sqrt(tl.sum(tl.load(PART + b * TILES + shares, mask=shares < TILES, other=0.0)))
    scale = tl.load(SCALE + b)
    v = tl.load(V + b * vb).to(tl.float32)
    # No eigenvalue of C -> 2 C - B C - C B is larger than 2.
    out_scale = tl.abs(v) * tl.load(NORM + b) + 2 * factor * tl.abs(scale) * norm
    STEP += b * L * L
    PAIR += b * L * L
    high = tl.zeros((BM, BM), tl.float32)
    cross = tl.zeros((BM, BM), tl.float32)
    high, cross = _add_product(STEP, PAIR, high, cross, low, L, rows, cols, BK)
    if i == j:
        # On the diagonal C B is the mirror image of B C.
        high += tl.trans(high)
        cross += tl.trans(cross)
    else:
        high, cross = _add_product(PAIR, STEP, high, cross, low, L, rows, cols, BK)
    inside = (rows[:, None] < L) & (cols[None, :] < L)
    zb = tl.load(ZB + b * L * L + rows[:, None] * L + cols[None, :], mask=inside, other=0.0)
    twice = 2 * load_pair(PAIR, low, L, rows, cols)
    out = symmetric(v * zb + factor * scale * (twice - (high + cross / LOW_BITS)), i, j)
    copies = tl.where(i == j, 1.0, 2.0)
    if LAST:
        store_both(FINAL + b * L * L, out, i, j, L, rows, cols)
        share = tl.sum(tl.sum(out * load_pair(STEP, low, L, rows, cols), axis=1), axis=0)
    else:
        out = out / tl.where(out_scale > 0, out_scale, 1.0)
        store_pair(OUT + b * L * L, low, out, i, j, L, rows, cols)
        share = tl.sum(tl.sum(out * out, axis=1), axis=0)
        if tile == 0:
            tl.store(OUT_SCALE + b, out_scale)
    tl.store(OUT_PART + b * TILES + tile, share * copies)
