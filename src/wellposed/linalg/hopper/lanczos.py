"""The largest eigenvalue of small symmetric matrices, all steps in one launch."""

import triton
import triton.language as tl


@triton.jit
def lanczos_kernel(
    A, BASIS, LAMBDA, U, n, L, STEPS: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr
):
    """The largest eigenvalue and its vector, one image a program; BASIS (B, STEPS + 1, BN) is scratch."""
    b = tl.program_id(0).to(tl.int64)
    cols, steps = tl.arange(0, BN), tl.arange(0, S)
    A += b * L * L
    BASIS += b * (STEPS + 1) * BN
    # A start of positive, scattered entries: it has a share of the mean token and of every other direction.
    mixed = (cols.to(tl.uint32) + 1) * 2654435761
    mixed = (mixed ^ (mixed >> 15)) * 2246822519
    mixed = mixed ^ (mixed >> 13)
    v = tl.where(cols < n, 0.5 + (mixed & 0xFFFF).to(tl.float32) / 65536.0, 0.0)
    tl.store(BASIS + cols, v / tl.sqrt(tl.sum(v * v)))
    tl.debug_barrier()
    T = tl.zeros((S, S), tl.float32)
    for s in range(STEPS):
        w = tl.zeros((BN,), tl.float32)
        for r in range(0, L, BR):
            rows = r + tl.arange(0, BR)
            inside = (rows[:, None] < L) & (cols[None, :] < L)
            a = tl.load(A + rows[:, None] * L + cols[None, :], mask=inside, other=0.0)
            w += tl.sum(a * tl.load(BASIS + s * BN + rows, mask=rows < BN, other=0.0)[:, None], axis=0)
        basis = tl.load(BASIS + steps[:, None] * BN + cols[None, :], mask=steps[:, None] <= s, other=0.0)
        along = tl.sum(basis * w[None, :], axis=1)
        w -= tl.sum(basis * along[:, None], axis=0)
        again = tl.sum(basis * w[None, :], axis=1)
        w -= tl.sum(basis * again[:, None], axis=0)
        along += again
        T = tl.where((steps[None, :] == s) & (steps[:, None] <= s), along[:, None], T)
        T = tl.where((steps[:, None] == s) & (steps[None, :] <= s), along[None, :], T)
        length = tl.sqrt(tl.sum(w * w))
        # Nothing new is left in an invariant subspace; a zero vector ends the sequence without harm.
        is_new = length > 1e-6 * tl.max(tl.abs(along))
        tl.store(BASIS + (s + 1) * BN + cols, tl.where(is_new, w / tl.where(is_new, length, 1.0), 0.0))
        tl.debug_barrier()
    # T^(2^13) is its top eigenvector times itself.
    on_diagonal = steps[:, None] == steps[None, :]
    M = T
    for _ in range(13):
        trace = tl.sum(tl.sum(tl.where(on_diagonal, M, 0.0), axis=1), axis=0)
        M = M / tl.where(trace > 0, trace, 1.0)
        M = tl.dot(M, M, input_precision="ieee")
    diagonal = tl.sum(tl.where(on_diagonal, M, 0.0), axis=1)
    # A matrix that is not finite ends in NaN by way of M, whichever column is taken.
    largest = tl.argmax(tl.where(diagonal == diagonal, diagonal, 0.0), axis=0)
    y = tl.sum(tl.where(steps[None, :] == largest, M, 0.0), axis=1)
    length = tl.sqrt(tl.sum(y * y))
    y = y / tl.where(length > 0, length, 1.0)
    basis = tl.load(BASIS + steps[:, None] * BN + cols[None, :], mask=steps[:, None] < STEPS, other=0.0)
    tl.store(LAMBDA + b, tl.sum(y * tl.sum(T * y[None, :], axis=1)))
    tl.store(U + b * L + cols, tl.sum(basis * y[:, None], axis=0), mask=cols < L)
