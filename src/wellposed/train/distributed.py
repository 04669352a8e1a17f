"""The processes of a run: how they start as one, what they agree on, and tensors between them.

Without a process group there is one process, the first, and each function is the identity. Of a sharded model
a process holds parts, DTensors as ``fully_shard`` makes them; they are taken apart and put together by their
public methods, without touching a random generator.

Accelerate joins the processes that a launcher started, except after a restart: ``torchrun`` starts them again
next to the store in which the dead ones left their addresses, and the new ones may try to reach those. Here
every attempt has its own corner of the store.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Replicate

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
    value = _joined(tensor) if isinstance(tensor, DTensor) else tensor
    if not is_first():
        return None
    value = value.detach()
    return value.clone() if value.device.type == "cpu" else value.cpu()


def _joined(tensor: DTensor) -> Tensor:
    kind = tensor.device_mesh.device_type
    there: DTensor = tensor if tensor.device.type == kind else tensor.to(kind)  # type: ignore[assignment]
    return there.full_tensor()


def from_first(make: Callable[[], T], device: torch.device) -> T:
    """What the first process makes, on all of them; if it fails there, it fails everywhere."""
    if not several():
        return make()
    box: list[T | Exception | None] = [None]
    if is_first():
        try:
            box[0] = make()
        except Exception as error:
            dist.broadcast_object_list([_portable(error)], src=0, device=device)
            raise
    dist.broadcast_object_list(box, src=0, device=device)
    (made,) = box
    if isinstance(made, Exception):
        raise made
    return made  # type: ignore[return-value]


def _portable(error: Exception) -> Exception:
    """The error in a form that surely gets to the other processes."""
    kind = type(error) if type(error) in (ValueError, TypeError, KeyError) else RuntimeError
    return kind(str(error))


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


def of_all(sentences: list[str]) -> list[str]:
    """Those of all processes, each once; all have them in the same order."""
    if not several():
        return sentences
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, sentences)
    return list(dict.fromkeys(sentence for part in found for sentence in part))


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
