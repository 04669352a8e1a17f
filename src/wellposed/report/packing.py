"""A column of a table in few bytes, with every value as it was.

Names are long and repeat: each is stored once. What is equal from row to row, such as the run, or a quartile
that nobody measured, is stored once for each stretch of rows. A logarithm is not stored, but taken again.
``rowsOf`` in ``page.js`` does what :func:`unpacked` does.

>>> pack(["a", "a", "a", "a", "a", "b"])
{'levels': ['a', 'b'], 'values': [0, 1], 'repeats': [5, 1]}
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any


def pack(values: Sequence[Any]) -> dict[str, Any]:
    """As ``values``, with ``levels`` where they are names and ``repeats`` where that is shorter."""
    told: dict[str, Any] = {}
    if any(isinstance(value, str) for value in values):
        levels = {value: code for code, value in enumerate(dict.fromkeys(values))}
        told["levels"], values = list(levels), [levels[value] for value in values]
    stretches = [(value, len(list(equal))) for value, equal in itertools.groupby(values)]
    if 2 * len(stretches) < len(values):
        return told | {"values": [value for value, _ in stretches], "repeats": [n for _, n in stretches]}
    return told | {"values": list(values)}


def unpacked(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Key -> values of each column, all of one length.

    >>> unpacked([{"key": "kappa", "values": [1.0], "repeats": [2]}, {"key": "ln", "log_of": "kappa"}])
    {'kappa': [1.0, 1.0], 'ln': [0.0, 0.0]}
    """
    filled = {column["key"]: _filled(column) for column in columns if "log_of" not in column}
    return {
        column["key"]: [math.log(value) for value in filled[column["log_of"]]]
        if "log_of" in column
        else filled[column["key"]]
        for column in columns
    }


def _filled(column: Mapping[str, Any]) -> list[Any]:
    values = column["values"]
    if "repeats" in column:
        pairs = zip(values, column["repeats"], strict=True)
        values = [value for value, count in pairs for _ in range(count)]
    return [column["levels"][code] for code in values] if "levels" in column else values
