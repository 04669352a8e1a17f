"""One model on one or many processes, compiled or not, and its passes as CUDA graphs.

A small model is bound by how fast Python launches its kernels. ``torch.compile`` can record what it compiles
whole; where blocks are compiled one by one, forward pass, loss and backward pass of an update are recorded
here: launched once, and then replayed on new images with a single call.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from wellposed import anatomy
from wellposed.compiling import many_programs, mend_inductor
from wellposed.train.batches import Batch
from wellposed.train.distributed import several
from wellposed.train.edits import grayings
from wellposed.train.recipe import Recipe


def distribute(module: nn.Module, trunk: nn.Module, recipe: Recipe, device: torch.device) -> nn.Module:
    """Replicate or shard a module that is on its device, after its blocks were compiled if they are to be."""
    if has_compiled_blocks(recipe):
        # The decoder of a masked autoencoder has some too.
        for block in anatomy.blocks(module):
            block.module.compile()
    if not several():
        return module
    if recipe.parallel == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in anatomy.blocks(trunk):
        fully_shard(block.module, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def has_compiled_blocks(recipe: Recipe) -> bool:
    """Whether the blocks are compiled rather than the whole; a sharded model gathers weights between them."""
    is_sharded = several() and recipe.parallel == "fsdp2"
    return bool(recipe.compile) and (recipe.compile_blocks or is_sharded)


def room_for_programs(recipe: Recipe, trunk: nn.Module) -> AbstractContextManager[None]:
    """For compiled blocks, which share their class: in training and tests, with and without gradients."""
    if not has_compiled_blocks(recipe):
        return nullcontext()
    return many_programs(4 * len(anatomy.blocks(trunk)))


def compiled(module: nn.Module, recipe: Recipe, device: torch.device) -> Any:
    """The module's forward, compiled if the recipe says so and its blocks are not compiled already.

    On one GPU the passes are recorded as CUDA graphs, because small models are otherwise bound by how fast
    Python launches kernels; unless something in them cannot be recorded.
    """
    if recipe.compile and device.type == "cuda":
        mend_inductor()  # blocks and augmentation too are compiled when they first run, later than here
    if not recipe.compile or has_compiled_blocks(recipe):
        return module
    return torch.compile(module, mode="reduce-overhead" if _can_record(recipe, device) else None)


def is_recorded_here(recipe: Recipe, device: torch.device) -> bool:
    """Whether the passes are recorded by the trainer (:class:`RecordedPass`): blocks compiled one by one."""
    return has_compiled_blocks(recipe) and _can_record(recipe, device)


def _can_record(recipe: Recipe, device: torch.device) -> bool:
    # An SVD waits for the host; of the factorisation that a target for kappa needs it is not sure.
    is_unfit = any(
        call.argument("method") == "svd" or call.argument("target_kappa") is not None
        for call in grayings(recipe)
    )
    # Gradients that are accumulated live in the memory that the next pass writes to.
    is_accumulating = recipe.accumulate > 1
    return device.type == "cuda" and not (several() or is_unfit or is_accumulating)


@contextmanager
def accumulating(module: nn.Module, is_last: bool) -> Iterator[None]:
    """Gradients travel between the processes in the last pass of an update only."""
    if isinstance(module, DistributedDataParallel) and not is_last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_last)
    yield


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Leave attention to torch's other kernels, and the caller's choice as it was.

    On Hopper GPUs torch prefers cuDNN's, whose backward pass can return NaN for finite inputs, where all
    scores of a query are far below zero (pytorch/pytorch issue 196678). An ablation that drives scores there
    would be blamed for it.
    """
    was_enabled = bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


WARM_UP = 3
"""Updates before the recording, in which kernels are compiled and chosen; they train like all others."""

AHEAD = 2
"""Recordings that are launched before the device has ended them: enough that it never waits."""

Outcome = tuple[Tensor, Tensor | None]
"""The loss of a pass, and how many images were classified right."""
Work = Callable[[tuple[Tensor, ...], Batch], Outcome]
Record = Callable[[Callable[[], Any]], Callable[[], Any]]


class RecordedPass:
    """Runs a pass, from its fourth time on as a recording.

    Args:
        work: (inputs of the module, batch) -> loss and count, after the backward pass. It must not wait for
            the device, and what it reads besides its arguments must stay where it is in memory.
        parameters: that get gradients; each time their ``grad`` is what the pass left there.
        launch: how the first passes are run.
        record: (function) -> what does again, on the same memory, what the function did.
    """

    def __init__(
        self, work: Work, parameters: Sequence[nn.Parameter], launch: Callable[..., Any], record: Record
    ) -> None:
        self.work, self.parameters, self.launch, self.record = work, parameters, launch, record
        self.passes = 0
        self._replay: Callable[[], Any] | None = None
        self._held: list[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self._outcome: Outcome | None = None

    def __call__(self, inputs: tuple[Tensor, ...], batch: Batch) -> Outcome:
        self.passes += 1
        if self.passes <= WARM_UP:
            outcome: Outcome = self.launch(lambda: self.work(inputs, batch))
            return outcome
        if self._replay is None:
            self._start(inputs, batch)
        assert self._replay is not None
        assert self._outcome is not None
        for held, new in zip(self._held, _tensors(inputs, batch), strict=True):
            if held.shape != new.shape:
                raise RuntimeError(
                    f"expected a batch like the recorded one, {tuple(held.shape)}, got {tuple(new.shape)}; "
                    "compile_blocks=false takes batches of changing size."
                )
            held.copy_(new, non_blocking=True)
        self._replay()
        # Others set them to None between two updates; the recording writes to the same ones each time.
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._outcome

    def _start(self, inputs: tuple[Tensor, ...], batch: Batch) -> None:
        self._held = [tensor.clone() for tensor in _tensors(inputs, batch)]
        images, labels, *others = self._held
        rest = iter(others)
        own = Batch(images, labels)
        own_inputs = tuple(images if each is batch.images else next(rest) for each in inputs)
        for parameter in self.parameters:
            parameter.grad = None  # a gradient that is there would be added to at every replay

        def pass_on_held() -> None:
            self._outcome = self.work(own_inputs, own)

        self._replay = self.record(pass_on_held)
        self._gradients = [parameter.grad for parameter in self.parameters]


def _tensors(inputs: tuple[Tensor, ...], batch: Batch) -> list[Tensor]:
    """All that changes from pass to pass, each once."""
    return [batch.images, batch.labels, *(each for each in inputs if each is not batch.images)]


class CudaRecorder:
    """Runs and records on one stream of its own, as CUDA graphs ask for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def launch(self, function: Callable[[], Any]) -> Any:
        """Run a function now."""
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            found = function()
        outside.wait_stream(self.stream)
        return found

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Launch a function into a graph, without running it; returns what runs it."""
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # memory that is freed during a recording is not given back
        # Other threads of this process, such as one that pins memory for batches, may continue.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            function()
        return self._paced(graph.replay)

    def _paced(self, replay: Callable[[], Any]) -> Callable[[], Any]:
        """At most :data:`AHEAD` replays wait for the device; a full queue would keep a core busy."""
        ends = deque(torch.cuda.Event(blocking=True) for _ in range(AHEAD))  # type: ignore[no-untyped-call]

        def replay_in_time() -> None:
            ends[0].synchronize()  # asleep; at once for an event that was never recorded
            replay()
            ends[0].record(torch.cuda.current_stream(self.device))
            ends.rotate(-1)

        return replay_in_time
