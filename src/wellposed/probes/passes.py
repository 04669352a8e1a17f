"""Forward passes while probes look on, and what they saw as records: the median, honest about bounds."""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from wellposed import stats
from wellposed.anatomy.model import Block
from wellposed.anatomy.trace import without_fast_path
from wellposed.interrupts import let_through, uninterrupted
from wellposed.probes.images import Batch
from wellposed.probes.named_inputs import NamedInputs, run
from wellposed.probes.observe import observed, plain, watching_calls
from wellposed.records import Record


class Probe(Protocol):
    """Collects what it sees inside :meth:`watching` and reports it in :meth:`records`."""

    def watching(self) -> contextlib.AbstractContextManager[None]: ...

    def records(self) -> list[Record]: ...


def forward_passes(
    model: nn.Module, batches: Iterable[Batch], make_probes: Callable[[list[Block]], list[Probe]]
) -> list[Record]:
    """The records of the probes that ``make_probes`` makes for the model's blocks, over all batches."""
    model = plain(model)
    # Tensors of inference mode would not show when they are changed in place.
    with uninterrupted(), observed(model) as found, torch.inference_mode(False), torch.no_grad():
        probes = make_probes(found)
        with contextlib.ExitStack() as watching:
            calls = watching.enter_context(watching_calls(found))
            for probe in probes:
                watching.enter_context(probe.watching())
            for batch in batches:
                let_through()
                named = batch if isinstance(batch, NamedInputs) else None
                calls.start(len(batch), *((named.paddings, named.kinds) if named else ()))
                with without_fast_path() if named else contextlib.nullcontext():
                    run(model, batch)
            let_through()
        return [calls.noted(record) for probe in probes for record in probe.records()]


class Sample(NamedTuple):
    """One value an image, NaN where there is none, and where it is a lower bound only."""

    values: Tensor
    at_least: Tensor | None = None


def median(sample: Sample) -> tuple[float, bool]:
    """The median of the finite values, NaN if there is none, and whether it is only a lower bound."""
    finite, flags = _finite(sample)
    if not finite:
        return math.nan, False
    found = stats.median(finite, flags)
    return found.value, found.at_least


def summarize(measure: str, sample: Sample, *, note: str = "", **where: Any) -> Record:
    """The record of a sample: median, quartiles, and the values of all images."""
    values, (finite, flags) = sample.values.tolist(), _finite(sample)
    notes = [note] if note else []
    if bad := len(values) - len(finite):
        notes.append(f"{bad} of {len(values)} images have non-finite values")
    if bounds := sum(flags):
        notes.append(f"a lower bound for {bounds} of {len(values)} images")
    fields: dict[str, Any] = {**where, "measure": measure, "images": len(finite), "note": "; ".join(notes)}
    fields["samples"] = tuple(value if math.isfinite(value) else None for value in values)
    if sample.at_least is not None:
        fields["at_least"] = tuple(index for index, flag in enumerate(sample.at_least.tolist()) if flag)
    if not finite:
        return Record(value=None, status="not measured", **fields)
    middle, is_bound = median(sample)
    low, _, high = statistics.quantiles(finite, n=4, method="inclusive") if len(finite) > 1 else finite * 3
    return Record(value=middle, low=low, high=high, status="at least" if is_bound else "ok", **fields)


def place_of(block: Block, position: str, **more: Any) -> dict[str, Any]:
    """Fields of a record: where it was measured."""
    return {"block": block.index, "module": block.name, "position": position, **more}


def span(values: Iterable[int]) -> str:
    """The smallest and the largest, or the one that all are.

    >>> span([5, 3, 4]), span({7})
    ('3-5', '7')
    """
    found = set(values)
    return "-".join(str(value) for value in sorted({min(found), max(found)}))


def _finite(sample: Sample) -> tuple[list[float], list[bool]]:
    """The finite values, and whether each is a lower bound."""
    values = sample.values.tolist()
    flags = [False] * len(values) if sample.at_least is None else sample.at_least.tolist()
    known = [place for place, value in enumerate(values) if math.isfinite(value)]
    return [values[place] for place in known], [flags[place] for place in known]
