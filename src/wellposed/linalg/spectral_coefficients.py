"""The chain's coefficients on a device: fitted once, kept there, and constants of a traced program.

A copy to the device would make an eager step wait and cannot be recorded in a CUDA graph. A tensor made while
a program is traced belongs to the tracer, and must not be kept.
"""

import functools

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from wellposed.linalg.eager import constant, is_traced
from wellposed.linalg.spectral_fit import fit_family, fit_power, series_at

Numbers = tuple[tuple[float, ...], ...]


def chain_coefficients(
    eps: float | Tensor, floor: float, tolerance: float, device: torch.device
) -> tuple[Tensor, float]:
    """Coefficients (1 or B, K + 2) of the powers eps, a number or a tensor (1 or B), and their delta."""
    # With dynamic=True torch.compile takes numbers for symbols, also those of a module; not of __float__.
    floor, tolerance = floor.__float__(), tolerance.__float__()
    if not isinstance(eps, Tensor):
        eps = eps.__float__()
        return _of_power(eps, floor, tolerance, device), _delta_of_power(eps, floor, tolerance)
    # The series is read off in float64, which MPS lacks, and the result rounded once.
    wide = torch.device("cpu") if device.type == "mps" else device
    series = _of_family(floor, tolerance, wide)
    coefficients = series_at(eps.detach().to(wide), series)
    return coefficients.to(device, _widest(device)), _delta_of_family(floor, tolerance)


# torch.compile runs these when it traces, and takes what they return for constants.


@constant
def _of_power(eps: float, floor: float, tolerance: float, device: torch.device) -> Tensor:
    with _disable_current_modes():
        numbers = (fit_power(eps, floor, tolerance).coefficients,)
    return _on(numbers, device)


@constant
def _of_family(floor: float, tolerance: float, device: torch.device) -> Tensor:
    with _disable_current_modes():
        numbers = fit_family(floor, tolerance).table
    return _on(numbers, device)


@constant
def _delta_of_power(eps: float, floor: float, tolerance: float) -> float:
    with _disable_current_modes():
        return fit_power(eps, floor, tolerance).delta


@constant
def _delta_of_family(floor: float, tolerance: float) -> float:
    with _disable_current_modes():
        return fit_family(floor, tolerance).delta


def _on(numbers: Numbers, device: torch.device) -> Tensor:
    make = _made if is_traced() else _kept
    return make(numbers, device)


@functools.lru_cache(maxsize=64)
def _kept(numbers: Numbers, device: torch.device) -> Tensor:
    # A tensor made inside inference mode could not serve a later training step.
    with torch.inference_mode(False), torch.no_grad():
        return _made(numbers, device)


def _made(numbers: Numbers, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=_widest(device), device=device)


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
