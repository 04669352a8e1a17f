"""Measurements on a model and images, as records. They leave the model exactly as they found it."""

from wellposed.probes.bounds import bounds
from wellposed.probes.conditioning import conditioning
from wellposed.probes.density import attention_density
from wellposed.probes.diagnose import diagnose
from wellposed.probes.diagnosis import Comparison, Diagnosis
from wellposed.probes.jacobian import graying_sweep, jacobian_spectrum
from wellposed.probes.jacobian_result import JacobianSpectrum
from wellposed.probes.monitor import Monitor
from wellposed.probes.ntk import NTK, ntk, ntk_spectrum

__all__ = [
    "NTK",
    "Comparison",
    "Diagnosis",
    "JacobianSpectrum",
    "Monitor",
    "attention_density",
    "bounds",
    "conditioning",
    "diagnose",
    "graying_sweep",
    "jacobian_spectrum",
    "ntk",
    "ntk_spectrum",
]
