"""Python values as JSON, and back as exactly what they were.

JSON turns tuples into lists, keys into texts, and has no infinity; what it would change is tagged instead.

>>> encode({"betas": (0.9, 0.999), "best": float("inf")})
{'betas': {'$tuple': [0.9, 0.999]}, 'best': {'$float': 'inf'}}
>>> decode(encode({"betas": (0.9, 0.999), 3: None}))
{'betas': (0.9, 0.999), 3: None}
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class TensorName:
    """Stands for a tensor that is in a file of tensors, under this name.

    ``parted``: where processes hold parts of the parameters, they hold parts of it, too.
    """

    name: str
    parted: bool = False


def encode(value: Any, where: str = "state") -> Any:
    """What ``json.dumps`` can write without loss. ``where`` is what an error calls the value."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind in (list, tuple):
        items = [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if isinstance(value, dict):
        pairs = [(key, encode(item, f"{where}[{key!r}]")) for key, item in value.items()]
        if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [[encode(key, f"a key of {where}"), item] for key, item in pairs]}
    if kind is TensorName:
        return {"$tensor": [value.name, value.parted]}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$device": str(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return {"$numpy": [value.dtype.name, encode(value.item(), where)]}
    raise TypeError(
        f"{where} must be made of numbers, texts, None, lists, tuples and dicts to be saved, "
        f"got {kind.__module__}.{kind.__qualname__}; tensors go into the files."
    )


def decode(value: Any) -> Any:
    """What :func:`encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(item) for key, item in value.items()}
    if tag not in _DECODERS or len(value) != 1:
        raise ValueError(f"expected one of {', '.join(_DECODERS)}, got {tag!r}.")
    return _DECODERS[tag](value[tag])


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a dtype of torch, got {name!r}.")
    return dtype


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda items: tuple(decode(item) for item in items),
    "$dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
    "$tensor": lambda fields: TensorName(*fields),
    "$dtype": _dtype,
    "$device": torch.device,
    "$numpy": lambda fields: np.dtype(fields[0]).type(decode(fields[1])),
}
