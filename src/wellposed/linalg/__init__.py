"""Batched linear algebra on (..., N, D) matrices. Knows no model."""

from wellposed.linalg.dct import dct2, dct_matrix, idct2
from wellposed.linalg.spectral_plan import Plan, Precision, spectral_plan
from wellposed.linalg.spectral_power import power_for_kappa, spectral_condition, spectral_power
from wellposed.linalg.spectrum import (
    KAPPA_LIMIT,
    ConditionNumber,
    condition_number,
    effective_rank,
    singular_values,
    stable_rank,
)
from wellposed.linalg.svd_power import DEFAULT_FLOOR, power_gain, svd_power

__all__ = [
    "DEFAULT_FLOOR",
    "KAPPA_LIMIT",
    "ConditionNumber",
    "Plan",
    "Precision",
    "condition_number",
    "dct2",
    "dct_matrix",
    "effective_rank",
    "idct2",
    "power_for_kappa",
    "power_gain",
    "singular_values",
    "spectral_condition",
    "spectral_plan",
    "spectral_power",
    "stable_rank",
    "svd_power",
]
