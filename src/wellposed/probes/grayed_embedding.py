"""What graying does where it acts: the condition number right before and right after it.

Graying of the patch embedding, or of pixels, acts before position embedding and class token are added; what
enters block 0 can be as ill-conditioned as before. Graying of blocks is seen in their ``input``.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.anatomy.subclass import original
from wellposed.anatomy.trace import removing
from wellposed.interrupts import let_through
from wellposed.linalg.spectrum import estimator, tolerance
from wellposed.nn import PixelGraying
from wellposed.probes.conditioning import token_condition_number
from wellposed.probes.passes import Sample, summarize
from wellposed.records import Record, dtype_name
from wellposed.surgery.gray import KIND
from wellposed.surgery.insertion import Inserted
from wellposed.surgery.record import OF_EMBEDDINGS
from wellposed.surgery.wrappers import place_of

MEASURE = "grayed kappa"


class GrayedEmbeddingProbe:
    """Kappa of the tokens that graying of an embedding, or of pixels, gets and gives."""

    def __init__(self, model: nn.Module) -> None:
        self.grayings = {
            place: original(module.op)
            for name, module in model.named_modules()
            if isinstance(module, Inserted) and module.kind == KIND and module.where in OF_EMBEDDINGS
            if (place := place_of(name)) is not None
        }
        self.seen: dict[tuple[str, str], list[tuple[Tensor, Tensor]]] = {}
        self._about: dict[str, Any] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handles: list[Any] = []
        with removing(handles):
            for place, graying in self.grayings.items():
                handles.append(graying.register_forward_hook(partial(self._see, place)))
            yield

    def _see(self, place: str, graying: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        let_through()
        for position, x in (("before graying", args[0]), ("after graying", output)):
            tokens = x
            if isinstance(graying, PixelGraying):
                patches = nn.functional.unfold(x, graying.patch_size, stride=graying.patch_size)
                tokens = patches.mT
            kappa, at_least = token_condition_number(tokens)
            self.seen.setdefault((place, position), []).append((kappa.cpu(), at_least.cpu()))
            self._about = {
                "dtype": dtype_name(tokens.dtype),
                "estimator": estimator(tokens),
                "tolerance": tolerance(tokens),
            }

    def records(self) -> list[Record]:
        return [
            summarize(
                MEASURE,
                Sample(*(torch.cat(parts) for parts in zip(*found, strict=True))),
                module=place,
                position=position,
                **self._about,
            )
            for (place, position), found in self.seen.items()
        ]
