"""Which channels of a module's output make the queries of which head, read off gradients.

A number of the output reaches a query if the query's gradient there is not zero. Heads are made of the same
tokens and of channels that are apart; windows and images of a batch are made of tokens that are apart.
"""

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.anatomy.cores import Core

INSTEAD = 'broadcast_context(model, "attention.end") mixes in the mean of all tokens instead'
TALKING = f"its heads are mixed before the softmax, so that none has logits of its own; {INSTEAD}"
UNSEEN = (
    "its query is made by a call that no module sees, and whether a relative position bias is on the logits "
    f"cannot be tried; {INSTEAD}"
)
HIDDEN = 1e30
"""What masks put on logits is below minus this."""

_MOST = 1024  # heads and windows that are told apart


@dataclass(frozen=True)
class HeadChannels:
    """Which indices of one axis belong to a head: ``width`` of them from ``start + head * step``.

    Without a step the heads share the whole axis evenly, in their order.
    """

    heads: int
    axis: int = -1
    start: int = 0
    step: int | None = None
    width: int | None = None

    def of(self, chosen: Iterable[int], size: int) -> list[tuple[int, int]]:
        """The (first, behind the last) index of each head, on an axis of that size."""
        step = size // self.heads if self.step is None else self.step
        width = step if self.width is None else self.width
        return [(self.start + head * step, self.start + head * step + width) for head in chosen]

    def zeroed(self, x: Tensor, heads: Iterable[int]) -> Tensor:
        """X with zeros in the channels of some heads."""
        index = torch.arange(x.shape[self.axis], device=x.device)
        cut = index < 0
        for first, end in self.of(heads, x.shape[self.axis]):
            cut = cut | ((index >= first) & (index < end))
        behind = x.ndim - 1 - self.axis % x.ndim
        # Filled, not multiplied by zero: that would keep an infinity. The gradient is zero, not missing.
        return x.masked_fill(cut.reshape(-1, *[1] * behind), 0)


@dataclass(frozen=True)
class Heads:
    """Where the heads of a candidate are, and for each the indices on the axis of the probabilities."""

    channels: HeadChannels
    axis: int | None  # of the probabilities; None where there is one head
    indices: tuple[tuple[int, ...], ...]


class Reach:
    """What a module's output reaches: the queries of which head, and keys and values.

    Args:
        core: the attention.
        result: the module's output.
        given: what the block was given. It tells heads, which are made of the same tokens, from windows.
    """

    def __init__(self, core: Core, result: Tensor, given: list[Tensor]) -> None:
        self.core, self.result, self.given = core, result, given
        self.others = self._others()

    def heads(self) -> Heads | str:
        """How the heads lie in the output, if it holds the query; else why it does not."""
        leading = self.core.p.ndim - 2
        is_mixed = False
        for axis in sorted(range(leading), key=lambda a: (a != leading - 1, a)):
            count = self.core.p.shape[axis]
            if not 1 < count <= _MOST:
                continue
            reached = [self._queries(axis, index) for index in range(count)]
            masks = [masks[0] for masks in reached]
            if not all(bool(mask.any()) for mask in masks):
                return UNSEEN
            for along in (self.result.ndim - 1, *range(self.result.ndim - 1)):
                groups = _groups(masks, along)
                if self._are_of_the_same_tokens(groups, reached):
                    found = self._channels(masks, groups, along)
                    if found is not None:
                        return Heads(found, axis, tuple(map(tuple, groups)))
            is_mixed |= self._is_query_alone(masks)
        one = self._one_head()
        return one or (TALKING if is_mixed else UNSEEN)

    def _channels(self, masks: list[Tensor], groups: list[list[int]], along: int) -> HeadChannels | None:
        """The channels of each group, if they are apart from each other and from keys and values."""
        sets = [_indices(masks[group[0]], along) for group in groups]
        counts = torch.stack(sets).sum(0)
        if len(groups) < 2 or bool(counts.max() > 1) or self._touches_others(counts > 0, along):
            return None
        runs = [_run(used) for used in sets]
        steps = {b[0] - a[0] for a, b in itertools.pairwise(runs)}
        widths = {width for _, width in runs}
        if len(steps) > 1 or len(widths) > 1 or min(steps) <= 0 or min(widths) <= 0:
            return None
        return HeadChannels(len(groups), self._named(along), runs[0][0], steps.pop(), widths.pop())

    def _are_of_the_same_tokens(self, groups: list[list[int]], reached: list[list[Tensor]]) -> bool:
        for number in range(1, len(self.given) + 1):
            sources = [
                functools.reduce(torch.logical_or, (reached[index][number] for index in group))
                for group in groups
            ]
            for along in range(sources[0].ndim):
                used = [_indices(source, along) for source in sources]
                if not all(torch.equal(used[0], one) for one in used):
                    return False
        return True

    def _is_query_alone(self, masks: list[Tensor]) -> bool:
        """Whether all heads are made of the same channels, which keys and values are not made of."""
        used = _indices(functools.reduce(torch.logical_or, masks), self.result.ndim - 1)
        return not self._touches_others(used, self.result.ndim - 1)

    def _one_head(self) -> Heads | None:
        """The channels of attention with a single head."""
        shape = self.core.p.shape
        if shape[0] != 1 if len(shape) == 3 else 1 not in shape[1:-2]:
            return None
        mask = self._queries(None, 0)[0]
        for along in (self.result.ndim - 1, 1):
            used = _indices(mask, along)
            first, width = _run(used)
            if width and not self._touches_others(used, along):
                channels = HeadChannels(1, self._named(along), first, width, width)
                return Heads(channels, None, ((0,),))
        return None

    def _queries(self, axis: int | None, index: int) -> list[Tensor]:
        """Which numbers of the output, and of what the block was given, reach queries at an index."""
        made_of = [self.result, *self.given]
        if self.core.query is not None:
            query = self.core.query if axis is None else self.core.query.select(axis, index)
            return _reaching(query, made_of)
        one, other = self._two_rows(axis, index)
        pairs = zip(_reaching(one, made_of), _reaching(other, made_of), strict=True)
        # Keys reach both rows. In causal attention the second one sees all keys of the first.
        return [a & ~b for a, b in pairs]

    def _two_rows(self, axis: int | None, index: int) -> tuple[Tensor, Tensor]:
        assert self.core.logits is not None
        logits = self.core.logits if axis is None else self.core.logits.select(axis, index)
        logits = logits.reshape(-1, *logits.shape[-2:])[0]
        return logits[-2], logits[-1]

    def _others(self) -> Tensor:
        """Which numbers of the output reach keys or values."""
        reached = torch.zeros_like(self.result, dtype=torch.bool)
        for made in (self.core.key, self.core.value):
            if made is not None:
                reached |= _reaching(made, [self.result])[0]
        if self.core.logits is not None:
            for axis in range(self.core.logits.ndim - 2):
                for index in range(min(self.core.logits.shape[axis], _MOST)):
                    one, other = (_reaching(x, [self.result])[0] for x in self._two_rows(axis, index))
                    reached |= one & other
        return reached

    def _touches_others(self, used: Tensor, along: int) -> bool:
        return bool((used & _indices(self.others, along)).any())

    def _named(self, along: int) -> int:
        return -1 if along == self.result.ndim - 1 else along


def _reaching(made: Tensor, of: list[Tensor]) -> list[Tensor]:
    """Which numbers of some tensors another one was made of."""
    if not made.requires_grad:
        return [torch.zeros_like(x, dtype=torch.bool) for x in of]
    finite = made.isfinite() & (made.abs() < HIDDEN)
    weights = torch.linspace(0.5, 1.5, made.numel(), device=made.device, dtype=made.dtype).reshape(made.shape)
    gradients = torch.autograd.grad(
        torch.where(finite, made, 0), of, weights, retain_graph=True, allow_unused=True
    )
    return [
        torch.zeros_like(x, dtype=torch.bool) if gradient is None else gradient != 0
        for x, gradient in zip(of, gradients, strict=True)
    ]


def _indices(mask: Tensor, along: int) -> Tensor:
    """At which indices of an axis a mask is set anywhere."""
    return mask.movedim(along, 0).flatten(1).any(1) if mask.ndim > 1 else mask


def _run(used: Tensor) -> tuple[int, int]:
    """The first index and the number of those set; none where they have gaps."""
    indices = used.nonzero().flatten().tolist()
    is_run = bool(indices) and indices[-1] - indices[0] + 1 == len(indices)
    return (indices[0], len(indices)) if is_run else (0, 0)


def _groups(masks: list[Tensor], along: int) -> list[list[int]]:
    """The indices whose masks are set at the same places of an axis."""
    groups: dict[tuple[bool, ...], list[int]] = {}
    for index, mask in enumerate(masks):
        groups.setdefault(tuple(_indices(mask, along).tolist()), []).append(index)
    return list(groups.values())
