r"""The empirical neural tangent kernel of a few images, of the whole model and of its parts.

.. math::
    \Theta = G G^T = \sum_p G_p G_p^T, \qquad
    G_{(i, c), p} = \frac{\partial f_c(x_i)}{\partial \theta_p}

A row of G is the gradient of output c for image i. The kernel of disjoint groups of parameters adds up to
that of all of them, so blocks, and attention and FFN in them, come with the whole. Its largest eigenvalue
bounds the step of gradient descent, its condition number says how unevenly the images are learned.

>>> import timm, torch
>>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5)
>>> found = ntk(model, torch.randn(3, 3, 32, 32), groups="parts", memory_limit="20MB")
>>> found.kernel.shape, list(found.groups)[:2]
(torch.Size([3, 3]), ['block 0 attention', 'block 0 ffn'])
>>> print(found.plan)
1 pass over 3 rows, at most 19,138,016 bytes of gradients
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from wellposed.errors import WrappedModelError
from wellposed.interrupts import uninterrupted
from wellposed.probes.images import Batch, image_batches
from wellposed.probes.model_input import image_axis
from wellposed.probes.named_inputs import as_dtype
from wellposed.probes.ntk_gradients import Plan, RowFunction, as_function, gram_matrices, plan_passes
from wellposed.probes.observe import plain, preserved
from wellposed.probes.parameter_groups import GroupBy, ParameterGroup, parameter_groups
from wellposed.records import Record, Status, dtype_name, short
from wellposed.text import byte_count

Outputs = Literal["sum", "all"] | Sequence[int]

GRADIENT_ERROR = 100
"""Times eps of the dtype: how far the gradients G of a deep model are off, in the spectral norm, relative to
that of G. Seen over all families in float32: 2 to 90."""


class KernelSpectrum(NamedTuple):
    """Eigenvalues (rows,), descending, float64, and what they say.

    ``floor``: eigenvalues below it are rounding. ``kappa``: ratio of the largest to the smallest, or a lower
    bound of it where ``at_least``; NaN of a zero kernel and of one with a non-finite entry.
    """

    eigenvalues: Tensor
    floor: float
    kappa: float
    at_least: bool


def kernel_spectrum(kernel: Tensor, dtype: torch.dtype) -> KernelSpectrum:
    r"""The spectrum of a kernel G G^T that was made in float64 of gradients in ``dtype``.

    An error :math:`\delta \sigma_{\max}` of G moves its singular values by no more than that, so eigenvalues
    of the kernel are told down to :math:`\delta^2 \lambda_{\max}`, with :math:`\delta` = 100 eps, unless the
    rounding of the float64 product is above it: kappa up to 7e9 from float32 gradients.

    >>> kernel_spectrum(torch.diag(torch.tensor([1.0, 8.0], dtype=torch.float64)), torch.float32).kappa
    8.0
    """
    if not kernel.isfinite().all():
        return KernelSpectrum(torch.full_like(kernel[0], math.nan), math.nan, math.nan, False)
    values = torch.linalg.eigvalsh(kernel).flip(0)
    largest, smallest = values[0].item(), values[-1].item()
    if largest <= 0:
        return KernelSpectrum(values, 0.0, math.nan, False)
    gradients, product = GRADIENT_ERROR * torch.finfo(dtype).eps, len(kernel) * torch.finfo(kernel.dtype).eps
    resolution = max(gradients**2, product)
    if smallest < resolution * largest and len(values) > 1:
        return KernelSpectrum(values, resolution * largest, 1 / resolution, True)
    return KernelSpectrum(values, resolution * largest, largest / smallest, False)


@dataclass(frozen=True)
class NTK:
    """An empirical neural tangent kernel.

    Args:
        kernel: (rows, rows), float64: of the whole model. Rows go through the outputs of an image, then to
            the next image.
        groups: the kernel of each group of parameters, by its name; they add up to ``kernel``.
        eigenvalues, kappa, at_least: of ``kernel``, see :class:`KernelSpectrum`.
        plan: how many passes it took, and how many bytes of gradients were held.
        members: the groups and which parameters they hold.
        images: how many.
        outputs: which outputs of the model, in words.
        dtype: of the gradients; the coarsest where there are several.
        how: the way to the gradients, in words: row by row, or mapped over images.
    """

    kernel: Tensor
    groups: dict[str, Tensor]
    eigenvalues: Tensor
    kappa: float
    at_least: bool
    plan: Plan
    members: tuple[ParameterGroup, ...]
    images: int
    outputs: str
    dtype: torch.dtype
    how: str = "row by row"

    def __str__(self) -> str:
        kappa, largest, smallest, _ = self.records()[:4]
        return (
            f"{self.outputs}, {self.images} images: lambda max {largest.text()}, "
            f"lambda min {smallest.text()}, kappa {kappa.text()} ({self.plan})"
        )

    def records(self) -> list[Record]:
        """Kappa, largest and smallest eigenvalue, and trace: of the whole model, then of every group.

        The record of kappa carries the eigenvalues as its curve.
        """
        parameters = tuple(name for group in self.members for name in group.parameters)
        found = self._records(ParameterGroup("model", parameters), self.kernel)
        for group in self.members:
            if group.name != "model":
                found += self._records(group, self.groups[group.name])
        return found

    def _records(self, group: ParameterGroup, kernel: Tensor) -> list[Record]:
        spectrum = kernel_spectrum(kernel, self.dtype)
        how = f"{self.outputs}; gradients by autograd {self.how}, float64 kernel and eigenvalues; {self.plan}"
        return [
            Record(
                measure=f"ntk {name}",
                value=value,
                block=group.block,
                module=group.module,
                position=group.part,
                images=self.images,
                status=status,
                note=self._note(spectrum),
                estimator=how,
                dtype=dtype_name(self.dtype),
                tolerance=_tolerance(name, value, status, spectrum.kappa, self.dtype),
                curve=tuple(spectrum.eigenvalues.tolist()) if name == "kappa" and value is not None else (),
            )
            for name, value, status in _measured(spectrum, kernel.trace().item())
        ]

    def _note(self, spectrum: KernelSpectrum) -> str:
        if spectrum.at_least:
            remedy = "" if self.dtype == torch.float64 else "; dtype=torch.float64 tells more"
            return f"eigenvalues below {short(spectrum.floor)} are rounding{remedy}"
        if not spectrum.eigenvalues.isfinite().all():
            return "a gradient holds a non-finite value"
        if math.isnan(spectrum.kappa):
            return "the outputs do not depend on these parameters"
        return ""


def _tolerance(
    name: str, value: float | None, status: Status, kappa: float, dtype: torch.dtype
) -> float | None:
    """Relative error of a measure, from that of the gradients; a bound has none."""
    if value is None or status != "ok":
        return None
    error = GRADIENT_ERROR * torch.finfo(dtype).eps
    # A singular value of G is off by a part of the largest, and the eigenvalue is its square.
    return 2 * error * (math.sqrt(kappa) if name in ("kappa", "lambda min") else 1)


def _measured(spectrum: KernelSpectrum, trace: float) -> list[tuple[str, float | None, Status]]:
    largest, smallest = spectrum.eigenvalues[0].item(), spectrum.eigenvalues[-1].item()
    if spectrum.at_least:
        return [
            ("kappa", spectrum.kappa, "at least"),
            ("lambda max", largest, "ok"),
            ("lambda min", spectrum.floor, "at most"),
            ("trace", trace, "ok"),
        ]
    values = {"kappa": spectrum.kappa, "lambda max": largest, "lambda min": smallest, "trace": trace}
    return [
        (name, value, "ok") if math.isfinite(value) else (name, None, "not measured")
        for name, value in values.items()
    ]


def ntk(
    model: nn.Module,
    images: object,
    *,
    outputs: Outputs = "sum",
    groups: GroupBy = "model",
    memory_limit: int | str = 2**30,
    max_images: int | None = None,
    dtype: torch.dtype | None = None,
) -> NTK:
    """The empirical neural tangent kernel of a model in evaluation mode, which is left as it was.

    Trainable parameters count, each once; frozen ones are constants. Gradients of
    small images come from ``torch.func``, several images at a time. Large images, and models that have batch
    norm, draw random numbers or cannot be mapped, take plain autograd, one image and output after the other:
    ``how`` says which. What the model draws at random is drawn once, for all images.

    Args:
        images: few of them, the kernel has a row for each or several; see
            :func:`~wellposed.probes.images.image_batches` for what can be passed.
        outputs: of the C outputs of an image, which are the logits, or else the first floating point tensor
            that the model returns, flattened. ``"sum"``: one row an image, of their sum over sqrt(C), the
            pseudo-NTK; for models that end in a classifier (the sum over the channels of a plain LayerNorm
            is constant). ``"all"``: C rows an image. Indices: a row for each of these.
        groups: see :func:`~wellposed.probes.parameter_groups.parameter_groups`; any choice but ``"model"``
            needs a model whose blocks are known.
        memory_limit: bytes, or a text like ``"2GB"``, for gradients held at a time. Less takes more passes
            over the images and gives the same kernel, up to rounding. The kernels themselves (float64, one a
            group) and the activations of the images that are mapped together come on top.
        max_images: the first so many; None is all of a tensor or list, and a few dozen of a DataLoader.
        dtype: to compute gradients in; None keeps the model's. Products are in float64 always.
    """
    model = plain(model)
    limit = _bytes(memory_limit)
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point type, got {dtype}; torch.float64 is the widest.")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise WrappedModelError(
            "the model is sharded by fully_shard, no rank has all of it; take the model before that."
        )
    axis = image_axis(model)
    with uninterrupted(), preserved(model), torch.inference_mode(False):  # a DataLoader draws random numbers
        singles = _singles(image_batches(images, model, limit=max_images), axis)
    device = next(model.parameters(), torch.empty(0)).device
    with uninterrupted(), as_function(model, device):
        members = parameter_groups(model, singles[0], groups)
        constants = {name: p.detach() for name, p in model.named_parameters()}
        # Copies: a model may write to its buffers in a forward pass.
        constants |= {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        if dtype is not None:
            constants = {name: x.to(dtype) if x.is_floating_point() else x for name, x in constants.items()}
            singles = [as_dtype(one, dtype) for one in singles]
        group_of = {name: group.name for group in members for name in group.parameters}
        dtypes = {constants[name].dtype for name in group_of}
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        function = RowFunction(model, singles, None, constants)
        indices, text = _choose(outputs, function.count_outputs())
        if indices is not None:
            function = dataclasses.replace(function, outputs=indices)
        plan = plan_passes(
            {name: constants[name].numel() for name in group_of},
            rows=function.rows,
            itemsize=widest.itemsize,
            limit=limit,
        )
        function.map_images(plan.rows_at_once(widest.itemsize))
        if function.at_once > 1:
            plan = plan.making(function.at_once * function.rows_per_image, widest.itemsize)
        kernels = gram_matrices(plan, function.for_each_row, group_of, dtype=widest, device=device)
        kernel = sum(kernels.values(), start=torch.zeros_like(next(iter(kernels.values()))))
        coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        spectrum = kernel_spectrum(kernel, coarsest)
    return NTK(
        kernel=kernel,
        groups=kernels,
        eigenvalues=spectrum.eigenvalues,
        kappa=spectrum.kappa,
        at_least=spectrum.at_least,
        plan=plan,
        members=tuple(members),
        images=len(singles),
        outputs=text,
        dtype=coarsest,
        how=function.how,
    )


def ntk_spectrum(
    model: nn.Module,
    images: object,
    *,
    outputs: Outputs = "sum",
    groups: GroupBy = "model",
    memory_limit: int | str = 2**30,
    max_images: int | None = None,
    dtype: torch.dtype | None = None,
) -> list[Record]:
    """Condition number, eigenvalues and trace of :func:`ntk`, as records."""
    return ntk(
        model,
        images,
        outputs=outputs,
        groups=groups,
        memory_limit=memory_limit,
        max_images=max_images,
        dtype=dtype,
    ).records()


def _singles(batches: Iterable[Batch], axis: int) -> list[Batch]:
    """Each image as a batch of one, each text without its padding."""
    singles: list[Batch] = []
    for batch in batches:
        if isinstance(batch, Tensor):
            singles += torch.split(batch, 1, axis)
        else:
            singles += [batch.take(slice(i, i + 1)).unpadded() for i in range(len(batch))]
    return singles


def _bytes(limit: int | str) -> int:
    if isinstance(limit, bool) or not isinstance(limit, (int, str)):
        raise TypeError(f'memory_limit must be bytes or a text like "2GB", got {type(limit).__name__}.')
    try:
        number = byte_count(limit)
    except ValueError as error:
        raise ValueError(
            f'memory_limit must be bytes or a text like "2GB" or "500MiB", got {limit!r}.'
        ) from error
    if number < 1:
        raise ValueError(f"memory_limit must be positive, got {limit!r}; 2**30 is the default.")
    return number


def _choose(outputs: Outputs, count: int) -> tuple[list[int] | None, str]:
    """Indices of the outputs that get a row each, None for their sum, and the same in words."""
    if isinstance(outputs, str):
        if outputs == "sum":
            return None, f"NTK of the sum of {count} outputs / sqrt({count}) (pseudo-NTK)"
        if outputs == "all":
            return list(range(count)), f"NTK of all {count} outputs"
        raise ValueError(f'outputs must be "sum", "all" or indices, got {outputs!r}.')
    indices = list(outputs)
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in indices):
        raise TypeError(f'outputs must be "sum", "all" or indices, got {outputs!r}; outputs=[0, 1] is one.')
    if not indices or len(set(indices)) < len(indices) or not all(0 <= index < count for index in indices):
        raise ValueError(
            f"outputs must be different indices within 0 and {count - 1}, at least one, got {outputs!r}; the "
            f"model has {count} outputs an image."
        )
    return indices, f"NTK of {len(indices)} of {count} outputs ({', '.join(map(str, indices))})"
