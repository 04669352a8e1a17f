"""Measurements on a model and images, as records. They leave the model exactly as they found it."""

from wellposed.probes.alarms import Alarm
from wellposed.probes.attention_pictures import attention_pictures
from wellposed.probes.bounds import bounds
from wellposed.probes.conditioning import conditioning
from wellposed.probes.density import attention_density
from wellposed.probes.diagnose import diagnose
from wellposed.probes.diagnosis import Comparison, Diagnosis
from wellposed.probes.jacobian import graying_sweep, jacobian_spectrum
from wellposed.probes.jacobian_result import JacobianSpectrum
from wellposed.probes.monitor import Monitor
from wellposed.probes.nonfinite import NonFinite, first_nonfinite
from wellposed.probes.ntk import NTK, ntk, ntk_spectrum
from wellposed.probes.parameters import gradient_norms, weight_spectra
from wellposed.probes.tokens import token_norms

__all__ = [
    "NTK",
    "Alarm",
    "Comparison",
    "Diagnosis",
    "JacobianSpectrum",
    "Monitor",
    "NonFinite",
    "attention_density",
    "attention_pictures",
    "bounds",
    "conditioning",
    "diagnose",
    "first_nonfinite",
    "gradient_norms",
    "graying_sweep",
    "jacobian_spectrum",
    "ntk",
    "ntk_spectrum",
    "token_norms",
    "weight_spectra",
]
