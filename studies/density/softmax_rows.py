"""Single rows of attention, each with its density and how steep its softmax is.

>>> curve = softmax_curve(16)
>>> curve["entropy"][0], curve["trace"][0]  # all scores alike: uniform
(1.0, 0.9375)
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import Block
from wellposed.probes.attention_maps import no_attention, watching_attention
from wellposed.probes.density import jacobian_frobenius, jacobian_trace, row_entropy
from wellposed.probes.passes import Probe, forward_passes
from wellposed.records import Record

NORMS = {"trace": jacobian_trace, "frobenius": jacobian_frobenius}
"""Of diag(p) - p p^T: the trace is its nuclear norm."""

ROWS = 16
"""Kept of each head, evenly over queries and images."""

_STEEPNESS = (
    0.0,
    0.1,
    0.2,
    0.3,
    0.5,
    0.7,
    1.0,
    1.4,
    2.0,
    3.0,
    4.0,
    6.0,
    8.0,
    12.0,
    16.0,
    24.0,
    40.0,
    80.0,
)


def attention_rows(model: nn.Module, images: Tensor) -> Iterator[dict[str, Any]]:
    """For each block and head some rows, with entropy and norms; then how these go together over all rows."""
    probe = _Rows(len(images))
    forward_passes(model, [images], probe.of)
    seen: dict[str, list[Tensor]] = {}
    for (block, keys), columns in probe.columns():
        for head in range(columns["entropy"].shape[0]):
            own = {name: values[head] for name, values in columns.items()}
            total = len(own["entropy"])
            picked = torch.linspace(0, total - 1, min(ROWS, total)).round().long()
            kept = {name: _digits(values[picked]) for name, values in own.items()}
            yield {"measure": "softmax rows", "block": block, "head": head, "keys": keys, **kept}
            for name, values in own.items():
                seen.setdefault(name, []).append(values)
    for norm in NORMS:
        together = rank_correlation(torch.cat(seen["entropy"]), torch.cat(seen[norm]))
        yield {
            "measure": "softmax correlation",
            "norm": norm,
            "value": together,
            "rows": sum(map(len, seen["entropy"])),
            "estimator": "Spearman's, over all rows of all heads and blocks",
        }
    for keys in sorted({keys for (_, keys), _ in probe.columns()}):
        yield {"measure": "softmax curve", "keys": keys, **softmax_curve(keys)}


def softmax_curve(keys: int, rows: int = 256) -> dict[str, list[float]]:
    """Means over rows of softmax(t z), z normal, as the scores grow from 0: from uniform to a single key."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(rows, keys, dtype=torch.float64, generator=generator)
    columns: dict[str, list[float]] = {}
    for steepness in _STEEPNESS:
        for name, values in _measured((steepness * scores).softmax(-1)).items():
            columns.setdefault(name, []).extend(_digits(values.mean()[None]))
    return columns


def rank_correlation(x: Tensor, y: Tensor) -> float | None:
    """Spearman's; None where one of them does not vary.

    >>> rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 400.0, 500.0]))
    1.0
    """
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
        return None
    ranks = torch.stack([values.argsort().argsort().double() for values in (x, y)])
    return round(float(torch.corrcoef(ranks)[0, 1]), 6)


class _Rows:
    """Sees the attention of every block, in one pass."""

    def __init__(self, images: int) -> None:
        self.images = images
        self._seen: dict[tuple[int, int], list[dict[str, Tensor]]] = {}

    def of(self, found: list[Block]) -> list[Probe]:
        self.found = [block for block in found if not no_attention(block)]
        if not self.found:
            raise ValueError("expected a block with attention over tokens, got none; choose another model.")
        return [self]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with watching_attention(self.found, self._see, self.images):
            yield

    def _see(self, block: Block, p: Tensor) -> None:
        # (images, W, H, N, M) -> (H, rows, M)
        rows = p.movedim(2, 0).flatten(1, 3)
        if p.shape[-1] > 1:
            self._seen.setdefault((block.index, p.shape[-1]), []).append(_measured(rows))

    def columns(self) -> Iterator[tuple[tuple[int, int], dict[str, Tensor]]]:
        """By block and number of keys: entropy and norms, (H, rows) each."""
        for place, parts in self._seen.items():
            yield place, {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}

    def records(self) -> list[Record]:
        return []


def _measured(p: Tensor) -> dict[str, Tensor]:
    measures: Mapping[str, Any] = {"entropy": row_entropy, **NORMS}
    return {name: measure(p).cpu() for name, measure in measures.items()}


def _digits(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]
