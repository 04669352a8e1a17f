r"""How long the tokens are, and how alike: norms, outlier tokens, the share of their mean.

Of an image's tokens x_1 ... x_N with mean m, the share of the mean is N |m|^2 / sum_i |x_i|^2: 1 where all
tokens are the same, which is rank collapse, and about 1/N where they have nothing in common. Context
Broadcasting, m + d/2, moves it. A few tokens of ViTs trained for long are far longer than the others ("Vision
Transformers Need Registers"); the largest norm over the median and the kurtosis of the norms show them.

>>> x = torch.tensor([[[3.0, 4.0], [3.0, -4.0]], [[1.0, 0.0], [9.0, 0.0]]])
>>> token_norm(x).tolist(), outlier_ratio(x).tolist(), mean_share(x).tolist()
([5.0, 5.0], [1.0, 1.8], [0.36, 0.6097560975609756])
"""

# Shapes: B images, N tokens, D channels; a measure makes (B,) of (B, N, D).

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import Block, BlockSelection, select
from wellposed.linalg.precision import in_float64
from wellposed.probes.images import image_batches
from wellposed.probes.observe import padding_of, watching_tokens
from wellposed.probes.passes import Sample, forward_passes, place_of, summarize
from wellposed.records import Record, dtype_name, not_measured

TOLERANCE = 1e-9
"""Relative error: 1e-15 of the norms, which the kurtosis of norms that are nearly alike amplifies."""
ALIKE = 1e-3
"""Norms whose relative deviation is smaller, as behind a LayerNorm, are called alike: the rounding of the
tokens would decide their kurtosis."""


def token_norm(x: Tensor) -> Tensor:
    """The median norm of the tokens of each image."""
    return _norms(x).quantile(0.5, dim=-1)


def outlier_ratio(x: Tensor) -> Tensor:
    """The largest norm over the median one; infinite where more than half of the tokens are 0."""
    norms = _norms(x)
    return norms.amax(-1) / norms.quantile(0.5, dim=-1)


def norm_kurtosis(x: Tensor) -> Tensor:
    """The fourth moment of the norms over their square variance: 3 for a normal law, NaN if all are alike."""
    norms = _norms(x)
    centred = norms - norms.mean(-1, keepdim=True)
    variance = centred.square().mean(-1)
    is_told = variance > (ALIKE * norms.mean(-1)).square()
    return torch.where(is_told, centred.pow(4).mean(-1) / variance.square(), math.nan)


def mean_share(x: Tensor) -> Tensor:
    """N |m|^2 / sum_i |x_i|^2, with m the mean over the tokens; NaN where all tokens are 0."""
    x = in_float64(x)
    return x.shape[-2] * x.mean(-2).square().sum(-1) / x.square().sum((-2, -1))


def _norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(in_float64(x), dim=-1)
    return norms


MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "token norm": token_norm,
    "outlier tokens": outlier_ratio,
    "norm kurtosis": norm_kurtosis,
    "mean share": mean_share,
}


@dataclass
class _Seen:
    dtype: str
    values: list[Tensor] = field(default_factory=list)  # (measures, images) each
    padded: bool = False
    unknown: str = ""


class TokenProbe:
    """Norms and mean of the tokens at each position but the skips, which carry what came before.

    Padding does not count.

    Args:
        found: the blocks to look at.
        positions: those to measure; None for all but the skips.
    """

    def __init__(self, found: list[Block], positions: set[str] | None = None) -> None:
        self.found, self.positions = found, positions
        self._seen: dict[tuple[int, str], _Seen] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with watching_tokens(self.found, self._see):
            yield

    def _see(self, block: Block, position: str, tokens: Tensor) -> None:
        is_wanted = not position.endswith(".skip") if self.positions is None else position in self.positions
        if not is_wanted:
            return
        seen = self._seen.setdefault((block.index, position), _Seen(dtype_name(tokens.dtype)))
        padding = padding_of(block, tokens)
        if isinstance(padding, str):
            seen.unknown = padding
        elif padding is None:
            seen.values.append(_measured(tokens))
        else:
            seen.padded = True
            of_each = [_measured(text[~hidden][None]) for text, hidden in zip(tokens, padding, strict=True)]
            seen.values.append(torch.cat(of_each, dim=1))

    def records(self) -> list[Record]:
        return [
            record
            for (index, position), seen in self._seen.items()
            for block in self.found
            if block.index == index
            for record in _records(block, position, seen)
        ]


def _measured(tokens: Tensor) -> Tensor:
    """(measures, images) of the tokens (B, N, D)."""
    if not tokens.shape[-2]:
        return torch.tensor([[0.0], *[[math.nan]] * (len(MEASURES) - 1)]).double().expand(-1, len(tokens))
    wide = in_float64(tokens)
    return torch.stack([measure(wide) for measure in MEASURES.values()]).cpu()


def _records(block: Block, position: str, seen: _Seen) -> Iterator[Record]:
    where = place_of(block, position, dtype=seen.dtype)
    if seen.unknown:
        yield from (not_measured(measure, seen.unknown, **where) for measure in MEASURES)
        return
    values = dict(zip(MEASURES, torch.cat(seen.values, dim=1), strict=True))
    note = "without padding" if seen.padded else ""
    where |= {"estimator": "float64 sums over the tokens", "tolerance": TOLERANCE}
    for measure, of_images in values.items():
        record = summarize(measure, Sample(of_images), note=note, **where)
        alike = int((of_images.isnan() & values["token norm"].isfinite()).sum())
        if alike:  # no variance, or no norm, to divide by
            said = f"{alike} of {len(of_images)} images have tokens that are all zero or equally long"
            record = replace(record, note="; ".join(filter(None, (note, said))))
        yield record


def token_norms(
    model: nn.Module, images: object, *, blocks: BlockSelection = None, batch_size: int = 16
) -> list[Record]:
    """Norms, outliers and mean of a model's tokens: see :class:`TokenProbe` and :func:`wellposed.diagnose`.

    Args:
        model: a model that :func:`wellposed.anatomy.blocks` knows; left as it was.
        images: see :func:`wellposed.probes.images.image_batches`.
        blocks: an index, a slice, several indices, or None for all.
        batch_size: images in a forward pass.

    Returns:
        ``"token norm"``, ``"outlier tokens"``, ``"norm kurtosis"`` and ``"mean share"``, the median over the
        images, at each position of each block.

    >>> import timm, torch
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
    >>> [record.position for record in token_norms(model, torch.randn(2, 3, 224, 224))][::4]
    ['input', 'attention.branch', 'attention.sum', 'ffn.branch', 'ffn.sum']
    """
    batches = image_batches(images, model, batch_size=batch_size)
    return forward_passes(model, batches, lambda found: [TokenProbe(select(found, blocks))])
