"""A schedule of eps over training.

>>> round(eps_at(0.5, 1.0, 0.25, "linear"), 3), round(eps_at(0.5, 1.0, 0.25, "cosine"), 3)
(0.625, 0.573)
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from wellposed.nn import TokenGraying
from wellposed.train.recipe import Recipe


def eps_at(start: float, end: float, done: float, schedule: str) -> float:
    """The power when the share ``done`` of training is over."""
    share = done if schedule == "linear" else (1 - math.cos(math.pi * done)) / 2
    return start + (end - start) * share


class EpsSchedule:
    """Sets the power of every graying of some models; does nothing if the recipe has no ``eps_end``.

    The power becomes a tensor that is written to, so that a compiled model is not compiled again.

    Args:
        models: on their device.
        recipe: resolved.
        updates: of the whole run.
    """

    def __init__(self, models: Iterable[nn.Module], recipe: Recipe, updates: int) -> None:
        self.recipe, self.updates = recipe, updates
        self.powers: list[Tensor] = []
        if recipe.eps_end is None or recipe.eps is None:
            return
        for model in models:
            device = next(parameter.device for parameter in model.parameters())
            for graying in model.modules():
                if isinstance(graying, TokenGraying):
                    graying.eps = torch.tensor(recipe.eps, dtype=torch.float64, device=device)
                    self.powers.append(graying.eps)

    def set(self, update: int) -> None:
        """Set the power of an update."""
        recipe = self.recipe
        if recipe.eps_end is None or recipe.eps is None:
            return
        done = update / max(self.updates - 1, 1)
        eps = eps_at(recipe.eps, recipe.eps_end, done, recipe.eps_schedule)
        for power in self.powers:
            power.fill_(eps)
