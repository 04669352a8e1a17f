"""How well conditioned the tokens are, block by block and position by position.

The token matrix of an image is N tokens x D channels, prefix tokens included, as in the paper.

>>> import timm, torch
>>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
>>> kappas = conditioning(model, torch.randn(2, 3, 224, 224))
>>> [record.position for record in kappas if record.measure == "kappa"]
['input', 'attention.branch', 'attention.skip', 'attention.sum', 'ffn.branch', 'ffn.skip', 'ffn.sum']
"""

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import Block, BlockSelection, select
from wellposed.linalg import condition_number, effective_rank, singular_values, stable_rank
from wellposed.linalg.spectrum import TOLERANCE, estimator
from wellposed.probes.images import image_batches
from wellposed.probes.observe import watching_tokens
from wellposed.probes.passes import forward_passes
from wellposed.probes.summary import Sample, summarize
from wellposed.records import Record, dtype_name

GPU_SPECTRA = 4
"""Images whose whole spectrum is computed on a GPU, where a batched eigenvalue problem is slow."""

_ORDER = {"branch": 0, "skip": 1, "sum": 2}


@dataclass
class _Seen:
    """What was measured at one position."""

    kappa: list[Tensor] = field(default_factory=list)
    at_least: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)  # of the images whose spectrum was taken
    shape: tuple[int, int] = (0, 0)
    dtype: str = ""
    estimator: str = ""
    tolerance: float = 0.0


@dataclass(frozen=True)
class _Measured:
    """The result for one tensor, kept to serve the next position at which the same tensor is seen."""

    tokens: Tensor  # kept alive: its address is the key
    version: int
    kappa: Tensor
    at_least: Tensor
    values: Tensor | None


class ConditioningProbe:
    """Condition number, ranks and spectrum of the tokens at each position.

    Args:
        found: the blocks to look at.
        spectra: how many images get their whole spectrum; None is all on a CPU, where it costs nothing
            beside the condition number, and :data:`GPU_SPECTRA` on a GPU.
        positions: those to measure; None for all.
    """

    def __init__(
        self, found: list[Block], spectra: int | None = None, positions: Collection[str] | None = None
    ) -> None:
        self.found, self.spectra, self.positions = found, spectra, positions
        self.seen: dict[tuple[int, str], _Seen] = {}
        self._recent: list[_Measured] = []

    @contextlib.contextmanager
    def watching(self) -> Any:
        try:
            with watching_tokens(self.found, self._see):
                yield
        finally:
            self._recent.clear()

    def _see(self, block: Block, position: str, tokens: Tensor) -> None:
        if self.positions is not None and position not in self.positions:
            return
        seen = self.seen.setdefault((block.index, position), _Seen())
        seen.shape = (tokens.shape[-2], tokens.shape[-1])
        seen.dtype = dtype_name(tokens.dtype)
        if min(seen.shape) == 1:
            seen.kappa.append(tokens.new_ones(tokens.shape[0], dtype=torch.float64))
            return
        seen.estimator = estimator(tokens)
        seen.tolerance = TOLERANCE if tokens.is_cuda else torch.finfo(torch.float32).eps
        done = sum(len(values) for values in seen.values)
        wanted = self._spectra_on(tokens.device.type)
        measured = self._measure(tokens, tokens.shape[0] if wanted is None else max(wanted - done, 0))
        seen.kappa.append(measured.kappa)
        seen.at_least.append(measured.at_least)
        if measured.values is not None:
            seen.values.append(measured.values)

    def _spectra_on(self, device: str) -> int | None:
        return GPU_SPECTRA if self.spectra is None and device == "cuda" else self.spectra

    def _measure(self, tokens: Tensor, spectra: int) -> _Measured:
        for recent in self._recent:
            if _is_same(recent, tokens):
                return recent
        values = singular_values(tokens[:spectra]) if spectra else None
        every = values is not None and len(values) == len(tokens)
        kappa, at_least = condition_number(tokens, singular_values=values if every else None)
        measured = _Measured(tokens, tokens._version, kappa, at_least, values)
        # The stream is seen up to four times in a row: as a sum, as the next input and as skips.
        self._recent = [*self._recent[-3:], measured]
        return measured

    def records(self) -> list[Record]:
        out: list[Record] = []
        for block in self.found:
            positions = [position for index, position in self.seen if index == block.index]
            for position in sorted(positions, key=lambda name: _rank(block, name)):
                out += _records(block, position, self.seen[block.index, position])
        return out


def _is_same(recent: _Measured, tokens: Tensor) -> bool:
    known = recent.tokens
    return (
        known.data_ptr() == tokens.data_ptr()
        and known.shape == tokens.shape
        and known.stride() == tokens.stride()
        and known.dtype == tokens.dtype
        and recent.version == tokens._version
    )


def _rank(block: Block, position: str) -> tuple[int, int]:
    role, _, part = position.partition(".")
    return (block.row.roles.index(role), _ORDER[part]) if part else (-1, 0)  # type: ignore[arg-type]


def _records(block: Block, position: str, seen: _Seen) -> list[Record]:
    where: dict[str, Any] = {
        "block": block.index,
        "module": block.name,
        "position": position,
        "dtype": seen.dtype,
    }
    kappa = torch.cat(seen.kappa).cpu()
    if min(seen.shape) == 1:
        note = "one token: its condition number is 1 whatever the model"
        return [
            Record(measure="kappa", value=None, images=len(kappa), status="not measured", note=note, **where)
        ]
    where |= {"estimator": seen.estimator, "tolerance": seen.tolerance}
    at_least = torch.cat(seen.at_least).cpu()
    sample = Sample(kappa, at_least)
    size = f"{seen.shape[0]} tokens x {seen.shape[1]} channels"
    finite = max(int(kappa.isfinite().sum()), 1)
    share = int(at_least.sum()) / finite
    out = [
        summarize("kappa", sample, note=size, **where),
        Record(
            measure="rank deficient",
            value=share,
            images=len(kappa),
            note="share of images whose kappa is beyond what can be told",
            **where,
        ),
    ]
    if seen.values:
        values = torch.cat(seen.values).cpu()
        out.append(summarize("effective rank", Sample(effective_rank(values)), **where))
        out.append(summarize("stable rank", Sample(stable_rank(values)), **where))
        relative = values / values[:, :1]
        good = relative[relative.isfinite().all(-1)]
        if len(good):
            mean = tuple(good.mean(0).tolist())
            note = "mean over the images of sigma_i / sigma_max"
            out.append(
                Record(measure="spectrum", value=None, curve=mean, images=len(good), note=note, **where)
            )
    return out


def conditioning(
    model: nn.Module,
    images: object,
    *,
    blocks: BlockSelection = None,
    spectra: int | None = None,
    batch_size: int = 16,
) -> list[Record]:
    """Conditioning of a model's tokens: see :class:`ConditioningProbe` and :func:`wellposed.diagnose`."""
    batches = image_batches(images, model, batch_size=batch_size)
    return forward_passes(
        model, batches, lambda found: [ConditioningProbe(select(found, blocks), spectra=spectra)]
    )
