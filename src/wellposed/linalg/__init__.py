"""Batched linear algebra on (..., N, D) matrices. Knows no model."""

from wellposed.linalg.dct import dct2, dct_matrix, idct2
from wellposed.linalg.power import DEFAULT_FLOOR, power_gain
from wellposed.linalg.svd_power import svd_power

__all__ = ["DEFAULT_FLOOR", "dct2", "dct_matrix", "idct2", "power_gain", "svd_power"]
