"""The monitor at a pace that training does not feel."""

import math
import time

from torch import Tensor

from wellposed.probes import Monitor
from wellposed.train.batches import EvalBatches

USUAL = 100
"""Updates between two measurements where nothing else is said."""
SHARE = 0.01
"""Of the time that training takes, which measuring may take at most."""

IMAGES = 4


def first_test_images(test: EvalBatches) -> Tensor:
    """Those that a monitor looks at; the same on every start of a run."""
    return next(iter(test)).images[:IMAGES]


class PacedMonitor:
    """Measures every ``every`` updates.

    None starts with every :data:`USUAL` updates. The second measurement and the updates before it tell what
    measuring costs; if it is more than :data:`SHARE` of the time, the interval grows to a multiple that keeps
    it, for the rest of the run.
    """

    def __init__(self, monitor: Monitor, every: int | None) -> None:
        self.monitor = monitor
        self.every = every
        self._last: tuple[int, float] | None = None

    def is_due(self, update: int) -> bool:
        return update % (self.every or USUAL) == 0

    def measure(self, update: int) -> dict[str, float]:
        before = time.monotonic()
        numbers = self.monitor.measure()
        after = time.monotonic()
        if self.every is None and self._last is not None:
            first, since = self._last
            if update > first:
                self.every = paced(after - before, (before - since) / (update - first))
        self._last = update, after
        return numbers


def paced(cost: float, update: float) -> int:
    """Updates between two measurements, from the seconds that a measurement and an update take.

    >>> paced(0.05, 0.07), paced(0.05, 0.016)
    (100, 400)
    """
    return USUAL * max(1, math.ceil(cost / (SHARE * update * USUAL)))
