"""The chain's two operations for torch: opaque to ``torch.compile``, mapped by ``torch.vmap``."""

from typing import Any

import torch
from torch import Tensor

from wellposed.linalg.hopper.engine import backward, dense_like, forward, padded


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
