r"""How dense attention is: after "Scratching Visual Transformer's Back with Uniform Attention".

A row p of attention weighs M keys. It is dense where p is near uniform. The Jacobian of the softmax that
made it is J = diag(p) - p p^T, and there its trace 1 - |p|^2 is largest: dense attention has the steepest
softmax gradient, and still trained models have it.

>>> p = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
>>> row_entropy(p).tolist(), jacobian_trace(p).tolist(), distance_from_uniform(p).tolist()
([1.0, 0.0], [0.75, 0.0], [0.0, 0.75])

In shifted windows a mask hides keys of each other's side of the image. The divisor of the entropy stays
log M there, with M all keys of the window, so that such a row does not reach 1.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import Block, BlockSelection
from wellposed.errors import NoMeaningError
from wellposed.probes.attention_maps import Source, no_attention, watching_attention
from wellposed.probes.images import image_batches
from wellposed.probes.observe import plain
from wellposed.probes.passes import Probe, Sample, forward_passes, place_of, span, summarize
from wellposed.records import Record, dtype_name, not_measured
from wellposed.surgery.choose import choose

ABSOLUTE_ERROR = 1e-5
"""Of each measure, with probabilities made in float32 from q and k or from scores that are exact.

Measured for single rows with scores up to 250; means over rows are far closer.
"""

# Probabilities measured at a time: on a CPU what its cache holds, elsewhere what keeps the device busy.
_AT_ONCE_ON_CPU, _AT_ONCE = 2**17, 2**24


def row_entropy(p: Tensor, keys: Tensor | None = None) -> Tensor:
    """-sum_j p_j log p_j / log M of each row of (..., M): 0 for one key, 1 for all alike. NaN for M = 1.

    Args:
        keys: how many keys each row may see, in place of M.
    """
    if keys is None and p.shape[-1] == 1:
        return torch.full_like(p[..., 0], math.nan, dtype=torch.float64)
    p = p.double()
    # As torch.special.entr, whose loop on a CPU is slower; a weight of 0 adds 0.
    entropy = (p * -p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(-1)
    if keys is None:
        return entropy / math.log(p.shape[-1])
    return torch.where(keys > 1, entropy / keys.clamp(min=2).double().log(), math.nan)


def jacobian_frobenius(p: Tensor, keys: Tensor | None = None) -> Tensor:
    """|diag(p) - p p^T|_F = sqrt(|p|^2 - 2 sum_j p_j^3 + |p|^4) of each row of (..., M)."""
    p = p.double()
    squares = p.square()
    norm = squares.sum(-1)
    # The same with fewer digits lost where one weight is near 1, and never below 0 by rounding.
    diagonal = (squares * (1 - p).square()).sum(-1)
    rest = (squares * (norm[..., None] - squares)).sum(-1)
    return (diagonal + rest.clamp(min=0)).sqrt()


def jacobian_trace(p: Tensor, keys: Tensor | None = None) -> Tensor:
    """tr(diag(p) - p p^T) = sum_j p_j (1 - p_j) of each row: the nuclear norm, as the matrix is positive."""
    p = p.double()
    return (p * (1 - p)).sum(-1)


def distance_from_uniform(p: Tensor, keys: Tensor | None = None) -> Tensor:
    """Total variation sum_j |p_j - 1/M| / 2 of each row: 0 for uniform, 1 - 1/M for a single key."""
    if keys is None:
        return (p.double() - 1 / p.shape[-1]).abs().sum(-1) / 2
    share = 1 / keys.clamp(min=1).double()
    hidden = (p.shape[-1] - keys) * share  # of the keys that a row may not see, which do not count
    return ((p.double() - share[..., None]).abs().sum(-1) - hidden).clamp(min=0) / 2


MEASURES: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "entropy": row_entropy,
    "softmax jacobian frobenius": jacobian_frobenius,
    "softmax jacobian trace": jacobian_trace,
    "distance from uniform": distance_from_uniform,
}
_FOR_EACH_HEAD = ("entropy", "distance from uniform")


class DensityProbe:
    """Density of the attention of each block, over the first ``images`` images.

    A value is the mean over the windows, queries and heads of an image, its median over the images the
    record's value. Entropy and distance from uniform are also those of each head. A block without attention
    over tokens, or with one key alone, has one record that says so. Where a block holds several attentions,
    the position of the second is ``attention 2``, and so on. A block whose attention cannot be seen is an
    error, or a record that says so where ``strict`` is False.
    """

    def __init__(self, found: list[Block], images: int = 16, *, strict: bool = True) -> None:
        if all(no_attention(block) for block in found):
            reasons = dict.fromkeys(
                f"{type(block.module).__name__}: {no_attention(block)}" for block in found
            )
            raise NoMeaningError(
                f"expected a block with attention over tokens, got none ({'; '.join(reasons)}); "
                "density is a property of attention.",
                tuple(dict.fromkeys(map(no_attention, found))),
            )
        self.found, self.images, self.strict = found, images, strict
        self._seen: dict[int, list[_Density]] = {block.index: [] for block in found}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with watching_attention(self.found, self._see, self.images, strict=self.strict) as self._watch:
            yield

    def _see(self, block: Block, p: Tensor) -> None:
        source = self._watch.source
        attentions = self._seen[block.index]
        if source.order == len(attentions):
            attentions.append(_Density(source))
        attentions[source.order].add(p, *self._watch.rows)

    def records(self) -> list[Record]:
        return [record for block in self.found for record in self._records_of(block)]

    def _records_of(self, block: Block) -> Iterator[Record]:
        attentions = self._seen[block.index]
        if not attentions:
            silent = "it showed no softmax attention" if block.index in self._watch.silent else ""
            reason = no_attention(block) or silent or "the model did not run it"
            yield not_measured("entropy", reason, **place_of(block, "attention"))
        for order, density in enumerate(attentions):
            yield from density.records(**place_of(block, f"attention {order + 1}" if order else "attention"))


@dataclass
class _Density:
    """What was measured on one attention of a block."""

    source: Source
    parts: list[Tensor] = field(default_factory=list)  # (measures, images, H) each
    windows: set[int] = field(default_factory=set)
    keys: set[int] = field(default_factory=set)
    skips_rows: bool = False
    is_padded: bool = False
    unknown: str = ""

    def add(self, p: Tensor, keys: Tensor | None, padding: Tensor | str | None) -> None:
        """Measure probabilities (images, W, H, N, M) of rows that may see so many keys."""
        if isinstance(padding, str):
            self.unknown, padding = padding, None
        if keys is not None:
            keys = keys.expand(p.shape[:-1])
            keys = None if bool((keys == p.shape[-1]).all()) else keys
        counts = torch.ones_like(p[..., 0], dtype=torch.bool)
        if padding is not None:
            counts = counts & ~padding[:, None, None, :]
            self.is_padded = True
        if keys is not None:
            sees_one = keys < 2
            self.skips_rows |= bool((sees_one & counts).any())
            counts = counts & ~sees_one
            self.keys |= set(keys[counts].tolist())
        else:
            self.keys.add(p.shape[-1])
        self.parts.append(_measured(p, keys, None if bool(counts.all()) else counts))
        self.windows.add(p.shape[1])

    def records(self, **where: Any) -> Iterator[Record]:
        values = torch.cat(self.parts, dim=1).cpu()
        if self.unknown or not self.keys - {1}:
            reason = self.unknown or "one key: its weight is 1 whatever the query is"
            yield not_measured("entropy", reason, images=values.shape[1], **where)
            return
        where["note"] = f"{span(self.keys)} keys"
        if self.windows != {1}:
            what = "windows" if self.source.tells_heads else "windows and heads, which lie on one axis"
            where["note"] += f", {span(self.windows)} {what}"
        if self.is_padded:
            where["note"] += ", without padding"
        if self.skips_rows:
            where["note"] += "; rows that see one key are skipped"
        where |= {"estimator": self.source.estimator, "dtype": dtype_name(self.source.dtype)}
        for measure, of_heads in zip(MEASURES, values, strict=True):
            yield self._record(measure, of_heads.mean(-1), **where)
            if measure in _FOR_EACH_HEAD and self.source.tells_heads:
                for head, of_head in enumerate(of_heads.unbind(-1)):
                    yield self._record(measure, of_head, head=head, **where)

    def _record(self, measure: str, values: Tensor, **where: Any) -> Record:
        record = summarize(measure, Sample(values), **where)
        # Half precision rounds q and k, and what that does to attention is not known.
        if record.value and self.source.dtype in (torch.float32, torch.float64):
            return replace(record, tolerance=ABSOLUTE_ERROR / record.value)
        return record


def _measured(p: Tensor, keys: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
    """(measures, images, H): the means over windows and queries of (images, W, H, N, M) that count."""
    at_once = max(1, (_AT_ONCE_ON_CPU if p.device.type == "cpu" else _AT_ONCE) // p.shape[-1])
    parts = torch.split(p.flatten(0, -2), at_once)
    seen = [None] * len(parts) if keys is None else torch.split(keys.flatten(), at_once)
    measured = [
        torch.stack([measure(wide, few) for measure in MEASURES.values()])
        for wide, few in zip((rows.double() for rows in parts), seen, strict=True)
    ]
    rows = torch.cat(measured, dim=-1).reshape(len(MEASURES), *p.shape[:-1])
    if counts is None:
        return rows.mean(dim=(2, 4))
    return torch.where(counts, rows, 0).sum(dim=(2, 4)) / counts.sum(dim=(1, 3))


def attention_density(
    model: nn.Module,
    images: object,
    *,
    attention_images: int = 16,
    batch_size: int = 16,
    blocks: BlockSelection = None,
) -> list[Record]:
    """Density of a model's attention on images; see :class:`DensityProbe`.

    Args:
        model: a model that :func:`wellposed.anatomy.blocks` knows; left as it was.
        images: see :func:`wellposed.probes.images.image_batches`.
        attention_images: from how many images, the first ones.
        batch_size: images in a forward pass.
        blocks: an index, a slice or several indices; all of these must have attention over tokens.

    Returns:
        ``"entropy"``, ``"distance from uniform"`` and two norms of the softmax's Jacobian for each block, the
        first two for each head as well.

    >>> import timm, torch
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    >>> [(r.measure, r.head) for r in attention_density(model, torch.randn(2, 3, 32, 32))][:3]
    [('entropy', None), ('entropy', 0), ('entropy', 1)]
    """
    model = plain(model)
    chosen = choose(model, blocks, lambda block: no_attention(block) or block, "attention density")
    named = None if blocks is None else {block.index for block, _ in chosen}

    def make_probes(found: list[Block]) -> list[Probe]:
        wanted = [block for block in found if named is None or block.index in named]
        return [DensityProbe(wanted, attention_images)]

    batches = image_batches(images, model, batch_size=batch_size, limit=attention_images)
    return forward_passes(model, batches, make_probes)
