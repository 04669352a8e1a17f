"""Reading a trace: which adds are residual, and what runs inside their branches.

An add is residual if its branch was computed from its skip::

    out = skip + branch,   branch = f(skip)

and f holds at least one product with weights, an attention or a mixing of tokens. So position embeddings,
biases of attention logits, rotations and polynomials written out by hand are none.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from wellposed.anatomy.masks import READABLE, hidden_by, hides_later
from wellposed.anatomy.trace import ADDS, HIDDEN_ADDS, Call, Op, Trace, is_linear_layer

Kind = Literal["attention", "pointwise", "mixed", "spatial", "parallel", "long"]
"""What a branch does: attends; acts on each token alone; does that with a token mixing in between (a
convolution inside an FFN); mixes tokens without attention; attends and, beside that, acts on each token;
holds whole blocks."""

_TRANSPOSED = frozenset({"transpose", "swapaxes", "swapdims", "mT", "T"})
_RESHAPED = frozenset({"view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"})
_COPIED = frozenset({"contiguous", "clone", "detach", "alias", "dropout"})
_CAST = frozenset({"to", "type", "type_as", "float", "half", "bfloat16", "double"})
VIEWS = _TRANSPOSED | _RESHAPED | _COPIED | _CAST | {"permute", "movedim"}
"""Operations whose result is what they were given, seen in another way."""

_CUT = frozenset({"__getitem__", "getitem", "narrow", "select"})
_SPLIT = frozenset({"split", "chunk", "unbind", "split_with_sizes", "tensor_split"})
_PARTS = _CUT | _SPLIT
JOINED = frozenset({"cat", "concat", "concatenate"})
_LINEAR = frozenset({"linear", "addmm"})
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
PRODUCTS = frozenset(["matmul", "__matmul__", "__rmatmul__", "bmm", "einsum", "baddbmm", "mm", "tensordot"])
FUSED = frozenset({"scaled_dot_product_attention", "flex_attention"})
_ATTENTIONS = FUSED | {"multi_head_attention_forward"}
_MIXERS = frozenset(
    ["avg_pool1d", "avg_pool2d", "max_pool2d", "fft_rfft2", "fft_fft2", "fft_fft", "fft_rfft", "fft_fftn"]
)
_REDUCTIONS = frozenset({"mean", "sum"})
_LAST_NORMS = frozenset({"layer_norm", "rms_norm"})
_CHANNEL_NORMS = frozenset({"batch_norm", "group_norm", "instance_norm"})


@dataclass
class Residual:
    """A residual add: values and operations by their numbers in the trace."""

    op: Op
    skip: int
    branch: int
    out: int
    skip_is_left: bool
    start: int  # the value that the branch was computed from: the skip, seen without reshaping
    path: list[Op] = field(default_factory=list)  # from start to branch, in order
    inside: set[int] = field(default_factory=set)  # the values along it
    kind: Kind = "spatial"


class Flow:
    """A trace with its residual adds."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.root = self._roots()
        self._of_linear_layers = self._last_of_linear_layers()
        self.residuals: list[Residual] = []
        self._of_out: dict[int, Residual] = {}  # by the root of their sum
        for op in trace.ops:
            if op.name in ADDS | HIDDEN_ADDS and (residual := self._residual(op)) is not None:
                self.residuals.append(residual)
                self._of_out[self.root[residual.out]] = residual
        for residual in self.residuals:
            residual.kind = self.kind(residual, self.channels_last([residual]))

    def main(self) -> list[Residual]:
        """The residual adds of the stream: not one inside another's branch, nor one around whole blocks."""
        whole = [residual for residual in self.residuals if residual.kind != "long"]
        inside = {op.index for residual in whole for op in residual.path}
        return [residual for residual in whole if residual.op.index not in inside]

    def shape(self, value: int) -> tuple[int, ...]:
        return self.trace.values[value].shape

    def _roots(self) -> list[int]:
        """Each value without the views, copies and cuts that it went through."""
        roots: list[int] = []
        for number, value in enumerate(self.trace.values):
            maker = None if value.maker is None else self.trace.ops[value.maker]
            passes = maker is not None and (maker.name in VIEWS or maker.name in _PARTS)
            roots.append(roots[maker.inputs[0]] if passes and maker is not None else number)
        return roots

    def _last_of_linear_layers(self) -> set[int]:
        """What gives the results of linear layers: a quantised one has operations of its own."""
        callers = {id(call.parent) for call in self.trace.calls}
        found = set()
        for call in self.trace.calls:
            if call.results and id(call) not in callers and is_linear_layer(call.module):
                maker = self.trace.values[self.root[call.results[0]]].maker
                if maker is not None and call.holds(maker):
                    found.add(maker)
        return found

    def _residual(self, op: Op) -> Residual | None:
        values = self.trace.values
        given = [value for value in op.inputs if values[value].floating and not values[value].learned]
        if len(given) < 2 or (len(given) > 2 and op.name in ADDS):
            return None
        for right in given[1:]:  # several only where an operation adds among other things
            if values[given[0]].shape == values[right].shape and len(values[right].shape) >= 3:
                found = self._sum(op, given[0], right)
                if found is not None:
                    return found
        return None

    def _sum(self, op: Op, left: int, right: int) -> Residual | None:
        """The residual add of two values, in whichever order."""
        for skip, branch, is_left in ((left, right, True), (right, left, False)):
            if self._is_part_of_the_channels(skip):
                continue
            for start in self._starts(skip):
                path, inside = self._between(start, branch, op.index)
                if path and any(self._is_work(one, inside) for one in path):
                    return Residual(op, skip, branch, op.outputs[0], is_left, start, path, inside)
        return self._with_processed_skip(op, left, right)

    def _is_part_of_the_channels(self, value: int) -> bool:
        """Whether a value is some channels of another: heads and scales that feed each other, no stream."""
        shape, whole = self.shape(value), self.shape(self.root[value])
        maker = self.trace.values[value].maker
        is_part = maker is not None and self.trace.ops[maker].name in _PARTS
        return is_part and len(shape) == len(whole) and (len(shape) > 3 or shape[-1] != whole[-1])

    def _with_processed_skip(self, op: Op, left: int, right: int) -> Residual | None:
        """Attention whose skip is projected or pooled on its way, as where a stage changes its width."""
        for _, value in op.call.arguments if op.call else ():
            start = self.root[value]
            arms = [self._between(start, one, op.index) for one in (left, right)]
            if all(
                path or self.root[one] == start for (path, _), one in zip(arms, (left, right), strict=True)
            ):
                attend = [self.attends(path, inside) for path, inside in arms]
                work = [sum(self.is_linear(o) or self.is_convolution(o) for o in path) for path, _ in arms]
                if min(work) > 1:  # two branches side by side
                    continue
                if attend == [False, True]:
                    return Residual(op, left, right, op.outputs[0], True, start, *arms[1])
                if attend == [True, False]:
                    return Residual(op, right, left, op.outputs[0], False, start, *arms[0])
        return None

    def cores(self) -> list[Op]:
        """All operations of the trace by which tokens attend: fused attention, a softmax before a product."""
        found = [op for op in self.trace.ops if op.name in _ATTENTIONS]
        weights = {
            self.root[value]: op for op in self.trace.ops if op.name == "softmax" for value in op.outputs
        }
        for op in self.trace.ops:
            if op.name in PRODUCTS:
                found += [weights[self.root[v]] for v in op.inputs if self.root[v] in weights]
        return found

    def _starts(self, skip: int) -> Iterator[int]:
        """The values that a branch beside this skip may start from: it, and what parallel branches share."""
        start = self.root[skip]
        yield start
        maker = self.trace.values[start].maker
        if maker is not None and self.trace.ops[maker].name == "mul":  # a skip with a learned scale
            given = [v for v in self.trace.ops[maker].inputs if not self._is_learned(v)]
            if len(given) == 1:
                yield self.root[given[0]]
        if maker is not None and self.trace.ops[maker].name in JOINED:  # a class token put back in front
            yield from sorted({self.root[v] for v in self.trace.ops[maker].inputs}, reverse=True)
        while (before := self._of_out.get(start)) is not None:
            start = self.root[before.skip]
            yield start

    def _between(self, start: int, end: int, before: int) -> tuple[list[Op], set[int]]:
        """The operations that lead from one value to another, and the values along the way."""
        maker = self.trace.values[start].maker
        first = 0 if maker is None else maker + 1
        reached: set[int] = {start}
        for op in self.trace.ops[first:before]:
            if any(value in reached or self.root[value] == start for value in op.inputs):
                reached.update(op.outputs)
        if end not in reached or self.root[end] == start:
            return [], set()
        path: list[Op] = []
        wanted = {end}
        for op in reversed(self.trace.ops[first:before]):
            if wanted.isdisjoint(op.outputs):
                continue
            led = [value for value in op.inputs if value in reached or self.root[value] == start]
            if led:
                path.append(op)
                wanted.update(led)
        return path[::-1], wanted | {start}

    def is_linear(self, op: Op) -> bool:
        """Whether it multiplies by weights on the last axis."""
        if op.name in _LINEAR or op.index in self._of_linear_layers:
            return True
        return op.name in PRODUCTS and any(self._is_learned(value) for value in op.inputs)

    def is_convolution(self, op: Op) -> bool:
        return op.name in _CONVOLUTIONS

    def is_dense_convolution(self, op: Op) -> bool:
        """Whether it mixes tokens and channels at once."""
        return self.is_convolution(op) and not self.kernel_is_one(op) and self.shape(op.inputs[1])[1] > 1

    def kernel_is_one(self, op: Op) -> bool:
        return all(size == 1 for size in self.shape(op.inputs[1])[2:])

    def is_product_of_tokens(self, op: Op, inside: set[int]) -> bool:
        """Whether it multiplies what was made of tokens by what was made of tokens."""
        if op.name in _ATTENTIONS:
            return True
        led = [value for value in op.inputs if value in inside]
        return op.name in PRODUCTS and len(led) >= 2 and not self.is_linear(op)

    def attends(self, path: Iterable[Op], inside: set[int]) -> bool:
        names = [op.name for op in path]
        if any(name in _ATTENTIONS for name in names):
            return True
        products = sum(self.is_product_of_tokens(op, inside) for op in path)
        return products >= 2 or (products == 1 and "softmax" in names)

    def leads(self, call: Call, source: int, target: int) -> bool:
        """Whether a value in a call is another one, or what one submodule makes of that."""
        start, end = self.root[source], self.root[target]
        return start == end or any(
            any(self.root[given] == start for _, given in child.arguments)
            and any(self.root[result] == end for result in child.results)
            for child in self.trace.within(call)
        )

    def can_bypass(self, start: int, end: int, attention: Iterable[Op]) -> bool:
        """Whether a value can be reached from another one without passing an attention."""
        closed = {op.index for op in attention}
        reached = {start}
        for op in self.trace.ops:
            if op.index not in closed and any(v in reached or self.root[v] == start for v in op.inputs):
                reached.update(op.outputs)
        return end in reached

    def products(self, begin: int, end: int) -> list[Op]:
        """The products of tokens with tokens among some operations."""
        everything = set(range(len(self.trace.values)))
        return [op for op in self.trace.ops[begin:end] if self.is_product_of_tokens(op, everything)]

    def core(self, residual: Residual) -> list[Op]:
        """The products of tokens with tokens, and the softmax, of an attention."""
        return [
            op
            for op in residual.path
            if op.name == "softmax" or self.is_product_of_tokens(op, residual.inside)
        ]

    def is_causal(self, residual: Residual) -> bool:
        """Whether the attention in a branch hides from each token those that come after it."""
        hidden = [hidden_by(op.name, *op.given) for op in residual.path if op.name in READABLE]
        return any(one is not None and bool(hides_later(one)) for one in hidden)

    def weighted(self, residual: Residual) -> list[Op]:
        """The products with weights inside a branch."""
        return [op for op in residual.path if self.is_linear(op) or self.is_convolution(op)]

    def _is_learned(self, value: int) -> bool:
        values = self.trace.values
        while not values[value].learned:
            maker = values[value].maker
            if maker is None or not self.trace.ops[maker].inputs:
                return False
            inputs = self.trace.ops[maker].inputs
            if len(inputs) > 1 and not all(values[self.root[one]].learned for one in inputs):
                return False
            value = inputs[0]
        return True

    def _is_work(self, op: Op, inside: set[int]) -> bool:
        return (
            self.is_linear(op)
            or self.is_convolution(op)
            or op.name in _MIXERS
            or self.is_product_of_tokens(op, inside)
        )

    def kind(self, residual: Residual, last: dict[int, bool]) -> Kind:
        """What a branch does, once it is known on which axis the channels are."""
        numbers = {op.index for op in residual.path}
        within = [self.attends(r.path, r.inside) for r in self.residuals if r.op.index in numbers]
        if any(within) and not all(within):
            return "long"
        if self.attends(residual.path, residual.inside):
            return "parallel" if self._has_two_arms(residual) else "attention"
        axes = self.channel_axes([residual], last)
        steps = [self._step(op, axes) for op in residual.path]
        first = next((i for i, step in enumerate(steps) if step == "channels"), None)
        spatial = [i for i, step in enumerate(steps) if step == "tokens"]
        if not spatial:
            return "pointwise"
        between = first is not None and all(i > first for i in spatial)
        return "mixed" if between and "channels" in steps[spatial[-1] :] else "spatial"

    def _has_two_arms(self, residual: Residual) -> bool:
        """Whether the branch is itself a sum of an attention and of something that does not attend."""
        maker = self.trace.values[self.root[residual.branch]].maker
        op = None if maker is None else self.trace.ops[maker]
        if op is None or op.name not in ADDS or len(op.inputs) != 2:
            return False
        arms = [self._between(residual.start, value, op.index) for value in op.inputs]
        attend = [self.attends(path, inside) for path, inside in arms]
        work = [any(self.is_linear(one) for one in path) for path, _ in arms]
        return sorted(attend) == [False, True] and all(work)

    def _step(self, op: Op, axes: dict[int, int]) -> str:
        """What an operation acts on, where that matters."""
        value = next((value for value in op.inputs if value in axes), None)
        if op.name in _MIXERS or (op.name in _REDUCTIONS and self._sums_tokens(op, axes)):
            return "tokens"
        if self.is_linear(op):
            return "channels" if value is None or axes[value] == len(self.shape(value)) - 1 else "tokens"
        if self.is_convolution(op):
            along = value is None or axes[value] == 1
            return "channels" if along and self.kernel_is_one(op) else "tokens"
        return ""

    def _sums_tokens(self, op: Op, axes: dict[int, int]) -> bool:
        value = op.inputs[0] if op.inputs else -1
        if value not in axes:
            return False
        args, kwargs = op.given
        given = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if given is None:
            return False
        size = len(self.shape(value))
        dims = [dim % size for dim in (given if isinstance(given, tuple | list) else [given])]
        return axes[value] not in dims and 0 not in dims

    def ends_with_tokens(self, query: int) -> bool:
        """Whether the tokens of a query, once axis 1 of what a linear layer gave, became its last axis."""
        way: list[tuple[Op, int, int]] = []
        value = query
        while (maker := self.trace.values[value].maker) is not None and len(way) < 20:
            op = self.trace.ops[maker]
            if self.is_linear(op):
                break
            way.append((op, op.inputs[0], value))
            value = op.inputs[0]
        else:
            return False
        axis: int | None = 1
        for op, before, after in reversed(way):
            if op.name in ("unbind", "select", "__getitem__") and axis is not None:
                axis -= len(self.shape(before)) - len(self.shape(after))  # the parts of a packed projection
            elif axis is not None:
                axis = self.moved(op, axis, self.shape(before), self.shape(after))
        return axis == len(self.shape(query)) - 1

    def channels_last(self, residuals: Iterable[Residual]) -> dict[int, bool]:
        """Whether the channels lie on the last axis of the skips, by what acts on them; else on axis 1.

        By the number of axes: one stream may be a grid here and a row of tokens there.
        """
        scores: dict[int, int] = {}
        for residual in residuals:
            axes = len(self.shape(residual.skip))
            for last, sign in ((True, 1), (False, -1)):
                followed = self.channel_axes([residual], {axes: last})
                agreement = sum(self._agrees(op, followed) for op in residual.path)
                scores[axes] = scores.get(axes, 0) + sign * agreement
        return {axes: score >= 0 for axes, score in scores.items()}

    def _agrees(self, op: Op, axes: dict[int, int]) -> int:
        value = next((value for value in op.inputs if value in axes), None)
        if value is None:
            return 0
        axis, last = axes[value], len(self.shape(value)) - 1
        if self.is_linear(op) or op.name in _LAST_NORMS:
            return 1 if axis == last else -1
        if self.is_convolution(op) or op.name in _CHANNEL_NORMS:
            return 1 if axis == 1 else -1
        return 0

    def channel_axes(self, residuals: Iterable[Residual], last: dict[int, bool]) -> dict[int, int]:
        """On which axis the channels lie, for the values along the branches, as far as it can be followed.

        Args:
            last: of the skips, see :meth:`channels_last`.
        """
        axes: dict[int, int] = {}
        for residual in residuals:
            for end in (residual.skip, residual.branch, residual.out):
                axes.setdefault(end, self._axis(end, last))
            self._follow(residual, axes, last)
        return axes

    def _axis(self, value: int, last: dict[int, bool]) -> int:
        size = len(self.shape(value))
        return size - 1 if last.get(size, True) else 1

    def _follow(self, residual: Residual, axes: dict[int, int], last: dict[int, bool]) -> None:
        # Where the skip is the start in another shape, the way begins at the skip's own.
        start = residual.start if len(self.shape(residual.start)) in last else residual.skip
        axes.setdefault(start, self._axis(start, last))
        if start != residual.start:
            axes.setdefault(residual.start, self._axis(residual.start, last))
        for op in residual.path:
            seen = next((v for v in op.inputs if v in axes or self.root[v] == residual.start), None)
            if seen is not None:
                axes.setdefault(seen, self._axis(seen, last))
            self.follow(axes, [op])

    def follow(self, axes: dict[int, int], ops: Iterable[Op]) -> None:
        """Add to the known axes of channels those of what some operations make, where they can be told."""
        for op in ops:
            value = next((v for v in op.inputs if v in axes), -1)
            for out in op.outputs if value >= 0 else ():
                axis = self.moved(op, axes[value], self.shape(value), self.shape(out))
                if axis is not None:
                    axes.setdefault(out, axis)

    def moved(self, op: Op, axis: int, before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
        """The axis of the channels after an operation, None where it cannot be told."""
        final = len(before) - 1
        args, kwargs = op.given
        if op.name == "permute":
            dims = kwargs.get("dims", args[1] if len(args) == 2 else args[1:])
            return [dim % len(before) for dim in dims].index(axis)
        if op.name in _TRANSPOSED:
            pair = [dim % len(before) for dim in args[1:]] if len(args) == 3 else [final, final - 1]
            return {pair[0]: pair[1], pair[1]: pair[0]}.get(axis, axis)
        if self.is_linear(op):
            return axis if len(before) == len(after) else None
        if self.is_convolution(op):
            return 1 if axis == 1 else None
        if before == after:
            return axis
        if axis == final and after and after[-1] == before[-1]:
            return len(after) - 1
        if axis == 1 and len(after) > 1 and after[1] == before[1]:
            return 1
        return None
