"""Whose kernels come first where runs share a GPU by NVIDIA's MPS; without it, this does nothing.

A long run beside many short ones would get its share of the GPU only, and go on alone when they have ended;
and what waits for it would start late. So the long ones come first, and the short ones fill what they leave.
"""

import statistics
from collections.abc import Collection, Mapping

VARIABLE = "CUDA_MPS_CLIENT_PRIORITY"
LATER = "1"
"""NVIDIA has two; the usual one is 0."""
LONG = 2.0
"""So many times the work of the usual run."""


def with_priority(environment: Mapping[str, str], work: float, works: Collection[float]) -> dict[str, str]:
    """The environment of a run with so much work, beside runs with ``works``; the user's own value stays.

    >>> [with_priority({}, each, [15, 15, 15, 50]) for each in (15, 50)]
    [{'CUDA_MPS_CLIENT_PRIORITY': '1'}, {}]
    >>> with_priority({}, 15, [15, 15, 20])
    {}
    """
    least = LONG * statistics.median_low(works)
    own = {VARIABLE: LATER} if work < least <= max(works) else {}
    return {**own, **environment}
