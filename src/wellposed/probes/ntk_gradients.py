r"""Gradients of single outputs of single images with respect to parameters, and their Gram matrix.

Two ways. Row by row is plain autograd through ``torch.func.functional_call``, image by image and output by
output, and works for every model. Mapped is ``torch.func``'s ``vmap`` over a few images and all their
outputs, which for small images takes a third of the time; :class:`RowFunction` says where it is not used.

The gradients may be too many to hold: a plan keeps to a memory limit. The gradients of all rows with respect
to some of the parameters are held at a time, one pass over the rows for each such set. A parameter whose
gradients alone are too many is cut into columns, each a pass again: there the gradient of a row is made whole
and only the columns are kept.

What a model draws at random (the mask of a masked autoencoder) is the same for every row and every pass.

>>> print(plan_passes({"weight": 1000, "bias": 10}, rows=4, itemsize=4, limit=16_000))
4 passes over 4 rows, at most 16,000 bytes of gradients
"""

import contextlib
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wellposed.interrupts import let_through
from wellposed.linalg.precision import full_float32, without_autocast
from wellposed.probes.images import Batch
from wellposed.probes.named_inputs import arguments
from wellposed.probes.observe import eagerly, preserved

Keep = Callable[[int, tuple[Tensor, ...]], None]
"""Gets the index of a row and its gradient with respect to each parameter."""

ForEachRow = Callable[[list[str], Keep], None]
"""From names of parameters: shows the gradient of each row in turn."""

MAPPED_NUMBERS = {"cpu": 2**15, "cuda": 2**21}
"""Of the images that are mapped together: more keep the device busy one by one, and need less memory so."""

_WIDE = 8  # bytes of a float64


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
class Columns:
    """The entries ``start`` to ``stop`` of a flattened parameter of ``size`` entries."""

    parameter: str
    start: int
    stop: int
    size: int

    @property
    def width(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.width == self.size


@dataclass(frozen=True)
class Pass:
    """Columns that are held together."""

    columns: tuple[Columns, ...]

    @property
    def width(self) -> int:
        return sum(columns.width for columns in self.columns)

    def entries(self, rows: int) -> int:
        """Entries of gradients held at the most: what is kept, and a row as it was made."""
        # A gradient that does not lie flat in memory is copied before it is cut.
        made = sum(c.size if c.is_whole else 2 * c.size for c in self.columns)
        return rows * self.width + made


@dataclass(frozen=True)
class Plan:
    """What :func:`plan_passes` makes.

    Args:
        rows: of the Gram matrix.
        passes: over the rows, each with a forward pass for every image and a backward pass for every row.
        tile: so many columns at a time are turned into float64 for the product.
        held: the most bytes of gradients held at a time, tile included.
        limit: what ``held`` had to stay within.
    """

    rows: int
    passes: tuple[Pass, ...]
    tile: int
    held: int
    limit: int

    def rows_at_once(self, itemsize: int) -> int:
        """How many rows may be made together within the limit; one at least."""
        capacity = (self.limit - self.tile * self.rows * _WIDE) // itemsize
        return min((capacity - self.rows * step.width) // step.entries(0) for step in self.passes)

    def making(self, together: int, itemsize: int) -> "Plan":
        """The same plan where so many rows are made together."""
        entries = (self.rows * step.width + together * step.entries(0) for step in self.passes)
        return replace(self, held=max(entries) * itemsize + self.tile * self.rows * _WIDE)

    def __str__(self) -> str:
        word = "pass" if len(self.passes) == 1 else "passes"
        return f"{len(self.passes)} {word} over {self.rows} rows, at most {self.held:,} bytes of gradients"


def plan_passes(sizes: dict[str, int], *, rows: int, itemsize: int, limit: int) -> Plan:
    """Fill the memory pass by pass, in the order of the parameters.

    Args:
        sizes: number of entries of each parameter.
        rows: how many gradients there are.
        itemsize: bytes of an entry of a gradient.
        limit: bytes.
    """
    tile = min(max(limit // 8 // (rows * _WIDE), 1), max(sizes.values()))
    capacity = (limit - tile * rows * _WIDE) // itemsize
    passes: list[Pass] = []
    current = Pass(())
    for name, size in sizes.items():
        whole = Columns(name, 0, size, size)
        if Pass((whole,)).entries(rows) > capacity:
            width = (capacity - 2 * size) // rows
            if width < 1:
                raise ValueError(_too_little(whole, rows, itemsize, limit))
            passes += [
                Pass((Columns(name, start, min(start + width, size), size),))
                for start in range(0, size, width)
            ]
            continue
        grown = Pass((*current.columns, whole))
        if grown.entries(rows) > capacity:
            passes.append(current)
            grown = Pass((whole,))
        current = grown
    if current.columns:
        passes.append(current)
    held = max(step.entries(rows) for step in passes) * itemsize + tile * rows * _WIDE
    return Plan(rows, tuple(passes), tile, held, limit)


def _too_little(whole: Columns, rows: int, itemsize: int, limit: int) -> str:
    # One row of the parameter and its copy, a column of all rows, and an eighth for the tile.
    needed = (2 * whole.size + rows) * itemsize * 8 // 7 + rows * _WIDE
    return (
        f"memory_limit must hold the gradient of one row with respect to {whole.parameter} "
        f"({whole.size * itemsize:,} bytes) twice and some more, got {limit:,} bytes; {needed:,} is enough, "
        "ten times that is much faster."
    )


@dataclass
class RowFunction:
    """A model as a function of its parameters, row by row. Call it inside :func:`as_function`.

    Args:
        images: each a batch of one, as the model takes it.
        outputs: indices of the outputs, each a row of its own; None for one row, the sum of all outputs over
            the square root of their number.
        constants: parameters and buffers by name.
        at_once: how many images are mapped together; 1 goes row by row.
        refusal: why images are not to be mapped. The rule of ``vmap`` for the backward pass of batch norm
            gives wrong gradients without a word in some memory layouts (torch 2.15, the stem of XCiT), and
            each image would draw random numbers of its own.
        how: the way that was taken, in words.
    """

    model: nn.Module
    images: Sequence[Batch]
    outputs: list[int] | None
    constants: dict[str, Tensor]
    at_once: int = 1
    refusal: str = ""
    how: str = "row by row"

    @property
    def rows(self) -> int:
        return len(self.images) * self.rows_per_image

    @property
    def rows_per_image(self) -> int:
        return 1 if self.outputs is None else len(self.outputs)

    def count_outputs(self) -> int:
        """How many there are of an image; also looks whether images can be mapped."""
        with torch.no_grad(), _Watch() as seen:
            count = self._values({}, self.images[0]).numel()
        self.refusal = seen.refusal
        if not all(isinstance(image, Tensor) for image in self.images):
            self.refusal = "the input is no tensor"
        elif len({image.shape for image in self.images if isinstance(image, Tensor)}) > 1:
            self.refusal = "the images have different sizes"
        return count

    def map_images(self, most_rows: int) -> None:
        """Map as many images as make so many rows, where that is known to be right and pays."""
        first = self.images[0]
        if self.refusal or not isinstance(first, Tensor):
            return
        by_size = MAPPED_NUMBERS.get(first.device.type, MAPPED_NUMBERS["cpu"]) // first.numel()
        self.at_once = max(min(by_size, most_rows // self.rows_per_image, len(self.images)), 1)

    def for_each_row(self, names: list[str], keep: Keep) -> None:
        """See :data:`ForEachRow`."""
        if self.at_once > 1:
            try:
                self._show_mapped(names, keep)
                self.how = f"mapped over {self.at_once} images at a time"
                return
            except RuntimeError as error:  # what vmap says of a model that it cannot map
                self.at_once = 1
                self.how = f"row by row, since it cannot be mapped: {str(error).strip().splitlines()[0]}"
        leaves = {name: self.constants[name].detach().requires_grad_() for name in names}
        for image in range(len(self.images)):
            self._show_image(image, leaves, keep)

    def _show_mapped(self, names: list[str], keep: Keep) -> None:
        leaves = {name: self.constants[name].detach() for name in names}
        images = [image for image in self.images if isinstance(image, Tensor)]
        for start in range(0, len(images), self.at_once):
            gradients = _mapped_gradients(self._wanted, leaves, images[start : start + self.at_once])
            for number in range(len(gradients[0])):
                for row in range(self.rows_per_image):
                    index = (start + number) * self.rows_per_image + row
                    keep(index, tuple(gradient[number, row] for gradient in gradients))
            del gradients

    def _show_image(self, image: int, leaves: dict[str, Tensor], keep: Keep) -> None:
        with torch.enable_grad():
            wanted = self._wanted(leaves, self.images[image])
        for number, value in enumerate(wanted):
            keep(image * len(wanted) + number, _gradient(value, list(leaves.values())))

    def _wanted(self, leaves: dict[str, Tensor], image: Batch) -> Tensor:
        """The values (rows,) of one image whose gradients are rows."""
        values = self._values(leaves, image)
        if self.outputs is None:
            return (values.sum() / math.sqrt(len(values)))[None]
        return torch.stack([values[index] for index in self.outputs])

    def _values(self, leaves: dict[str, Tensor], image: Batch) -> Tensor:
        """The outputs (C,) of one image."""
        let_through()
        values = {**self.constants, **leaves}
        with preserved(self.model):  # the generators start from the same state every time
            returned = functional_call(self.model, values, *arguments(image))
        return output_of(returned).flatten()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which operations a model is made of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "batch_norm" in str(func):
            self.refusal = "it has batch norm"
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self.refusal = "it draws random numbers"
        return func(*args, **(kwargs or {}))


def _mapped_gradients(
    wanted: Callable[[dict[str, Tensor], Tensor], Tensor], leaves: dict[str, Tensor], images: list[Tensor]
) -> tuple[Tensor, ...]:
    """With respect to each leaf (images, rows, ...)."""
    of_one = vmap(jacrev(wanted), in_dims=(None, 0))
    with warnings.catch_warnings():
        # Slower than a rule of its own, and still faster than row by row.
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        return tuple(of_one(leaves, torch.stack(images)).values())


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
