"""Backward passes that cannot be differentiated again, and say so.

torch's ``once_differentiable`` marks only what comes of upstream gradients that need one themselves. That of
a sum needs none, and under ``torch.func`` nothing does: a second derivative would be zero there, without an
error.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

REFUSAL = (
    "trying to differentiate twice: expected at most one derivative of this graying, its backward pass has "
    "none. Graying by method='dct' has all derivatives; a Jacobian's spectrum needs one only with "
    "method='dense'."
)

Backward = Callable[..., tuple[Tensor | None, ...]]


class _Refused(torch.autograd.Function):
    """The first tensor, whose derivative by any of them is an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(out: Tensor, *others: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(REFUSAL)


def once(backward: Backward) -> Backward:
    """A static ``backward(ctx, grad, ...)`` with the gradient of its first input first, and None for others.

    ``ctx.saved_tensors[0]`` must be that input.
    """
    plain: Backward = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        # A traced backward pass has no second derivative in any case, and torch.compile says so.
        if torch.compiler.is_compiling():
            return plain(ctx, *grads)
        with torch.no_grad():
            out, *rest = backward(ctx, *grads)
        if not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            return out, *rest
        linked: Tensor = _Refused.apply(out, grads[0], ctx.saved_tensors[0])
        return linked, *rest

    return run
