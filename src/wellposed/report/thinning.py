"""Long curves in few points, each of them a number of the record.

A mean would be a number that nobody measured, and every tenth point would lose a spike. So a curve is cut
into stretches, and of each stretch its lowest and its highest point stay.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """Of a curve; ``place`` is its index in the record."""

    place: int
    value: float


def thin(values: Sequence[float], most: int) -> list[Point]:
    """At most ``most`` points (at least 4), in order, with the first, the last, the lowest and the highest.

    >>> [point.place for point in thin([0, 1, 0, 9, 0, 1, -5, 1, 0, 1], 6)]
    [0, 2, 3, 5, 6, 9]
    """
    points = [Point(place, value) for place, value in enumerate(values)]
    if len(points) <= most:
        return points
    stretches = max((most - 2) // 2, 1)
    inner = points[1:-1]
    kept = {points[0], points[-1]}
    for number in range(stretches):
        stretch = inner[number * len(inner) // stretches : (number + 1) * len(inner) // stretches]
        if stretch:
            kept.add(min(stretch, key=lambda point: point.value))
            kept.add(max(stretch, key=lambda point: point.value))
    return sorted(kept)
