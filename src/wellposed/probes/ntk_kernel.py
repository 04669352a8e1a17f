"""A neural tangent kernel as a result: its spectrum, and the records that tell of it."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.probes.ntk_plan import Plan
from wellposed.probes.parameter_groups import ParameterGroup
from wellposed.records import Record, Status, dtype_name, short

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
        how = f"{self.outputs}; gradients by autograd row by row, float64 kernel and eigenvalues; {self.plan}"
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
