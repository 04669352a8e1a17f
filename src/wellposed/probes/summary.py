"""From one number an image to a record: the median and the quartiles, honest about bounds."""

import math
import statistics
from typing import Any, NamedTuple

from torch import Tensor

from wellposed.records import Record


class Sample(NamedTuple):
    """One value an image, NaN where there is none, and where it is a lower bound only."""

    values: Tensor
    at_least: Tensor | None = None


def median(sample: Sample) -> tuple[float, bool]:
    """The median of the finite values, NaN if there is none, and whether it is only a lower bound."""
    told = _told(sample)
    if not told:
        return math.nan, False
    middle = statistics.median(value for value, _ in told)
    capped = [value for value, is_bound in told if is_bound]
    # A value that may be larger than it is given can lift the median unless it lies above it already.
    return middle, any(value <= middle for value in capped) or 2 * len(capped) >= len(told)


def summarize(measure: str, sample: Sample, *, note: str = "", **where: Any) -> Record:
    """The record of a sample: median, quartiles, and the values of all images."""
    values, told = sample.values.tolist(), _told(sample)
    bad, capped = len(values) - len(told), sum(is_bound for _, is_bound in told)
    said = [note] if note else []
    if bad:
        said.append(f"{bad} of {len(values)} images have non-finite values")
    if capped:
        said.append(f"a lower bound for {capped} of {len(values)} images")
    fields: dict[str, Any] = {**where, "measure": measure, "images": len(told), "note": "; ".join(said)}
    fields["samples"] = tuple(value if math.isfinite(value) else None for value in values)
    if sample.at_least is not None:
        fields["at_least"] = tuple(index for index, flag in enumerate(sample.at_least.tolist()) if flag)
    if not told:
        return Record(value=None, status="not measured", **fields)
    middle, is_bound = median(sample)
    good = [value for value, _ in told]
    low, _, high = statistics.quantiles(good, n=4, method="inclusive") if len(good) > 1 else good * 3
    return Record(value=middle, low=low, high=high, status="at least" if is_bound else "ok", **fields)


def _told(sample: Sample) -> list[tuple[float, bool]]:
    """The finite values, each with whether it is a lower bound."""
    values = sample.values.tolist()
    flags = [False] * len(values) if sample.at_least is None else sample.at_least.tolist()
    return [pair for pair in zip(values, flags, strict=True) if math.isfinite(pair[0])]
