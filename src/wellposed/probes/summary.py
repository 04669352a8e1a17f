"""From one number an image to a record: the median and the quartiles, honest about bounds."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellposed.records import Record


class Sample(NamedTuple):
    """One value an image, NaN where there is none, and where it is a lower bound only."""

    values: Tensor
    at_least: Tensor | None = None


def median(sample: Sample) -> tuple[float, bool]:
    """The median of the finite values, NaN if there is none, and whether it is only a lower bound."""
    values = sample.values.double()
    good = values.isfinite()
    if not bool(good.any()):
        return math.nan, False
    middle = torch.quantile(values[good], 0.5).item()
    capped = sample.at_least[good] if sample.at_least is not None else torch.zeros_like(values[good]).bool()
    # A value that may be larger than it is given can lift the median unless it lies above it already.
    lifts = bool((values[good][capped] <= middle).any()) or 2 * int(capped.sum()) >= int(good.sum())
    return middle, bool(capped.any()) and lifts


def summarize(measure: str, sample: Sample, *, note: str = "", **where: Any) -> Record:
    """The record of a sample: median, quartiles, and the values of all images."""
    values = sample.values.double()
    good = values[values.isfinite()]
    bad, capped = len(values) - len(good), 0 if sample.at_least is None else int(sample.at_least.sum())
    said = [note] if note else []
    if bad:
        said.append(f"{bad} of {len(values)} images have non-finite values")
    if capped:
        said.append(f"a lower bound for {capped} of {len(values)} images")
    fields: dict[str, Any] = {**where, "measure": measure, "images": len(good), "note": "; ".join(said)}
    fields["samples"] = tuple(value if math.isfinite(value) else None for value in values.tolist())
    if not len(good):
        return Record(value=None, status="not measured", **fields)
    middle, is_bound = median(sample)
    low, high = torch.quantile(good, torch.tensor([0.25, 0.75], dtype=good.dtype)).tolist()
    return Record(value=middle, low=low, high=high, status="at least" if is_bound else "ok", **fields)
