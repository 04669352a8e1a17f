"""Records in few bytes: they are kept in repositories, and a study has a hundred of them.

Curves are thinned, numbers rounded, and rows that have the same names become one table with the values that
all of them share told once.

>>> rows = [{"measure": "kappa", "block": block, "value": value} for block, value in enumerate((3.0, 4.0))]
>>> packed_rows(rows)
[{'same': {'measure': 'kappa'}, 'columns': ['block', 'value'], 'rows': [[0, 3.0], [1, 4.0]]}]
>>> unpacked_rows(packed_rows(rows)) == rows
True
"""

from collections.abc import Mapping, Sequence
from typing import Any

POINTS = 60
"""Of a curve, at most."""
DIGITS = 5

Rows = Sequence[Mapping[str, Any]]


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """Numbers to five digits: more are not measured.

    >>> rounded({"kappa": [123.456789, 1e-9], "n": 3})
    {'kappa': [123.46, 1e-09], 'n': 3}
    """
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {name: rounded(each, digits) for name, each in value.items()}
    return [rounded(each, digits) for each in value] if isinstance(value, (list, tuple)) else value


def thinned(points: Sequence[Any], most: int = POINTS) -> list[Any]:
    """So many of them, evenly, the first and the last among them.

    >>> thinned(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def packed_rows(rows: Rows) -> list[dict[str, Any]]:
    """Rows that have the same names and the same ``measure`` as one table each."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row.get("measure"), *row), []).append(row)
    tables = []
    for (_, *names), own in groups.items():
        shared = [name for name in names if len(own) > 1 and all(row[name] == own[0][name] for row in own)]
        columns = [name for name in names if name not in shared]
        tables.append(
            {
                "same": {name: own[0][name] for name in shared},
                "columns": columns,
                "rows": [[row[name] for name in columns] for row in own],
            }
        )
    return tables


def unpacked_rows(tables: Rows) -> list[dict[str, Any]]:
    """What :func:`packed_rows` packed, table by table."""
    return [
        {**table["same"], **dict(zip(table["columns"], row, strict=True))}
        for table in tables
        for row in table["rows"]
    ]
