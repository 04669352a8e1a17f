"""The processes of a run and their model: what they agree on, how it is shared, compiled and recorded.

Without a process group there is one process, the first, and each function is the identity. Of a sharded model
a process holds parts, DTensors as ``fully_shard`` makes them; they are taken apart and put together by their
public methods, without touching a random generator.

Accelerate joins the processes that a launcher started, except after a restart: ``torchrun`` starts them again
next to the store in which the dead ones left their addresses, and the new ones may try to reach those. Here
every attempt has its own corner of the store.

A small model is bound by how fast Python launches its kernels. ``torch.compile`` can record what it compiles
whole; where blocks are compiled one by one, forward pass, loss and backward pass of an update are recorded
here: launched once, and then replayed on new images with a single call.
"""

import gc
import importlib.util
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from wellposed import anatomy
from wellposed.compiling import fix_inductor, many_programs
from wellposed.train.batches import Batch
from wellposed.train.edits import grayings
from wellposed.train.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
Outline = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


def world() -> int:
    """How many processes the run has."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def several() -> bool:
    return world() > 1


def is_first() -> bool:
    return rank() == 0


def outline(tensor: Tensor) -> Outline:
    return tuple(tensor.shape), tensor.dtype


def device_of(model: nn.Module) -> torch.device:
    """Where the processes of a model exchange tensors."""
    for tensor in (*model.parameters(), *model.buffers()):
        # Parameters that are kept in main memory between the steps are still exchanged on the mesh's device.
        return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device
    return torch.device("cpu")


def whole(tensor: Tensor) -> Tensor | None:
    """A copy in main memory, on the first process; None on the others. All of them must call it."""
    if isinstance(tensor, DTensor):
        kind = tensor.device_mesh.device_type
        there: DTensor = tensor if tensor.device.type == kind else tensor.to(kind)  # type: ignore[assignment]
        tensor = there.full_tensor()
    if not is_first():
        return None
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def from_first(make: Callable[[], T], device: torch.device) -> T:
    """What the first process makes, on all of them; if it fails there, it fails everywhere."""
    if not several():
        return make()
    box: list[T | Exception | None] = [None]
    if is_first():
        try:
            box[0] = make()
        except Exception as error:
            # In a form that surely gets to the other processes.
            kind = type(error) if type(error) in (ValueError, TypeError, KeyError) else RuntimeError
            dist.broadcast_object_list([kind(str(error))], src=0, device=device)
            raise
    dist.broadcast_object_list(box, src=0, device=device)
    (made,) = box
    if isinstance(made, Exception):
        raise made
    return made  # type: ignore[return-value]


def send(tensor: Tensor | None, outline: Outline, device: torch.device) -> Tensor:
    """A tensor of the first process, on all of them. The others give None."""
    shape, dtype = outline
    if not several():
        assert tensor is not None
        return tensor
    here = (
        torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor.to(device).contiguous()
    )
    if here.numel():
        # As bytes: not every backend sends every dtype.
        dist.broadcast(here.reshape(-1).view(torch.uint8), src=0)
    return here


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """The values of a whole tensor as another of its shape is: on its device, with its parts and strides."""
    if isinstance(like, DTensor):
        return parted(tensor, like)
    if tensor.stride() == like.stride():
        return tensor.to(like.device)
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def parted(tensor: Tensor, like: DTensor) -> Tensor:
    """A process's part of a tensor that all have: cut like another one, or not at all if shapes differ."""
    mesh = like.device_mesh
    uncut = [Replicate() for _ in range(mesh.ndim)]
    spread = DTensor.from_local(tensor.to(mesh.device_type), mesh, uncut, run_check=False)
    part = spread.redistribute(placements=like.placements if tensor.shape == like.shape else uncut)
    return part.to(like.device)


def largest(values: Tensor) -> Tensor:
    """The elementwise largest over all processes, in place."""
    if several():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def total(values: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if several():
        dist.all_reduce(values)
    return values


def wait_for_all() -> None:
    if several():
        dist.barrier()


def read(values: Tensor) -> list[float]:
    """The values (n,) on the host.

    Plain reading keeps a core busy until the GPU is there. Where many small runs share a machine, others need
    that core to compile.
    """
    if values.is_cuda:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(values.device))
        event.synchronize()
    found: list[float] = values.tolist()
    return found


_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""What launchers of MPI set, which Accelerate joins too."""


def started_processes() -> int:
    """How many processes the launcher says that it has started; 1 without a launcher."""
    counts = (os.environ.get(name, "-1") for name in ("WORLD_SIZE", *_MPI))
    return next((int(count) for count in counts if int(count) >= 0), 1)


def require_accelerate() -> None:
    """Training needs it; edits, diagnoses and reports do not."""
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError(
            "training needs accelerate, which is not installed; install it with: "
            "pip install 'wellposed[train]'"
        )


def make_accelerator(recipe: Recipe, trackers: list[str], project: str | Path) -> "Accelerator":
    """The devices, processes and precision of a run, also where one was made before in this process."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise ValueError(
            "sharding is a field of the recipe here: use --parallel fsdp2 and launch without --use_fsdp."
        )
    if recipe.device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {recipe.device!r}; a launcher chooses among GPUs.")
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda needs a GPU that torch sees, there is none; use device=cpu.")
    require_accelerate()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    join_processes(recipe.device)
    if not torch.distributed.is_initialized():
        # Accelerate keeps the first accelerator's settings for the whole process.
        AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        # Several processes without a GPU are one run only if Accelerate knows that they are on the CPU.
        cpu=recipe.device == "cpu" or (started_processes() > 1 and not torch.cuda.is_available()),
        mixed_precision="bf16" if recipe.precision == "bf16" else "no",
        log_with=trackers or None,
        project_dir=str(project),
    )
    joined = (rank(), world())
    if joined != (accelerator.process_index, accelerator.num_processes) or world() < started_processes():
        raise RuntimeError(
            f"expected one run on {started_processes()} processes, as the launcher's WORLD_SIZE says, got "
            f"process {rank()} of {world()} for torch and {accelerator.process_index} of "
            f"{accelerator.num_processes} for Accelerate; start them with torchrun or accelerate launch, or "
            "unset WORLD_SIZE for a run on one."
        )
    return accelerator


def join_processes(device: str | None) -> None:
    """Make the process group of a restart; does nothing where there is one, or one process."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is None or dist.is_initialized() or started_processes() < 2:
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, world = next(rendezvous("env://"))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=PrefixStore(f"attempt-{attempt}", store),
        rank=rank,
        world_size=world,
    )


def leave_processes() -> None:
    """End the process group, if there is one; at the end of a program."""
    if dist.is_initialized():
        dist.destroy_process_group()


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
        fix_inductor()  # blocks and augmentation too are compiled when they first run, later than here
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
