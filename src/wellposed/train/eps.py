"""A schedule of eps over training.

>>> round(eps_at(0.5, 1.0, 0.25, "linear"), 3), round(eps_at(0.5, 1.0, 0.25, "cosine"), 3)
(0.625, 0.573)
"""

import math

from torch import nn

from wellposed.nn import TokenGraying
from wellposed.train.recipe import Recipe


def eps_at(start: float, end: float, done: float, schedule: str) -> float:
    """The power when the share ``done`` of training is over."""
    share = done if schedule == "linear" else (1 - math.cos(math.pi * done)) / 2
    return start + (end - start) * share


class EpsSchedule:
    """Sets the power of every graying of a model; does nothing if the recipe has no ``eps_end``.

    A compiled model is compiled once more when the power first changes and then takes any value.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, updates: int) -> None:
        self.recipe, self.updates = recipe, updates
        self.grayings = [module for module in model.modules() if isinstance(module, TokenGraying)]

    def set(self, update: int) -> float | None:
        """Set the power of an update; returns it if there is a schedule."""
        recipe = self.recipe
        if recipe.eps_end is None or recipe.eps is None:
            return None
        done = update / max(self.updates - 1, 1)
        eps = eps_at(recipe.eps, recipe.eps_end, done, recipe.eps_schedule)
        for graying in self.grayings:
            graying.eps = eps
        return eps
