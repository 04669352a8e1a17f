"""From one number an image to a record: the median and the quartiles, honest about bounds."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellposed.records import Record, Status


class Sample(NamedTuple):
    """One value an image, NaN where there is none, and where it is a lower bound only."""

    values: Tensor
    at_least: Tensor | None = None


def summarize(measure: str, sample: Sample, *, note: str = "", **where: Any) -> Record:
    """The record of a sample: median, quartiles, and the values of all images."""
    values = sample.values.double()
    good = values[values.isfinite()]
    bad = len(values) - len(good)
    if bad:
        text = f"{bad} of {len(values)} images have non-finite values"
        note = f"{note}; {text}" if note else text
    fields: dict[str, Any] = {**where, "measure": measure, "images": len(good), "note": note}
    fields["samples"] = tuple(value if math.isfinite(value) else None for value in values.tolist())
    if not len(good):
        return Record(value=None, status="not measured", **fields)
    low, middle, high = torch.quantile(good, torch.tensor([0.25, 0.5, 0.75], dtype=good.dtype)).tolist()
    capped = values[sample.at_least] if sample.at_least is not None else values[:0]
    # A value that may be larger than it is given can lift the median if it does not lie above it already.
    lifts = bool((capped <= middle).any()) or 2 * len(capped) >= len(good)
    status: Status = "at least" if len(capped) and lifts else "ok"
    if len(capped):
        text = f"a lower bound for {len(capped)} of {len(values)} images"
        fields["note"] = f"{fields['note']}; {text}" if fields["note"] else text
    return Record(value=middle, low=low, high=high, status=status, **fields)
