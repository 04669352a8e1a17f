"""Tensors between the processes of a run: whole ones on the first, parts or copies on all.

Without a process group there is one process, the first. The parts are DTensors, as ``fully_shard`` makes
them; they are taken apart and put together by their public methods, without touching a random generator.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

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
            dist.broadcast_object_list([_told(error)], src=0, device=device)
            raise
    dist.broadcast_object_list(box, src=0, device=device)
    (made,) = box
    if isinstance(made, Exception):
        raise made
    return made  # type: ignore[return-value]


def _told(error: Exception) -> Exception:
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
