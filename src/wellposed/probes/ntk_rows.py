"""Gradients of single outputs of single images with respect to parameters, and their Gram matrix.

One way for every model: plain autograd, image by image and output by output, through
``torch.func.functional_call``. Not vmap: its rule for the backward pass of batch norm gives wrong gradients
without a word in some memory layouts (torch 2.15, the stem of XCiT), and not every model can be mapped.

What a model draws at random (the mask of a masked autoencoder) is the same for every row and every pass.
"""

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from wellposed.interrupts import let_through
from wellposed.linalg.precision import full_float32, without_autocast
from wellposed.probes.images import Batch
from wellposed.probes.named_inputs import arguments
from wellposed.probes.ntk_plan import Pass, Plan
from wellposed.probes.observe import eagerly, preserved

Keep = Callable[[int, tuple[Tensor, ...]], None]
"""Gets the index of a row and its gradient with respect to each parameter."""

ForEachRow = Callable[[list[str], Keep], None]
"""From names of parameters: shows the gradient of each row in turn."""


@contextlib.contextmanager
def as_function(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the model is a plain function to differentiate, in evaluation mode; as it was afterwards.

    Float32 products have all their digits: no autocast, no TF32. Attention is plain products and a softmax.
    Activation checkpoints rest, which would run the model again with its own parameters, and so do backward
    hooks, which may change gradients.
    """
    put_back: list[tuple[nn.Module, str, Any]] = []
    with (
        preserved(model),
        eagerly(),
        torch.inference_mode(False),
        without_autocast(torch.empty(0, device=device)),
        full_float32(),
        sdpa_kernel(SDPBackend.MATH),
    ):
        try:
            model.eval()
            for module in model.modules():
                for name, value in (
                    ("grad_checkpointing", False),
                    ("_backward_hooks", OrderedDict()),
                    ("_backward_pre_hooks", OrderedDict()),
                ):
                    if vars(module).get(name):
                        put_back.append((module, name, vars(module)[name]))
                        vars(module)[name] = value
            yield
        finally:
            for module, name, value in put_back:
                vars(module)[name] = value


def output_of(value: Any) -> Tensor:
    """The tensor of a model's output that is differentiated: its ``logits``, else its first floating one."""
    logits = value.get("logits") if isinstance(value, Mapping) else getattr(value, "logits", None)
    for tensor in (logits, *tree_leaves(value)):
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            return tensor
    raise TypeError(
        f"expected a model that returns a floating point tensor, logits, or a tuple or dict that holds one, "
        f"got {type(value).__name__}; wrap the model in a module that returns the tensor."
    )


@dataclass(frozen=True)
class RowFunction:
    """A model as a function of its parameters, row by row. Call it inside :func:`as_function`.

    Args:
        images: each a batch of one, as the model takes it.
        outputs: indices of the outputs, each a row of its own; None for one row, the sum of all outputs over
            the square root of their number.
        constants: parameters and buffers by name.
    """

    model: nn.Module
    images: Sequence[Batch]
    outputs: list[int] | None
    constants: dict[str, Tensor]

    @property
    def rows(self) -> int:
        return len(self.images) * (1 if self.outputs is None else len(self.outputs))

    def count_outputs(self) -> int:
        with torch.no_grad():
            return self._values({}, self.images[0]).numel()

    def for_each_row(self, names: list[str], keep: Keep) -> None:
        """See :data:`ForEachRow`."""
        leaves = {name: self.constants[name].detach().requires_grad_() for name in names}
        for image in range(len(self.images)):
            self._show_image(image, leaves, keep)

    def _show_image(self, image: int, leaves: dict[str, Tensor], keep: Keep) -> None:
        with torch.enable_grad():
            values = self._values(leaves, self.images[image])
            if self.outputs is None:
                wanted = [values.sum() / math.sqrt(len(values))]
            else:
                wanted = [values[index] for index in self.outputs]
        for number, value in enumerate(wanted):
            keep(image * len(wanted) + number, _gradient(value, list(leaves.values())))

    def _values(self, leaves: dict[str, Tensor], image: Batch) -> Tensor:
        """The outputs (C,) of one image."""
        let_through()
        values = {**self.constants, **leaves}
        with preserved(self.model):  # the generators start from the same state every time
            returned = functional_call(self.model, values, *arguments(image))
        return output_of(returned).flatten()


def _gradient(value: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    if not value.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)


def gram_matrices(
    plan: Plan,
    for_each_row: ForEachRow,
    group_of: dict[str, str],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """For each group of parameters the Gram matrix (rows, rows) of their gradients, in float64.

    Args:
        dtype: to keep gradients in.
        device: of the gradients.
    """
    where = torch.device("cpu") if device.type == "mps" else device  # MPS knows no float64
    empty = torch.zeros(plan.rows, plan.rows, dtype=torch.float64, device=where)
    grams = {group: empty.clone() for group in dict.fromkeys(group_of.values())}
    for step in plan.passes:
        kept = _held_gradients(step, plan.rows, for_each_row, dtype, device)
        start = 0
        for columns in step.columns:
            own = kept[:, start : start + columns.width]
            _add_gram(grams[group_of[columns.parameter]], own, plan.tile)
            start += columns.width
        del kept, own
    return {group: (gram + gram.mT) / 2 for group, gram in grams.items()}


def _add_gram(gram: Tensor, gradients: Tensor, tile: int) -> None:
    for start in range(0, gradients.shape[1], tile):
        wide = gradients[:, start : start + tile].to(gram)
        gram.addmm_(wide, wide.mT)
        del wide


def _held_gradients(
    step: Pass, rows: int, for_each_row: ForEachRow, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The columns of a pass (rows, width), one parameter beside the other."""
    kept = torch.empty(rows, step.width, dtype=dtype, device=device)

    def keep(row: int, gradients: tuple[Tensor, ...]) -> None:
        start = 0
        for columns, gradient in zip(step.columns, gradients, strict=True):
            place = kept[row, start : start + columns.width]
            if columns.is_whole:
                place.view(gradient.shape).copy_(gradient)
            else:
                place.copy_(gradient.flatten()[columns.start : columns.stop])
            start += columns.width

    for_each_row([columns.parameter for columns in step.columns], keep)
    return kept
