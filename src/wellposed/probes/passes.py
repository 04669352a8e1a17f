"""Running forward passes while probes look on."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn

from wellposed.anatomy.model import Block
from wellposed.anatomy.trace import without_fast_path
from wellposed.interrupts import let_through, uninterrupted
from wellposed.probes.images import Batch
from wellposed.probes.named_inputs import NamedInputs, run
from wellposed.probes.observe import observed, plain, watching_calls
from wellposed.records import Record


class Probe(Protocol):
    """Collects what it sees inside :meth:`watching` and tells it in :meth:`records`."""

    def watching(self) -> contextlib.AbstractContextManager[None]: ...

    def records(self) -> list[Record]: ...


def forward_passes(
    model: nn.Module, batches: Iterable[Batch], make_probes: Callable[[list[Block]], list[Probe]]
) -> list[Record]:
    """The records of the probes that ``make_probes`` makes for the model's blocks, over all batches."""
    model = plain(model)
    # Tensors of inference mode would not tell when they are changed in place.
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
