"""Measurements on a model and images, as records. They leave the model exactly as they found it."""

from wellposed.probes.conditioning import conditioning

__all__ = ["conditioning"]
