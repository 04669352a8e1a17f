"""Plain-text tables."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Rows as lines of aligned columns; the columns in ``right`` are aligned to the right.

    >>> print(aligned([("block", "kappa"), ("0", "12"), ("11", "1,234")], right=(1,)))
    block  kappa
    0         12
    11     1,234
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if index in right else str.ljust for index in range(len(widths))]
    return "\n".join(
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    )
