"""Which method is faster from which size on.

>>> from wellposed.bench.growth import GrowthRow
>>> def row(method, tokens, time):
...     size = {"tokens": tokens, "channels": 768, "batch": 1}
...     return GrowthRow(axis="tokens", method=method, passes="forward", microseconds=time, **size)
>>> rows = [row("spectral", 64, 2), row("spectral", 196, 5), row("dct", 64, 3), row("dct", 196, 4)]
>>> [str(found) for found in crossovers(rows)]
['tokens, forward: spectral is faster than dct up to 64, dct from 196 on']
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from wellposed.bench.growth import AXES, PASSES, GrowthRow


@dataclass(frozen=True)
class Crossover:
    """Two methods over one axis; ``faster`` names the one that wins at each size."""

    axis: str
    passes: str
    pair: tuple[str, str]
    sizes: tuple[int, ...]
    faster: tuple[str, ...]

    @property
    def changes(self) -> list[int]:
        """The sizes from which on another one is faster than before."""
        return [
            size
            for size, before, now in zip(self.sizes[1:], self.faster, self.faster[1:], strict=False)
            if before != now
        ]

    def __str__(self) -> str:
        first, where = self.faster[0], f"{self.axis}, {self.passes}"
        other = next(name for name in self.pair if name != first)
        if not self.changes:
            span = f"{self.sizes[0]} to {self.sizes[-1]}" if len(self.sizes) > 1 else f"{self.sizes[0]}"
            return f"{where}: {first} is faster than {other} at every size measured ({span})"
        until = self.sizes[self.sizes.index(self.changes[0]) - 1]
        winners = (self.faster[self.sizes.index(size)] for size in self.changes)
        then = ", ".join(
            f"{winner} from {size} on" for winner, size in zip(winners, self.changes, strict=True)
        )
        return f"{where}: {first} is faster than {other} up to {until}, {then}"


def crossovers(rows: Iterable[GrowthRow], of: str = "spectral") -> list[Crossover]:
    """``of`` against each other method, for each axis and pass, at the sizes where both were measured."""
    return list(_crossovers(list(rows), of))


def _crossovers(rows: list[GrowthRow], of: str) -> Iterator[Crossover]:
    others = dict.fromkeys(row.method for row in rows if row.method != of)
    for axis in AXES:
        for passes in PASSES:
            here = [row for row in rows if (row.axis, row.passes) == (axis, passes)]
            for other in others:
                own, theirs = _times(here, of), _times(here, other)
                sizes = tuple(sorted(own.keys() & theirs.keys()))
                if sizes:
                    faster = tuple(of if own[size] <= theirs[size] else other for size in sizes)
                    yield Crossover(axis, passes, (of, other), sizes, faster)


def _times(rows: list[GrowthRow], method: str) -> dict[int, float]:
    return {
        row.size: row.microseconds for row in rows if row.method == method and row.microseconds is not None
    }
