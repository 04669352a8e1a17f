"""What ``torch.compile`` needs to be right on a GPU, and to keep many programs of one class.

A kernel that Inductor makes may write numbers in one loop and read them back in the next: the sum under a
layer norm, for one. Triton may give writing and reading to different threads, and then some read what was in
memory before. torch up to 2.13 has no barrier between the two; 2.14 has (pytorch/pytorch pull request
190519). ViTs are hit after the patch convolution, whose output is laid out by channels: in training and in
tests, with or without graying, or not at all, as the kernel's autotuning falls.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from packaging.version import Version

FIXED_IN = Version("2.14")
"""The first torch with the barrier."""
_TAG = "barrier-before-reading-back"


@functools.cache
def fix_inductor() -> bool:
    """Add the barrier to all that this process compiles from now on; the trainer calls it itself.

    Call it before the first use of a compiled model. What was compiled without it and lies in torch's cache
    on disk is not used any more.

    Returns:
        Whether this torch needs it. If not, nothing is changed.
    """
    if not needs_barrier(torch.__version__):
        return False
    from torch._inductor.codegen.common import DeferredLine
    from torch._inductor.codegen.triton import TritonKernel

    add_barrier(TritonKernel, lambda name: DeferredLine(name, "tl.debug_barrier()"))
    config: Any = torch.compiler.config
    config.cache_key_tag = f"{config.cache_key_tag} {_TAG}".strip()
    return True


def needs_barrier(version: str) -> bool:
    """Whether a torch of this version lacks the barrier; what came before a release may lack it.

    >>> needs_barrier("2.9.1"), needs_barrier("2.14.0a0+gitabc"), needs_barrier("2.14.0+cu130")
    (True, True, False)
    """
    return Version(version) < FIXED_IN


def add_barrier(kernel: Any, barrier: Any) -> None:
    """Let a class of kernels write ``barrier(name)`` before it loads a buffer that it has stored."""
    load, get_load_buffer = kernel.load, kernel.get_load_buffer

    @functools.wraps(load)
    def load_after_barrier(self: Any, name: str, index: Any) -> Any:
        before = getattr(self, "_reads_back", None)
        self._reads_back = name if name in self.cse.invalidated_stores else None
        try:
            return load(self, name, index)
        finally:
            self._reads_back = before

    @functools.wraps(get_load_buffer)
    def buffer_after_barrier(self: Any, indexing: Any) -> Any:
        lines = get_load_buffer(self, indexing)
        if getattr(self, "_reads_back", None) is not None:
            lines.writeline(barrier(self._reads_back))
        return lines

    kernel.load, kernel.get_load_buffer = load_after_barrier, buffer_after_barrier


@contextlib.contextmanager
def many_programs(at_least: int) -> Iterator[None]:
    """Room for so many compiled programs of one class; torch has eight, and runs all others uncompiled.

    A number or shape that differs between two of them, such as eps, stays a constant of each.
    """
    import torch._dynamo

    config: Any = torch._dynamo.config
    with config.patch(
        recompile_limit=max(config.recompile_limit, at_least),
        automatic_dynamic_shapes=False,
        specialize_float=True,
    ):
        yield
