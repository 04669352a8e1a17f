"""How to make the Gram matrix of gradients that are too many to hold: a plan that keeps to a memory limit.

The gradients of all rows with respect to some of the parameters are held at a time, one pass over the rows
for each such set. A parameter whose gradients alone are too many is cut into columns, each a pass again:
there the gradient of a row is made whole and only the columns are kept.

>>> print(plan_passes({"weight": 1000, "bias": 10}, rows=4, itemsize=4, limit=16_000))
4 passes over 4 rows, at most 16,000 bytes of gradients
"""

from dataclasses import dataclass

_WIDE = 8  # bytes of a float64


@dataclass(frozen=True)
class Columns:
    """The entries ``start`` to ``stop`` of a flattened parameter of ``size`` entries."""

    parameter: str
    start: int
    stop: int
    size: int

    @property
    def width(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.width == self.size


@dataclass(frozen=True)
class Pass:
    """Columns that are held together."""

    columns: tuple[Columns, ...]

    @property
    def width(self) -> int:
        return sum(columns.width for columns in self.columns)

    def entries(self, rows: int) -> int:
        """Entries of gradients held at the most: what is kept, and a row as it was made."""
        # A gradient that does not lie flat in memory is copied before it is cut.
        made = sum(c.size if c.is_whole else 2 * c.size for c in self.columns)
        return rows * self.width + made


@dataclass(frozen=True)
class Plan:
    """What :func:`plan_passes` makes.

    Args:
        rows: of the Gram matrix.
        passes: over the rows, each with a forward pass for every image and a backward pass for every row.
        tile: so many columns at a time are turned into float64 for the product.
        held: the most bytes of gradients held at a time, tile included.
        limit: what ``held`` had to stay within.
    """

    rows: int
    passes: tuple[Pass, ...]
    tile: int
    held: int
    limit: int

    def __str__(self) -> str:
        word = "pass" if len(self.passes) == 1 else "passes"
        return f"{len(self.passes)} {word} over {self.rows} rows, at most {self.held:,} bytes of gradients"


def plan_passes(sizes: dict[str, int], *, rows: int, itemsize: int, limit: int) -> Plan:
    """Fill the memory pass by pass, in the order of the parameters.

    Args:
        sizes: number of entries of each parameter.
        rows: how many gradients there are.
        itemsize: bytes of an entry of a gradient.
        limit: bytes.
    """
    tile = min(max(limit // 8 // (rows * _WIDE), 1), max(sizes.values()))
    capacity = (limit - tile * rows * _WIDE) // itemsize
    passes: list[Pass] = []
    current = Pass(())
    for name, size in sizes.items():
        whole = Columns(name, 0, size, size)
        if Pass((whole,)).entries(rows) > capacity:
            width = (capacity - 2 * size) // rows
            if width < 1:
                raise ValueError(_too_little(whole, rows, itemsize, limit))
            passes += [
                Pass((Columns(name, start, min(start + width, size), size),))
                for start in range(0, size, width)
            ]
            continue
        grown = Pass((*current.columns, whole))
        if grown.entries(rows) > capacity:
            passes.append(current)
            grown = Pass((whole,))
        current = grown
    if current.columns:
        passes.append(current)
    held = max(step.entries(rows) for step in passes) * itemsize + tile * rows * _WIDE
    return Plan(rows, tuple(passes), tile, held, limit)


def _too_little(whole: Columns, rows: int, itemsize: int, limit: int) -> str:
    # One row of the parameter and its copy, a column of all rows, and an eighth for the tile.
    needed = (2 * whole.size + rows) * itemsize * 8 // 7 + rows * _WIDE
    return (
        f"memory_limit must hold the gradient of one row with respect to {whole.parameter} "
        f"({whole.size * itemsize:,} bytes) twice and some more, got {limit:,} bytes; {needed:,} is enough, "
        "ten times that is much faster."
    )
