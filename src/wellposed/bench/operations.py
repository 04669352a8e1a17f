"""What is timed alone: graying by each method, with the two references that only the benchmark has.

>>> operation("dct").eps
0.95
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from wellposed.linalg.power import power_gain
from wellposed.linalg.spectral_plan import spectral_plan
from wellposed.nn.functional import Method, gray
from wellposed.nn.graying import DEFAULT_EPS

_COMPILED = "-compiled"


@dataclass(frozen=True)
class Operation:
    """Graying of x (B, N, D) by one method."""

    name: str
    call: Callable[[Tensor], Tensor]
    eps: float
    is_slow: bool
    """Warmed up on one image: a whole batch would cost as much as the measurement."""
    is_exact: bool
    """Whether the singular values of the result are those of the input to the power eps."""
    cuda_only: bool = False

    def exact_above(self, x: Tensor) -> float:
        """The singular value, relative to the largest, from which on the result is right."""
        return spectral_plan(x).floor if self.name.startswith("spectral") else 0.0

    def ready(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """The function to call for one size."""
        if self.cuda_only and device.type != "cuda":
            raise ValueError(
                f"{self.name} needs an NVIDIA GPU, got {device.type}; leave it out of --methods."
            )
        if not self.name.endswith(_COMPILED):
            return self.call
        # Else the sizes before count against the number of times that a function may be compiled.
        torch._dynamo.reset()
        return cast(Callable[[Tensor], Tensor], torch.compile(self.call, dynamic=False))


METHODS = ("spectral", "dct", "svd-gesvda", "eigh", "svd")
"""The fast ones first, so that a run that is cut short has them."""


def operation(name: str) -> Operation:
    """The operation of a name of :data:`METHODS`, with ``-compiled`` behind it through torch.compile."""
    plain = name.removesuffix(_COMPILED)
    if plain not in METHODS:
        raise ValueError(
            f"methods must be some of {', '.join(METHODS)}, with or without {_COMPILED}, got {name!r}."
        )
    base = plain.partition("-")[0]
    eps = DEFAULT_EPS[base] if base in DEFAULT_EPS else DEFAULT_EPS["svd"]
    references: dict[str, Any] = {"svd-gesvda": gray_by_gesvda, "eigh": gray_by_eigh}
    if plain in references:
        function = references[plain]

        def call(x: Tensor) -> Tensor:
            return cast(Tensor, function(x, eps))
    else:

        def call(x: Tensor) -> Tensor:
            # As in training on a GPU; of the methods only the DCT goes by it.
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                return gray(x, eps, cast(Method, plain))

    return Operation(
        name,
        call,
        eps,
        is_slow=plain in ("svd", "eigh", "svd-gesvda"),
        is_exact=plain != "dct",
        cuda_only=plain == "svd-gesvda",
    )


def spectral_code(device: torch.device) -> str:
    """What ``method="spectral"`` runs on a device: a time says nothing without it.

    By its digits, not by its name: where they are those of the SVD to the last bit, it is the SVD.
    """
    x = torch.randn(2, 12, 20, generator=torch.Generator().manual_seed(0)).to(device)
    eps = DEFAULT_EPS["spectral"]
    if torch.equal(gray(x, eps, "spectral"), gray(x, eps, "svd")):
        return "the SVD: equal to method svd to the last bit, so its times are those of svd"
    return str(spectral_plan(x))


def gray_by_gesvda(x: Tensor, eps: float) -> Tensor:
    """By cuSOLVER's approximate batched SVD, with autograd's own gradient."""
    U, s, Vh = torch.linalg.svd(x, full_matrices=False, driver="gesvda")
    gain = power_gain(s / s[..., :1], eps)
    grayed: Tensor = (U * (s * gain)[..., None, :]) @ Vh
    return grayed


def gray_by_eigh(x: Tensor, eps: float) -> Tensor:
    """By the eigenvalues of the smaller Gram matrix in float64, with autograd's own gradient."""
    if x.shape[-2] > x.shape[-1]:
        return gray_by_eigh(x.mT, eps).mT
    wide = x.double()
    values, vectors = torch.linalg.eigh(wide @ wide.mT)
    relative = (values / values[..., -1:]).clamp(min=1e-14).sqrt()
    gain = power_gain(relative, eps)
    Z = (vectors * gain[..., None, :]) @ vectors.mT
    grayed: Tensor = Z.to(x.dtype) @ x
    return grayed
