"""How code is run here: eagerly or traced, by several threads, differentiated once.

Only eager code may keep tensors from one call to the next and share a batch among threads.

LAPACK takes one matrix of a batch after the other, and a second thread hardly helps with a small one. So a
batch is cut into chunks, which threads of one BLAS thread each work off.

A backward pass that cannot be differentiated again says so. torch's ``once_differentiable`` marks only what
comes of upstream gradients that need one themselves. That of a sum needs none, and under ``torch.func``
nothing does: a second derivative would be zero there, without an error.
"""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

_ENTRIES = 2**20
"""Of the matrices of a chunk: 8 MiB in float64. With fewer, what a chunk costs beside its products shows."""

REFUSAL = (
    "trying to differentiate twice: expected at most one derivative of this graying, its backward pass has "
    "none. Graying by method='dct' has all derivatives; a Jacobian's spectrum needs one only with "
    "method='dense'."
)

Backward = Callable[..., tuple[Tensor | None, ...]]

_creating = threading.Lock()

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant(function: _Function) -> _Function:
    """Have torch.compile run the function when it traces, and take what it returns for a constant.

    ``torch.compiler.assume_constant_result`` does the same, but imports the compiler, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_traced() -> bool:
    """Whether a tensor made now may belong to a tracer or transform, which sees this thread only."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or _get_current_dispatch_mode() is not None
        or torch._C._is_tracing()
    )


def is_jit_traced() -> bool:
    """Whether ``torch.jit.trace`` looks on, in whose program a Function would be Python, not to be saved."""
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


def over_chunks(work: Callable[[slice], object], count: int, entries: int) -> None:
    """Call ``work`` for slices that together are the matrices 0 to ``count``, of so many entries each.

    As many calls run at a time as torch has threads here, without gradients and outside of autocast.
    """
    threads = torch.get_num_threads()
    at_once = min(max(_ENTRIES // entries, 1), max(-(-count // threads), 1))
    chunks = [slice(start, min(start + at_once, count)) for start in range(0, count, at_once)]
    is_inference = torch.is_inference_mode_enabled()

    def run(chunk: slice) -> None:
        with torch.inference_mode(is_inference), torch.no_grad():
            work(chunk)

    if threads == 1 or len(chunks) <= 1:
        for chunk in chunks:
            run(chunk)
        return
    for _ in _pool(threads).map(run, chunks):
        pass


def _pool(threads: int) -> ThreadPoolExecutor:
    with _creating:
        # A forked process has none of its parent's threads.
        return _pool_of_process(threads, os.getpid())


@functools.lru_cache(maxsize=4)
def _pool_of_process(threads: int, process: int) -> ThreadPoolExecutor:
    everyone = threading.Barrier(threads + 1)

    def prepare() -> None:
        torch.get_num_threads()  # a thread's first look at the number sets it, so before ours
        torch.set_num_threads(1)
        everyone.wait()

    pool = ThreadPoolExecutor(threads, "wellposed", initializer=prepare)
    for _ in range(threads):
        pool.submit(int)
    everyone.wait()
    # The number is a thread's own, but the last one set is where new threads start.
    torch.set_num_threads(threads)
    return pool


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
