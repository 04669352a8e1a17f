"""Measurements of speed: what graying costs alone and inside a training step."""
