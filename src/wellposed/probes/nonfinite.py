"""Where NaN or infinity first appears in a forward or backward pass.

>>> import timm
>>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
>>> _ = model.blocks[1].mlp.fc1.weight.data.fill_(float("nan"))
>>> print(first_nonfinite(model, torch.randn(1, 3, 224, 224)))
the weight of blocks.1.mlp.fc1 is not finite
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from wellposed.interrupts import uninterrupted
from wellposed.probes.images import Batch, first_images
from wellposed.probes.named_inputs import run
from wellposed.probes.ntk_gradients import output_of
from wellposed.probes.observe import eagerly, plain, preserved, removing

What = Literal["weight", "output", "loss", "gradient"]


@dataclass(frozen=True)
class NonFinite:
    """The first value of a pass that is not finite.

    Args:
        what: a ``"weight"`` before the pass; in the forward pass the ``"output"`` of a module, or the
            ``"loss"``; in the backward pass the ``"gradient"`` by the output of a module or by a parameter.
        name: of the module or parameter; empty for the loss.

    >>> print(NonFinite("output", "blocks.3.mlp"))
    the first output that is not finite is of blocks.3.mlp
    """

    what: What
    name: str = ""

    def __str__(self) -> str:
        match self.what:
            case "weight":
                module, _, parameter = self.name.rpartition(".")
                return f"the {parameter} of {module or 'the model'} is not finite"
            case "output":
                return f"the first output that is not finite is of {self.name}"
            case "gradient":
                return f"all outputs are finite, the first gradient that is not is by {self.name}"
            case _:
                return "all outputs are finite, the loss is not"


@dataclass
class Norms:
    """Norms by name, in the order in which they came up."""

    outputs: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)


def first_bad(norms: dict[str, float]) -> str | None:
    """The name of the first norm that is not finite."""
    return next((name for name, norm in norms.items() if not is_finite(norm)), None)


@contextlib.contextmanager
def watching_norms(model: nn.Module, *, backward: bool = False) -> Iterator[Norms]:
    """Collects the norm of every module's first output, and with ``backward`` of the gradients by them."""
    norms, handles = Norms(), list[Any]()

    def leave(name: str, _: nn.Module, __: Any, output: Any) -> None:
        first = next((x for x in tree_leaves(output) if isinstance(x, Tensor)), None)
        if first is None or name in norms.outputs:
            return
        norms.outputs[name] = norm_of(first)
        if backward and first.requires_grad:
            handles.append(_on_gradient(first, norms, f"the output of {name}"))

    with removing(handles):
        for name, module in model.named_modules():
            if name:
                handles.append(module.register_forward_hook(partial(leave, name)))
        if backward:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    handles.append(_on_gradient(parameter, norms, name))
        yield norms


def first_nonfinite(
    model: nn.Module, images: object, loss: Callable[[Any], Tensor] | None = None, *, max_images: int = 4
) -> NonFinite | None:
    """Run a model forward, with a loss backward too, and say where the first NaN or infinity is.

    The model is run eagerly, in the mode that it is in; gradients and running statistics stay as they are.

    Args:
        model: any module; with FSDP2 every process must call.
        images: as for :func:`wellposed.diagnose`.
        loss: from the model's output to a scalar, for the backward pass; None for a forward pass alone.
        max_images: the first ones; what is bad for others alone is not found.

    Returns:
        The first one; None where all is finite.

    >>> import timm, torch
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    >>> first_nonfinite(model, torch.randn(1, 3, 32, 32)) is None
    True
    """
    inner = plain(model)
    return first_nonfinite_of(inner, first_images(images, inner, max_images), loss)


def first_nonfinite_of(
    model: nn.Module, batch: Batch, loss: Callable[[Any], Tensor] | None = None
) -> NonFinite | None:
    """:func:`first_nonfinite` for a plain model and a batch that is on its device."""
    for name, parameter in model.named_parameters():
        if not is_finite(norm_of(parameter)):
            return NonFinite("weight", name)
    backward = loss is not None
    kept = [buffer.clone() for buffer in model.buffers()]
    with uninterrupted(), preserved(model), eagerly(), torch.inference_mode(False):
        try:
            with torch.set_grad_enabled(backward), watching_norms(model, backward=backward) as norms:
                output = run(model, batch)
                if (bad := first_bad(norms.outputs)) is not None:
                    return NonFinite("output", bad)
                if loss is None:
                    return None if is_finite(norm_of(output_of(output))) else NonFinite("output", "the model")
                value = loss(output)
                if not is_finite(norm_of(value)):
                    return NonFinite("loss")
                trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
                torch.autograd.grad(value, trained, allow_unused=True)
                bad = first_bad(norms.gradients)
                return None if bad is None else NonFinite("gradient", bad)
        finally:
            with torch.no_grad():  # running statistics
                for buffer, before in zip(model.buffers(), kept, strict=True):
                    buffer.copy_(before)


def norm_of(x: Tensor) -> float:
    """The norm of a tensor, of all its shards where it has some."""
    whole = x.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    return float(whole.double().norm())


def is_finite(value: float) -> bool:
    """Whether a number is neither NaN nor infinite."""
    return abs(value) < float("inf")


def _on_gradient(x: Tensor, norms: Norms, name: str) -> Any:
    def keep(gradient: Tensor) -> None:
        norms.gradients.setdefault(name, norm_of(gradient))

    return x.register_hook(keep)  # type: ignore[no-untyped-call]
