"""Measurements on a model and images, as records. They leave the model exactly as they found it."""
