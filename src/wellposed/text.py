"""Plain text: tables, and block indices as people write them."""

import difflib
import re
from collections.abc import Iterable, Sequence


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


def close_names(name: object, known: Iterable[object], most: int, cutoff: float = 0.5) -> list[str]:
    """The known names that are most like another."""
    return difflib.get_close_matches(str(name), list(map(str, known)), n=most, cutoff=cutoff)


def closest(name: object, known: Iterable[object], cutoff: float = 0.5) -> str | None:
    """The known name that is most like another, if one is."""
    return next(iter(close_names(name, known, 1, cutoff)), None)


def nearest(name: object, known: Iterable[object], cutoff: float = 0.5) -> str:
    """The end of an error message about a name that is not known.

    >>> nearest("epoch", ["epochs", "lr"]), nearest("x", ["epochs", "lr"])
    ("; did you mean 'epochs'?", '.')
    """
    close = closest(name, known, cutoff)
    return f"; did you mean {close!r}?" if close else "."


def few(names: Iterable[object], most: int = 4, between: str = ", ") -> str:
    """The first names, and how many more there are.

    >>> few("abcdef"), few("ab")
    ('a, b, c, d, and 2 more', 'a, b')
    """
    known = list(map(str, names))
    return between.join([*known[:most], *([f"and {len(known) - most} more"] if len(known) > most else [])])


def byte_count(size: int | str) -> int:
    """Bytes of a number or a text.

    >>> byte_count(500), byte_count("2GB"), byte_count("1.5 MiB")
    (500, 2000000000, 1572864)
    """
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)(i?)B\s*", size, re.IGNORECASE)
    if found is None:
        raise ValueError(f"expected bytes or a text such as 2GB or 500MiB, got {size!r}.")
    power = " KMGT".index(found[2].upper() or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


MOST_INDICES = 100_000


def indices(text: str, name: str = "blocks") -> list[int]:
    """Indices of a text such as 0,3,8-11; ``name`` is what an error calls it.

    >>> indices("0,3,8-11")
    [0, 3, 8, 9, 10, 11]
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first:
            raise ValueError(f"{name} must be indices such as 0,3,11 or 0-5, got {text!r}.")
        if len(found) + last - first >= MOST_INDICES:
            raise ValueError(f"{name} must be at most {MOST_INDICES:,} indices, got {text!r}.")
        found += range(first, last + 1)
    return found


def ranges(numbers: Iterable[int]) -> str:
    """Ascending indices as :func:`indices` reads them.

    >>> ranges([0, 3, 8, 9, 10, 11])
    '0,3,8-11'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
