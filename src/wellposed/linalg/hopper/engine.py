"""The squaring chain by Triton kernels: forward and adjoint, as sequences of launches and as operations.

See :mod:`wellposed.linalg.spectral_chain` for the algebra. Backward needs the chain's K + 1 matrices, 4 bytes
a number: 4 MB for an image of 196 tokens. The two operations are opaque to ``torch.compile``, and
``torch.vmap`` maps them.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from wellposed.linalg.execution import once
from wellposed.linalg.hopper import kernels
from wellposed.linalg.precision import without_autocast
from wellposed.linalg.spectral_chain import power_start
from wellposed.linalg.spectral_fit import MARGIN

EDGE = 32
"""Matrices are padded to a multiple of this: rows start on a line of memory, loops have no remainder."""

START_SQUARINGS, LANCZOS_STEPS = 7, 16
"""Of the largest eigenvalue. Squarings in bfloat16 cost less than steps, and what they start from no matrix
can be orthogonal to; the basis has rows of a power of two, so 17 steps would take twice as long."""


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
    kernels.gram_kernel[(small * B,)](
        x, current, narrow, n, d, L, *x.stride(), small, BM=32, BK=16, num_warps=2, num_stages=3
    )
    lam, u = top_eigenpair(narrow, n)
    stack = torch.empty(steps + 1, 2, B, L, L, dtype=torch.float16, device=on)
    _start(current, factor / (MARGIN * torch.where(lam == 0, 1, lam).double()), stack[0], keep=True)
    following = torch.empty_like(current)
    for k in range(steps):
        if k < wide:
            kernels.wide_step_kernel[(small * B,)](
                current, following, stack[k + 1], low, factor, L, small,
                KEEP=k + 1 < wide, BM=32, BK=16, num_warps=2, num_stages=3,
            )  # fmt: skip
            current, following = following, current
        else:
            kernels.step_kernel[(tiles * B,)](
                stack[k], stack[k + 1], low, factor, L, tiles, BM=64, BK=32, num_warps=4, num_stages=3
            )
    z = torch.empty(B, L, L, device=on)
    kernels.readout_kernel[(tiles * B,)](
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
    kernels.symmetric_product_kernel[(tiles * B,)](
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
        kernels.adjoint_step_kernel[(tiles * B,)](
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
    basis[:, :1, :L] = power_start(a, START_SQUARINGS, torch.bfloat16)
    kernels.lanczos_kernel[(B,)](
        a, basis, lam, u, L, STEPS=steps, S=max(triton.next_power_of_2(steps), 16), BN=across,
        BR=min(32, max(8192 // across, 1)), num_warps=min(max(across // 64, 4), 16),
    )  # fmt: skip
    return lam, u


def _start(matrix: Tensor, scale: Tensor, pair: Tensor, *, keep: bool) -> None:
    """Matrix times the scale of its image as a pair, and in place where it is to be kept."""
    B, L, _ = matrix.shape
    kernels.start_kernel[(math.ceil(L * L / 1024), B)](
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
    kernels.apply_kernel[(rows * cols * B,)](
        z, g, c, x, *others, out, n, d, z.shape[-1], *g.stride(), *x.stride(), *out.stride(), rows, cols,
        BACKWARD=more is not None, BM=32, BN=64, BK=16, num_warps=4, num_stages=3,
    )  # fmt: skip


@torch.library.custom_op("wellposed::chain_forward", mutates_args=(), device_types="cuda")
def chain_forward(
    x: Tensor, coefficients: Tensor, delta: float, wide: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Y in x's dtype, Z, the chain as pairs (K + 1, 2, B, L, L), lambda_max and its vector (B, L)."""
    return forward(x.float(), coefficients, delta, wide, x.dtype)


@torch.library.custom_op("wellposed::chain_backward", mutates_args=(), device_types="cuda")
def chain_backward(
    grad: Tensor,
    x: Tensor,
    Z: Tensor,
    stack: Tensor,
    lam: Tensor,
    u: Tensor,
    coefficients: Tensor,
    delta: float,
) -> Tensor:
    """The adjoint of :func:`chain_forward`'s Y at x, applied to grad; in grad's dtype.

    The upstream gradient itself for zero tokens, zeros for tokens that are not finite.
    """
    return backward(grad.float(), x.float(), Z, stack, lam, u, coefficients, delta, grad.dtype)


@chain_forward.register_fake
def _(x: Tensor, coefficients: Tensor, delta: float, wide: int) -> tuple[Tensor, ...]:
    B, n, _ = x.shape
    L, steps = padded(n), coefficients.shape[1] - 2
    square = x.new_empty((B, L, L), dtype=torch.float32)
    stack = x.new_empty((steps + 1, 2, B, L, L), dtype=torch.float16)
    y = torch.empty_strided(x.shape, dense_like(x), dtype=x.dtype, device=x.device)
    return y, square, stack, square.new_empty(B), square.new_empty((B, L))


@chain_backward.register_fake
def _(grad: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_strided(x.shape, dense_like(x), dtype=grad.dtype, device=x.device)


@chain_forward.register_vmap
def _(
    info: Any, in_dims: tuple[Any, ...], x: Tensor, coefficients: Tensor, delta: float, wide: int
) -> tuple[Any, Any]:
    x, coefficients = _batched(info, in_dims, (x, coefficients), at=(0, 0))
    y, Z, stack, lam, u = chain_forward(x, coefficients, delta, wide)
    shape = (info.batch_size, -1)
    return (
        y.unflatten(0, shape),
        Z.unflatten(0, shape),
        stack.unflatten(2, shape),
        lam.unflatten(0, shape),
        u.unflatten(0, shape),
    ), (0, 0, 2, 0, 0)


@chain_backward.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, int]:
    *tensors, delta = arguments
    merged = _batched(info, in_dims, tensors, at=(0, 0, 0, 2, 0, 0, 0))
    return chain_backward(*merged, delta).unflatten(0, (info.batch_size, -1)), 0


def _batched(info: Any, in_dims: tuple[Any, ...], tensors: Any, *, at: tuple[int, ...]) -> list[Tensor]:
    """The mapped axis merged into the batch axis, which is ``at`` that place of each tensor."""
    merged = []
    for tensor, mapped, place in zip(tensors, in_dims, at, strict=False):
        if mapped is None:
            tensor = tensor.unsqueeze(place).expand(
                *tensor.shape[:place], info.batch_size, *tensor.shape[place:]
            )
        else:
            tensor = tensor.movedim(mapped, place)
        merged.append(tensor.flatten(place, place + 1))
    # One row of coefficients serves all matrices of its slice.
    if len(merged[-1]) != len(merged[0]):
        merged[-1] = merged[-1].repeat_interleave(len(merged[0]) // len(merged[-1]), 0)
    return merged


class ChainPower(torch.autograd.Function):
    """The graying of matrices (B, n, d) with n <= d; the kernels know the rescaled form only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, coefficients: Tensor, delta: float, rescale: bool, wide: int
    ) -> tuple[Tensor, ...]:
        with without_autocast(x):
            # The literal form is divided before it is rounded.
            tokens = x if rescale else x.float()
            y, *chain = torch.ops.wellposed.chain_forward(tokens, coefficients, delta, wide)
            y = y if rescale else (y / _size(chain[2])).to(x.dtype)
        return y, *chain

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, coefficients, ctx.delta, ctx.rescale, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        y, *chain = output
        ctx.save_for_backward(x, coefficients, x if ctx.rescale else y, *chain)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, coefficients, y, Z, stack, lam, u = ctx.saved_tensors
        with without_autocast(grad):
            size = _size(lam)
            upstream = grad if ctx.rescale else grad.float() / size
            out = torch.ops.wellposed.chain_backward(upstream, x, Z, stack, lam, u, coefficients, ctx.delta)
            if ctx.rescale:  # it has seen to zero tokens and to those that are not finite
                return out, *[None] * 4
            # Y has been divided by s_max = |u^T X|: the gradient of that is - <G, Y> / s_max^2 u u^T X.
            u = u[:, None, : x.shape[1]]
            along = (u @ x.float()) / size * (upstream * y.float()).sum((-2, -1), keepdim=True)
            out = (out - u.mT * along).to(grad.dtype)
            zero, finite = (flag[:, None, None] for flag in (lam == 0, lam.isfinite()))
            return torch.where(zero, grad, torch.where(finite, out, 0)), *[None] * 4


def _size(lam: Tensor) -> Tensor:
    return torch.where(lam == 0, 1, lam).sqrt()[:, None, None]
