"""How well conditioned the tokens are, block by block and position by position.

The token matrix of an image is N tokens x D channels, prefix tokens included, as in the paper.

>>> import timm, torch
>>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
>>> kappas = conditioning(model, torch.randn(2, 3, 224, 224))
>>> [record.position for record in kappas if record.measure == "kappa"]
['input', 'attention.branch', 'attention.skip', 'attention.sum', 'ffn.branch', 'ffn.skip', 'ffn.sum']
"""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import Block, BlockSelection, select
from wellposed.linalg import (
    ConditionNumber,
    condition_number,
    effective_rank,
    singular_values,
    stable_rank,
)
from wellposed.linalg.spectrum import estimator, tolerance
from wellposed.probes.images import image_batches
from wellposed.probes.observe import padding_of, watching_tokens
from wellposed.probes.passes import Sample, forward_passes, span, summarize
from wellposed.records import Record, dtype_name

GPU_SPECTRA = 4
"""Images whose whole spectrum is computed on a GPU, where a batched eigenvalue problem is slow."""

ROUNDINGS = {torch.float64: 8.0, torch.float32: 8.0, torch.bfloat16: 2.0, torch.float16: 2.0}
"""Rounding errors that an entry of the tokens carries. Float32 tokens come out of norms and sums of several
steps: where exact arithmetic would give a rank-deficient matrix, as after a LayerNorm without bias, 4 were
seen. In half precision it is a product, accumulated in float32 and rounded once."""

_AT_ONCE = 256  # images that a GPU measures at a time

_ORDER = {"branch": 0, "skip": 1, "sum": 2}


@dataclass
class _Measurement:
    """The tokens of one batch at one position, and what was measured on them."""

    tokens: Tensor | None  # until measured
    spectra: int
    images: list[int]  # which of the batch
    size: tuple[int, int]
    kappa: Tensor = field(default_factory=lambda: torch.empty(0))
    at_least: Tensor = field(default_factory=lambda: torch.empty(0))
    values: Tensor | None = None


@dataclass
class _Seen:
    """All batches at one position."""

    dtype: str
    estimator: str
    tolerance: float
    batches: list[_Measurement] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # of the images, in that of the measurements
    skipped: int = 0  # texts of one token or none
    images: int = 0
    padded: bool = False
    unknown: str = ""


class _Recent(NamedTuple):
    """A tensor seen a moment ago: the stream is seen up to four times in a row."""

    tokens: Tensor  # kept alive: its address is the key
    version: int
    padding: Tensor | None
    measurements: list[_Measurement]

    def is_same(self, tokens: Tensor, padding: Tensor | None) -> bool:
        known = self.tokens
        return (
            self.padding is padding
            and known.data_ptr() == tokens.data_ptr()
            and known.shape == tokens.shape
            and known.stride() == tokens.stride()
            and known.dtype == tokens.dtype
            and self.version == tokens._version
        )


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
        self._recent: list[_Recent] = []
        self._pending: list[_Measurement] = []
        self._waiting = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        try:
            with watching_tokens(self.found, self.see):
                yield
            self._measure_pending()
        finally:
            self._recent, self._pending = [], []

    def see(self, block: Block, position: str, tokens: Tensor) -> None:
        if self.positions is not None and position not in self.positions:
            return
        if (block.index, position) not in self.seen:
            self.seen[block.index, position] = _Seen(
                dtype=dtype_name(tokens.dtype),
                estimator=estimator(tokens),
                tolerance=tolerance(tokens),
            )
        seen = self.seen[block.index, position]
        padding = padding_of(block, tokens)
        first, seen.images = seen.images, seen.images + len(tokens)
        if isinstance(padding, str):
            seen.unknown = padding
            return
        done = sum(batch.spectra for batch in seen.batches)
        for one in self._measurements(tokens, padding, done):
            seen.batches.append(one)
            seen.order += [first + image for image in one.images]
        seen.padded |= padding is not None
        seen.skipped = seen.images - len(seen.order)

    def _measurements(self, tokens: Tensor, padding: Tensor | None, done: int) -> list[_Measurement]:
        for recent in self._recent:
            if recent.is_same(tokens, padding):
                return recent.measurements
        wanted = GPU_SPECTRA if self.spectra is None and tokens.is_cuda else self.spectra
        found: list[_Measurement] = []
        for images, group in _of_equal_length(tokens, padding):
            spectra = len(group) if wanted is None else min(max(wanted - done, 0), len(group))
            done += spectra
            # What waits is copied: the model may go on to change it in place.
            copied = group.clone() if _waits(tokens) and padding is None else group
            found.append(_Measurement(copied, spectra, images, (group.shape[-2], group.shape[-1])))
        self._recent = [*self._recent[-3:], _Recent(tokens, tokens._version, padding, found)]
        self._pending += found
        self._waiting += len(tokens)
        if not _waits(tokens) or self._waiting >= _AT_ONCE:
            self._measure_pending()
        return found

    def _measure_pending(self) -> None:
        groups: dict[tuple[Any, ...], list[_Measurement]] = {}
        for one in self._pending:
            assert one.tokens is not None
            groups.setdefault((one.tokens.shape[1:], one.tokens.dtype), []).append(one)
        for group in groups.values():
            _measure(group)
        self._pending, self._waiting = [], 0

    def records(self) -> list[Record]:
        out: list[Record] = []
        for block in self.found:
            positions = [position for index, position in self.seen if index == block.index]
            for position in sorted(positions, key=lambda name: _rank(block, name)):
                out += _records(block, position, self.seen[block.index, position])
        return out


def token_condition_number(tokens: Tensor, singular_values: Tensor | None = None) -> ConditionNumber:
    """Kappa (B,) of the tokens (B, N, D) of a model, a lower bound where only their rounding decides it."""
    roundings = ROUNDINGS.get(tokens.dtype, 8.0)
    return condition_number(tokens, singular_values=singular_values, roundings=roundings)


def _of_equal_length(tokens: Tensor, padding: Tensor | None) -> list[tuple[list[int], Tensor]]:
    """The texts without their padding, those of equal length together, with their numbers in the batch."""
    if padding is None:
        return [(list(range(len(tokens))), tokens)]
    lengths = (~padding).sum(1)
    groups = []
    for length in sorted(set(lengths.tolist()) - {0, 1}):
        alike = lengths == length
        own = tokens[~padding & alike[:, None]].reshape(-1, length, tokens.shape[-1])
        groups.append((alike.nonzero()[:, 0].tolist(), own))
    return groups


def _waits(tokens: Tensor) -> bool:
    """Whether to measure the tokens together with others: a GPU is hardly busy with few."""
    return tokens.is_cuda


def _measure(group: list[_Measurement]) -> None:
    """Measure batches of equal shape together."""
    batches = [one.tokens for one in group if one.tokens is not None]
    tokens = torch.cat(batches) if len(batches) > 1 else batches[0]
    sizes = [len(batch) for batch in batches]
    few = [batch[: one.spectra] for one, batch in zip(group, batches, strict=True)]
    values = singular_values(torch.cat(few)) if any(map(len, few)) else None
    every = values is not None and len(values) == len(tokens)
    kappa, at_least = token_condition_number(tokens, values if every else None)
    parts = zip(group, torch.split(kappa, sizes), torch.split(at_least, sizes), strict=True)
    for one, its_kappa, its_at_least in parts:
        one.kappa, one.at_least, one.tokens = its_kappa, its_at_least, None
    if values is not None:
        for one, own in zip(group, torch.split(values, [len(batch) for batch in few]), strict=True):
            one.values = own


def _rank(block: Block, position: str) -> tuple[int, int]:
    role, _, part = position.partition(".")
    return (block.row.names.index(role), _ORDER[part]) if part else (-1, 0)  # type: ignore[arg-type]


def _records(block: Block, position: str, seen: _Seen) -> list[Record]:
    where: dict[str, Any] = {
        "block": block.index,
        "module": block.name,
        "position": position,
        "dtype": seen.dtype,
    }
    sizes = [batch.size for batch in seen.batches]
    reason = seen.unknown
    if not reason and all(min(size) == 1 for size in sizes):
        reason = "one token: its condition number is 1 whatever the model"
    if reason:
        return [
            Record(
                measure="kappa", value=None, images=seen.images, status="not measured", note=reason, **where
            )
        ]
    order = torch.tensor(seen.order).argsort()
    kappa = torch.cat([batch.kappa.cpu() for batch in seen.batches])[order]
    where |= {"estimator": seen.estimator, "tolerance": seen.tolerance}
    at_least = torch.cat([batch.at_least.cpu() for batch in seen.batches])[order]
    sample = Sample(kappa, at_least)
    size = f"{span(n for n, _ in sizes)} tokens x {span(d for _, d in sizes)} channels"
    size += ", without padding" if seen.padded else ""
    size += f"; {seen.skipped} texts of one token or none are skipped" if seen.skipped else ""
    finite = int(kappa.isfinite().sum())
    # Where no image has a kappa, none of them can be called deficient or not.
    share = int(at_least.sum()) / finite if finite else None
    out = [
        summarize("kappa", sample, note=size, **where),
        Record(
            measure="rank deficient",
            value=share,
            status="ok" if finite else "not measured",
            images=len(kappa),
            note="share of images whose kappa is beyond what can be told",
            **where,
        ),
    ]
    spectra = [batch.values for batch in seen.batches if batch.values is not None and len(batch.values)]
    if spectra:
        parts = [batch for batch in seen.batches if batch.values is not None and len(batch.values)]
        told = torch.tensor(_numbers(seen)).argsort()
        for measure, of in (("effective rank", effective_rank), ("stable rank", stable_rank)):
            ranks = torch.cat([of(one.values.cpu()) for one in parts if one.values is not None])
            out.append(summarize(measure, Sample(ranks[told]), **where))
        if len({values.shape[-1] for values in spectra}) > 1:
            note = "the texts have different numbers of tokens, and their spectra no mean"
            out.append(Record(measure="spectrum", value=None, status="not measured", note=note, **where))
            return out
        values = torch.cat(spectra).cpu()
        relative = values / values[:, :1]
        good = relative[relative.isfinite().all(-1)]
        if len(good):
            mean = tuple(good.mean(0).tolist())
            note = "mean over the images of sigma_i / sigma_max"
            out.append(
                Record(measure="spectrum", value=None, curve=mean, images=len(good), note=note, **where)
            )
    return out


def _numbers(seen: _Seen) -> list[int]:
    """Of the images whose spectrum is known, in the order of the measurements."""
    numbers, start = [], 0
    for batch in seen.batches:
        numbers += seen.order[start : start + (0 if batch.values is None else len(batch.values))]
        start += len(batch.images)
    return numbers


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
