"""Which arithmetic raises singular values to a power, from which floor on, and with what error.

A CPU takes the eigendecomposition of the Gram matrix, which is exact and holds the lowest floor. Elsewhere,
where that is slow, and for ONNX, which has none, it is a chain of products. float64 products are as fast as
float32 ones on the GPUs of data centres, and slow on others; float32 has the digits of singular values down
to 1/300 of the largest only. So the floors differ, and below its floor the map is a straight line. A model
that is to be the same on all devices takes one ``floor`` that all of them hold.

>>> print(spectral_plan(torch.zeros(196, 768)))
eigendecomposition in float64: 9e-04 of each singular value above 1/1000000 of the largest
>>> print(spectral_plan(torch.zeros(196, 768), precision="float32"))
eigendecomposition in float32: 1e-02 of each singular value above 1/300 of the largest
"""

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from wellposed.linalg.execution import constant
from wellposed.linalg.spectral_fit import check_floor

Precision = Literal["auto", "float32", "float64"]
Engine = Literal["eigen", "portable", "hopper"]

FLOOR_EIGEN = 1e-6
FLOOR_FLOAT64 = 1e-5
FLOOR_FLOAT32 = 1 / 300
DEFAULT_TOLERANCE = 1e-3

_FIT_SHARE = {"float64": 0.5, "float32": 0.7}
"""Of the tolerance, for the fit; the rest is for lambda_max and rounding, and a good fit has good slopes."""

_FAST_FLOAT64 = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))
"""Compute capabilities of the GPUs with as many float64 as half the float32 units: P100 to B200."""

_HOPPER = (9, 0)


_EIGEN_ROUNDING = {"float64": 4.0, "float32": 1.0}
"""Times eps over the square of a singular value, relative to the largest: its error by this way."""

ONNX_TOLERANCE = 2e-4
"""Of a chain that stands for the eigendecomposition."""

LEAST_TOLERANCE = 1e-6
"""What is smaller drowns in the rounding of float32 tokens."""


@dataclass(frozen=True)
class Plan:
    """How singular values are raised to a power.

    Attributes:
        engine: ``"eigen"`` is the eigendecomposition of the Gram matrix, ``"portable"`` a chain of batched
            products anywhere, ``"hopper"`` the chain by kernels for that GPU.
        precision: of the Gram matrix and what is made of it, ``"float32"`` or ``"float64"``.
        floor: relative to the largest singular value; the result is linear below it.
        tolerance: what was asked for.
    """

    engine: Engine
    precision: Literal["float32", "float64"]
    floor: float
    tolerance: float

    @property
    def error(self) -> float:
        """Largest relative error of a singular value above the floor, for eps of 0.3 and more.

        By the eigendecomposition it falls with the square of the value, down to rounding.
        """
        if self.engine == "eigen":
            unit = torch.finfo(getattr(torch, self.precision)).eps
            return max(_EIGEN_ROUNDING[self.precision] * unit / self.floor**2, LEAST_TOLERANCE)
        # A rounded entry of X X^T is off by 6e-8 of lambda_max, the eigenvalue of the floor is floor^2 of it,
        # and the power of the gain is (1 - eps) / 2.
        rounding = 0.4 * torch.finfo(torch.float32).eps / self.floor**2
        return self.tolerance + (rounding if self.precision == "float32" else 0)

    @property
    def fit_tolerance(self) -> float:
        """The part of the tolerance that the fit of the chain may use."""
        return _FIT_SHARE[self.precision] * self.tolerance

    def __str__(self) -> str:
        how = "eigendecomposition" if self.engine == "eigen" else f"{self.engine} chain"
        return (
            f"{how} in {self.precision}: {self.error:.0e} of each singular value "
            f"above 1/{1 / self.floor:.0f} of the largest"
        )


def spectral_plan(
    x: Tensor,
    *,
    floor: float | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    precision: Precision = "auto",
) -> Plan:
    """The plan for tokens x (..., N, D); only their dtype and device matter."""
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {precision!r}.")
    if precision == "float32" and floor is not None and floor < FLOOR_FLOAT32:
        raise ValueError(
            f"floor must be at least 1/300 with precision='float32', got {floor:g}: the squares of smaller "
            "singular values drown in float32's rounding of the largest; leave one of the two out."
        )
    if tolerance < LEAST_TOLERANCE:
        raise ValueError(
            f"tolerance must be at least {LEAST_TOLERANCE:g}, got {tolerance:g}; method='svd' has all digits."
        )
    if floor is not None:
        check_floor(floor)
    is_eigen = _has_eigen(x.device.type)
    is_coarse = rounds_float32(x.device.type)
    if precision == "float32" and is_coarse:
        raise ValueError(
            "precision='float32' needs products that keep float32's digits, got a PyTorch that may round "
            "them: leave precision out, or call torch.set_float32_matmul_precision('highest')."
        )
    if precision == "auto":
        needs_float64 = x.dtype == torch.float64 or (floor is not None and floor < FLOOR_FLOAT32)
        is_wide = is_eigen or needs_float64 or is_coarse or _has_fast_float64(x.device)
        precision = "float64" if is_wide else "float32"
    if precision == "float64" and x.device.type == "mps":
        raise ValueError("precision must be float32 on MPS, which has no float64; and floor at least 1/300.")
    usual = FLOOR_FLOAT64 if precision == "float64" else FLOOR_FLOAT32
    if is_eigen and precision == "float64":  # the lowest at which the tolerance holds
        unit = torch.finfo(torch.float64).eps
        usual = max(FLOOR_EIGEN, (_EIGEN_ROUNDING[precision] * unit / tolerance) ** 0.5)
    engine: Engine = "portable"
    if is_eigen and _is_for_onnx():
        # The exported model is the same function, so it has the same floor, and an error that hardly shows.
        tolerance = min(tolerance, ONNX_TOLERANCE)
    elif is_eigen:
        engine = "eigen"
    elif precision == "float64" and x.dtype != torch.float64 and _has_kernels(x.device):
        engine = "hopper"
    return Plan(engine, precision, usual if floor is None else float(floor), float(tolerance))


def _has_eigen(device_type: str) -> bool:
    return device_type == "cpu"


@constant
def _is_for_onnx() -> bool:
    """Whether ONNX, which has no eigendecomposition, gets the program that is being made."""
    is_exported = torch.compiler.is_exporting() or torch._C._is_tracing()
    return is_exported and torch.onnx.is_in_onnx_export()


@constant
def rounds_float32(device_type: str) -> bool:
    """Whether the user lets float32 products round to TF32 or bfloat16, in which the chain would diverge."""
    backends: Any = torch.backends
    if device_type == "cuda":
        return bool(backends.cuda.matmul.fp32_precision == "tf32")
    return device_type == "cpu" and backends.mkldnn.matmul.fp32_precision in ("bf16", "tf32")


@constant
def _has_fast_float64(device: torch.device) -> bool:
    return _capability(device) in _FAST_FLOAT64


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@constant
def _has_kernels(device: torch.device) -> bool:
    if _capability(device) != _HOPPER or not _has_triton():
        return False
    from wellposed.linalg.hopper import engine  # noqa: F401  here, so that a compiler knows the operations

    return True


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
