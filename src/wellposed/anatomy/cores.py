"""The attentions of a block while it runs, and which channels of its modules make which head's queries.

An attention is a softmax, what it is of and what its weights multiply. Fused attention hides its softmax in a
kernel; there the queries and keys that go in stand for it.

A number of a module's output reaches a query if the query's gradient there is not zero. Heads are made of the
same tokens and of channels that are apart; windows and images of a batch are made of tokens that are apart.
"""

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.anatomy.flow import PRODUCTS, VIEWS
from wellposed.anatomy.masks import FUSED, MULTI_HEAD
from wellposed.anatomy.trace import Call, Op, Trace
from wellposed.linalg.precision import full_float32, without_autocast

HIDDEN = 1e4
"""What masks put on logits is below minus this, in half precision too; nothing else is."""

_LARGEST = 2**24  # probabilities that are looked at; of larger attentions some rows


def attention_probabilities(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q k^T scale + mask), with the arguments of ``scaled_dot_product_attention``.

    As there, the row of a query that may look at nothing is zero.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    with without_autocast(query), full_float32():
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores: Tensor = (at_least_float32(query) * scale) @ at_least_float32(key).mT
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is None:
            return scores.softmax(-1)
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
        sees_nothing = (scores == -math.inf).all(-1, keepdim=True)
        return scores.softmax(-1).masked_fill(sees_nothing, 0.0)


def at_least_float32(x: Any) -> Any:
    """Half precision as float32; everything else as it is."""
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16) else x


def _only_hidden(mask: Tensor | None) -> Tensor | None:
    """A mask without what it adds to the logits of keys that it does not hide."""
    return mask > -HIDDEN if mask is not None and mask.is_floating_point() else mask


def _floating(mask: Tensor | None) -> Tensor | None:
    return mask if mask is not None and mask.is_floating_point() else None


@dataclass
class Core:
    """One attention: of ``query`` and ``key`` if fused, else of the ``logits`` of its softmax.

    Args:
        p: its probabilities (..., N, M), of some rows where there are very many.
        sees: which of these no mask hides, in the same shape.
        met: the number of the operation in which queries and keys met.
        call: in which they did.
    """

    p: Tensor
    sees: Tensor
    met: int
    call: Call | None
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    logits: Tensor | None = None
    is_packed: bool = False
    is_mixed: bool = False
    bias: Tensor | None = None  # of floating point, on the logits of fused attention

    def is_within(self, module: nn.Module) -> bool:
        """Whether a module was at work."""
        call = self.call
        while call is not None and call.module is not module:
            call = call.parent
        return call is not None


def cores(trace: Trace) -> list[Core]:
    """The attentions of a run."""
    found: list[Core] = []
    open_cores: list[Core] = []
    of_weights: dict[int, Core] = {}  # by the id of what was made of its probabilities
    met = 0
    for op in trace.ops:
        given = [trace.values[value].tensor for value in op.inputs]
        made = [trace.values[value].tensor for value in op.outputs]
        core = next((of_weights[id(x)] for x in given if id(x) in of_weights), None)
        if op.name == "multi_head_attention_forward":
            found.append(_packed(op))
        elif op.name == "scaled_dot_product_attention":
            found.append(_fused(op))
        elif op.name == "softmax":
            if (core := _softmax(op, made[0], met)) is not None:
                open_cores.append(core)
                of_weights[id(made[0])] = core
        elif op.name in PRODUCTS and core is None:
            met = met if any(isinstance(x, nn.Parameter) for x in given) else op.index
        elif op.name in PRODUCTS and core is not None:  # the one that its weights weigh
            others = [x for x in given if id(x) not in of_weights]
            core.value = core.value if core.value is not None or not others else others[0]
        elif core is not None and op.name in VIEWS | {"linear", "__mul__", "mul"}:
            core.is_mixed |= op.name == "linear"
            of_weights |= dict.fromkeys(map(id, made), core)
    return found + [core for core in open_cores if core.value is not None]


def _packed(op: Op) -> Core:
    args, kwargs = op.given
    call = MULTI_HEAD.bind(*args, **kwargs).arguments
    shape = call["query"].shape[1], call["num_heads"], call["query"].shape[0], call["key"].shape[0]
    nothing = torch.empty(shape, device="meta")
    bias = _floating(call.get("attn_mask"))
    return Core(nothing, nothing, op.index, op.call, is_packed=True, bias=bias)


def _fused(op: Op) -> Core:
    args, kwargs = op.given
    call = FUSED.bind(*args, **kwargs).arguments
    query, key, mask = call["query"], call["key"], call.get("attn_mask")
    causal, gqa = bool(call.get("is_causal")), bool(call.get("enable_gqa"))
    step = max(1, math.ceil(math.prod(query.shape[:-1]) * key.shape[-2] / _LARGEST))
    with torch.no_grad():
        if step > 1 and causal:
            causal = False
            mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril().to(query.device)
        rows = slice(None, None, step)
        few = mask[..., rows, :] if mask is not None and mask.shape[-2] > 1 else mask
        p = attention_probabilities(query[..., rows, :], key, few, causal, call.get("scale"), gqa)
        zeros = torch.zeros_like(query[..., rows, :])  # whose weights are zero for hidden keys alone
        sees = attention_probabilities(zeros, torch.zeros_like(key), _only_hidden(few), causal, None, gqa)
    return Core(p, sees > 0, op.index, op.call, query, key, call["value"], bias=_floating(mask))


def _softmax(op: Op, out: Tensor, met: int) -> Core | None:
    args, kwargs = op.given
    logits: Tensor = args[0] if args else kwargs["input"]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if logits.ndim < 3 or dim not in (-1, logits.ndim - 1):
        return None
    return Core(out.detach(), logits.detach() > -HIDDEN, met, op.call, logits=logits)


INSTEAD = 'broadcast_context(model, "attention.end") mixes in the mean of all tokens instead'
TALKING = f"its heads are mixed before the softmax, so that none has logits of its own; {INSTEAD}"
UNSEEN = (
    "its query is made by a call that no module sees, and whether a relative position bias is on the logits "
    f"cannot be tried; {INSTEAD}"
)
_MOST, _FEW = 128, 32  # heads that are told apart, heads and windows whose keys are looked at

Part = tuple[int, int]
"""A fraction: numerator and denominator."""


@dataclass(frozen=True)
class HeadChannels:
    """Which indices of one axis belong to a head, in parts of that axis, so that they serve every size.

    The heads lie one after another, from ``start`` on, in ``span`` of the axis; of its share of that a head
    has the first ``width``.
    """

    heads: int
    axis: int = -1
    start: Part = (0, 1)
    span: Part = (1, 1)
    width: Part = (1, 1)

    def of(self, chosen: Iterable[int], size: int) -> list[tuple[int, int]]:
        """The (first, behind the last) index of each head, on an axis of that size."""
        start = size * self.start[0] // self.start[1]
        step = size * self.span[0] // (self.span[1] * self.heads)
        width = step * self.width[0] // self.width[1]
        return [(start + head * step, start + head * step + width) for head in chosen]

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
                if len(groups) > 1 and self._are_of_the_same_tokens(groups, reached):
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
        if bool(counts.max() > 1) or self._touches_others(counts > 0, along):
            return None
        runs = [_run(used) for used in sets]
        start, width = runs[0]
        steps = {b[0] - a[0] for a, b in itertools.pairwise(runs)} or {width}
        if len(steps) > 1 or any(run[1] != width for run in runs) or min(*steps, width) <= 0:
            return None
        size, step = self.result.shape[along], steps.pop()
        parts = Fraction(start, size), Fraction(step * len(runs), size), Fraction(width, step)
        axis = -1 if along == self.result.ndim - 1 else along
        return HeadChannels(len(runs), axis, *(part.as_integer_ratio() for part in parts))

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
            if (channels := self._channels([mask], [[0]], along)) is not None:
                return Heads(channels, None, ((0,),))
        return None

    def _queries(self, axis: int | None, index: int) -> list[Tensor]:
        """Which numbers of the output, and of what the block was given, reach queries at an index."""
        made_of = [self.result, *self.given]
        if self.core.query is not None:
            query = self.core.query if axis is None else self.core.query.select(axis, index)
            return reaching(query, made_of)
        one, other = self._two_rows(axis, index)
        pairs = zip(reaching(one, made_of), reaching(other, made_of), strict=True)
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
                reached |= reaching(made, [self.result])[0]
        if self.core.logits is not None:
            for axis in range(self.core.logits.ndim - 2):
                count = self.core.logits.shape[axis]
                # Of many windows some: what is found is proven by a run.
                for index in range(0, count, max(count // _FEW, 1)):
                    one, other = (reaching(x, [self.result])[0] for x in self._two_rows(axis, index))
                    reached |= one & other
        return reached

    def _touches_others(self, used: Tensor, along: int) -> bool:
        return bool((used & _indices(self.others, along)).any())


def reaching(made: Tensor, of: list[Tensor]) -> list[Tensor]:
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
