r"""The scalar map behind every graying: t -> t^eps for t in [0, 1], with a finite slope at zero.

The slope of :math:`t^\epsilon` at t = 0 is infinite, so a token matrix that lacks rank would have an
infinite gradient. Below a relative floor the map goes on as a straight line through the origin:

.. math::
    h(t) = t \cdot \max(t, \text{floor})^{\epsilon - 1}

which is exact above the floor, continuous, monotone, and has the largest slope floor^(eps - 1).

>>> import torch
>>> t = torch.tensor([0.0, 0.25, 1.0])
>>> t * power_gain(t, eps=0.5)
tensor([0.0000, 0.5000, 1.0000])
"""

from torch import Tensor

DEFAULT_FLOOR = 1e-7
"""Relative to the largest value. Condition numbers up to 1e7 are treated exactly."""


def power_gain(t: Tensor, eps: float | Tensor, floor: float = DEFAULT_FLOOR) -> Tensor:
    """h(t) / t: the factor that takes t to t^eps, bounded by floor^(eps - 1)."""
    gain: Tensor = t.clamp(min=floor) ** (eps - 1)
    return gain
