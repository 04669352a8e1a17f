"""Which steps of the chain need float64; the others run in pairs of float16."""

import math

PAIR_LIMIT = 7e-5
"""The smallest eigenvalue that a step in pairs may have to carry: rounding is 1e-7 of the largest."""

GAIN_LIMIT = 300
"""Tensor cores round sums downwards by 1e-7: times the gain, the error of the largest singular values."""


def wide_steps(steps: int, delta: float, largest_gain: float) -> int:
    """How many of the steps need float64.

    Those until the smallest eigenvalue of use has grown to PAIR_LIMIT: it reaches 1 at the last step, and
    grows by 2 (1 + delta) in each. All of them where large singular values come of large gains that cancel.

    >>> wide_steps(20, 0.3, largest_gain=16), wide_steps(22, 0.2, largest_gain=600)
    (10, 22)
    """
    if largest_gain > GAIN_LIMIT:
        return steps
    return max(steps - math.floor(math.log(1 / PAIR_LIMIT) / math.log(2 * (1 + delta))), 0)
