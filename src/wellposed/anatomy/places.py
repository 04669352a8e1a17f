"""Where operations go in, read off a trace: the places in a block, and where a model makes its tokens.

The tokens are what comes out of the largest module around the first convolution (or linear layer) that does
nothing else: it holds no block, and adds no positions and puts no class token in front.
"""

import math
from typing import Literal

from torch import nn

from wellposed.anatomy.flow import FUSED, JOINED, Flow, Residual
from wellposed.anatomy.subclass import inner, is_adapted, unmarked_class
from wellposed.anatomy.table import EmbeddingRow, Layout, Role, Tap, Taps, after, before, no_taps
from wellposed.anatomy.trace import ADDS, Call, Op, is_linear_layer

ONE_TOKEN = "it updates the class token alone, and the mean of one token is that token"
IN_PIECES = (
    "it sees each image in pieces, as if these were images, so that no operation there would reach all "
    "tokens of one image"
)
OVER_CHANNELS = "its attention is over channels, not tokens"
_NO_ATTENTION = "it mixes tokens without attention"
_NOT_WHOLE = "its FFN sees parts of the image, and no module there sees all tokens"


def family_of(block: nn.Module) -> str:
    """The library, and where in it the class is: ``timm vision_transformer.Block``."""
    cls = unmarked_class(block)
    library, _, module = cls.__module__.partition(".")
    place = module.rpartition(".")[2].removeprefix("modeling_")
    return f"{library} {place}.{cls.__name__}" if place else f"{library} {cls.__name__}"


def layout_of(shape: tuple[int, ...], last: dict[int, bool], batch: int) -> tuple[Layout, str]:
    """The layout of a stream, and why its tokens are not those of whole images, if they are not."""
    if len(shape) == 3 and shape[0] != batch and shape[1] == batch:
        return "LNC", ""
    if shape[0] != batch:
        return "NLC", IN_PIECES
    if len(shape) == 3:
        return (
            "NLC",
            ""
            if last.get(3, True)
            else "its channels lie before its tokens (B, C, N), a layout that is not known",
        )
    return ("NHWC" if last.get(len(shape), last.get(3, True)) else "NCHW"), ""


def tokens_in(shape: tuple[int, ...], layout: Layout) -> int:
    match layout:
        case "LNC":
            return shape[0]
        case "NCHW":
            return math.prod(shape[2:])
        case _:
            return math.prod(shape[1:-1])


class Places:
    """Where operations go in, read off the calls inside the branches of one block."""

    def __init__(
        self,
        flow: Flow,
        call: Call,
        residuals: list[Residual],
        roles: list[Role],
        layout: Layout,
        last: dict[int, bool],
        batch: int,
    ) -> None:
        self.flow, self.call, self.residuals, self.roles = flow, call, residuals, roles
        self.layout, self.last, self.batch = layout, last, batch
        self.block = call.module
        self.paths = {id(module): path for path, module in self.block.named_modules()}
        self.calls = [c for c in flow.trace.calls if c is not call and c.within(call)]
        self.axes = flow.channel_axes(residuals, last)
        self.tokens = self._tokens_of(residuals[0])
        ran = [id(call.module) for call in self.calls]
        self.twice = {one for one in ran if ran.count(one) > 1}
        self.attention_ends: list[Tap] = []

    def taps(self) -> Taps:
        attention = self._of("attention", "parallel")
        ffn = self._of("ffn", "parallel")
        if attention is None and ffn is None:
            return (
                ("block.start", before("")),
                *no_taps("it mixes tokens by convolution and has no MLP")[1:],
            )
        start, middle, end = self._mlp(ffn) if ffn else ("it has no FFN",) * 3
        return (
            ("block.start", before("")),
            ("attention.end", self._attention_end(attention) if attention else _NO_ATTENTION),
            ("mlp.start", start),
            ("mlp.middle", middle),
            ("mlp.end", end),
        )

    def no_token_attention(self) -> str:
        """Why the attention has no rows over tokens; empty where it has, or where there is none."""
        residual = self._of("attention", "parallel")
        if residual is None:
            return ""
        core = self.flow.core(residual)
        product = next(op for op in core if op.name != "softmax")
        if product.name == "multi_head_attention_forward":
            return ""
        query = self.flow.shape(product.inputs[0])
        if query[-1] == self.tokens and (
            query[-2] != self.tokens or self.flow.ends_with_tokens(product.inputs[0])
        ):
            return OVER_CHANNELS
        fused = any(op.name in FUSED for op in core)
        if not fused and not any(op.name == "softmax" for op in core):
            return "its attention has no softmax, so no weights that sum to one"
        return ""

    def updates_one_token(self) -> bool:
        """Whether one token alone attends, as the class token does in class attention."""
        if self.tokens == 1:
            return True
        residual = self._of("attention")
        if residual is None:
            return False
        shapes = [self.flow.shape(op.outputs[0]) for op in self.flow.core(residual) if op.name != "softmax"]
        return bool(shapes) and shapes[-1][-2] == 1 and self._mlp_tokens() == 1

    def _tokens_of(self, residual: Residual) -> int:
        skip = self.flow.shape(residual.skip)
        return tokens_in(skip, layout_of(skip, self.last, self.batch)[0])

    def _mlp_tokens(self) -> int:
        """How many tokens the last layer of the FFN sees."""
        residual = self._of("ffn")
        weighted = self.flow.weighted(residual) if residual else []
        shape = self.flow.shape(weighted[-1].inputs[0]) if weighted else ()
        return shape[-2] if len(shape) == 3 else 0

    def _of(self, *roles: Role) -> Residual | None:
        pairs = zip(self.residuals, self.roles, strict=True)
        return next((residual for residual, role in pairs if role in roles), None)

    def _along(self, residual: Residual) -> list[Call]:
        """The outermost calls inside a branch, in order."""
        maker = self.flow.trace.values[residual.start].maker
        begin = max(self.call.begin, 0 if maker is None else maker + 1)
        end = residual.op.index
        numbers = {op.index for op in residual.path}

        def is_inside(call: Call) -> bool:
            return begin <= call.begin and call.end <= end

        def leads(call: Call) -> bool:
            made = any(value in residual.inside for value in call.results)
            return made and (
                any(call.holds(n) for n in numbers)
                or any(value in residual.inside for _, value in call.arguments)
            )

        return [
            call
            for call in self.calls
            if is_inside(call) and leads(call) and not (call.parent is not None and is_inside(call.parent))
        ]

    def _attention_end(self, residual: Residual) -> Tap | str:
        core = {op.index for op in self.flow.core(residual)}
        weighted = {op.index for op in self.flow.weighted(residual)}
        calls = self._along(residual)
        first = next((i for i, c in enumerate(calls) if any(c.holds(n) for n in core)), None)
        if first is None:
            later = [i for i, c in enumerate(calls) if c.begin > max(core)]
            projections = [i for i in later if any(calls[i].holds(n) for n in weighted)]
            if not projections:
                return "its attention is computed in its own forward, by no module after which it ends"
            first = projections[0]
        elif not any(n > max(core) for n in weighted if calls[first].holds(n)):
            # Attention without its output projection, which comes in a later module.
            later = [i for i in range(first + 1, len(calls)) if any(calls[i].holds(n) for n in weighted)]
            first = later[0] if later else first
        innermost = self.flow.trace.innermost
        taps = [self._tap("after", innermost(calls[first], -1), residual)]
        taps += [self._tap("before", innermost(call, 0), residual) for call in calls[first + 1 :]]
        self.attention_ends = [tap for tap in taps if tap]
        if self.attention_ends:
            return self.attention_ends[0]
        return "its attention sees parts of the image, and no module sees its result put together again"

    def _mlp(self, residual: Residual) -> tuple[Tap | str, Tap | str, Tap | str]:
        weighted = self.flow.weighted(residual)
        if "parallel" in self.roles:
            core = self.flow.core(residual)
            attending = [c for c in self._along(residual) if any(c.holds(op.index) for op in core)]
            weighted = [op for op in weighted if not any(c.holds(op.index) for c in attending)]
        calls = [c for c in self._along(residual) if any(c.holds(op.index) for op in weighted)]
        if not calls or not weighted:
            why = "its FFN is computed in its own forward, by no module"
            return why, why, why
        first = self.flow.trace.innermost(calls[0], 0)
        final = self.flow.trace.innermost(calls[-1], -1)
        start = self._tap("before", first, residual) or _NOT_WHOLE
        end = self._tap("after", final, residual) or _NOT_WHOLE
        return start, self._middle(weighted[-1], residual), end

    def _middle(self, last: Op, residual: Residual) -> Tap | str:
        call = last.call
        while call is not None and call.parent is not None and _is_of_adapter(call):
            call = call.parent
        layer = None if call is None else inner(call.module)
        weight = getattr(layer, "weight", None)
        if call is None or layer is None or not (isinstance(weight, nn.Parameter) or is_linear_layer(layer)):
            return "its last product with weights is no module of its own"
        return self._tap("before", call, residual) or _NOT_WHOLE

    def _is_whole(self, value: int, residual: Residual) -> bool:
        """Whether a tensor holds the tokens of whole images, and all of those that the skip holds."""
        shape = self.flow.shape(value)
        if len(shape) < 3 or len(shape) > 5:
            return False
        layout = self._layout_of(value)
        return (
            layout is not None
            and shape[1 if layout == "LNC" else 0] == self.batch
            and tokens_in(shape, layout) == self._tokens_of(residual)
        )

    def _layout_of(self, value: int) -> Layout | None:
        shape, axis = self.flow.shape(value), self.axes.get(value)
        if len(shape) == 3:
            return None if axis == 1 else "LNC" if self.layout == "LNC" else "NLC"
        if axis is None:
            return self.layout if self.layout in ("NHWC", "NCHW") else "NHWC"
        return "NHWC" if axis == len(shape) - 1 else "NCHW"

    def _tap(self, side: Literal["before", "after"], call: Call, residual: Residual) -> Tap | None:
        """A tap at a module of the block that runs once in it and sees whole images there."""
        path = self.paths.get(id(call.module))
        values = [value for _, value in call.arguments] if side == "before" else list(call.results)
        if not path or id(call.module) in self.twice or not values or not self._is_whole(values[0], residual):
            return None
        layout = self._layout_of(values[0])
        return Tap(side, (path,), None if layout == self.layout else layout)


def _is_of_adapter(call: Call) -> bool:
    """Whether a module runs inside a layer that peft has adapted."""
    parent = call.parent
    return parent is not None and any(is_adapted(one.module) for one in (parent, parent.parent) if one)


_NO_CONVOLUTION = "it makes tokens without a convolution over the pixels"
_OF_FRAMES = "its patches are of several frames, and graying of pixels is of single images"


def find_embeddings(
    model: nn.Module, flow: Flow, blocks: set[int], batch: int = 1
) -> tuple[EmbeddingRow, ...]:
    """The rows of a traced model's embeddings, with paths from the model: one for each stream.

    None at all where one of several cannot be told: an operation on some of them would be half done.

    Args:
        blocks: the ids of the modules that are blocks.
    """
    begin = min((call.begin for call in flow.trace.calls if id(call.module) in blocks), default=0)
    works = [op for op in _first_works(flow) if op.index < begin]
    streams = works[:1] + [op for op in works[1:] if flow.is_convolution(op)]
    rows = [_row(model, flow, first, blocks, batch) for first in streams]
    known = [row for row in rows if row is not None]
    return tuple(known) if len(known) == len(rows) else ()


def _row(model: nn.Module, flow: Flow, first: Op, blocks: set[int], batch: int) -> EmbeddingRow | None:
    call = _around(flow, first, blocks)
    if call is None or first.call is None:
        return None
    paths = {id(module): path for path, module in model.named_modules()}
    inner = flow.trace.innermost(call, -1)
    layout = _layout_of_tokens(flow, first, call.results[0], batch)
    if layout is None or not paths.get(id(inner.module)):
        return None
    convolution = paths[id(first.call.module)] if isinstance(first.call.module, nn.Conv2d) else None
    no_pixels = _OF_FRAMES if isinstance(first.call.module, nn.Conv3d) else _NO_CONVOLUTION
    return EmbeddingRow(
        family=family_of(model),
        tokens=after(paths[id(inner.module)]),
        patch_convolution=convolution,
        no_pixels="" if convolution else no_pixels,
        layout=layout,
    )


def _first_works(flow: Flow) -> list[Op]:
    """The first products with weights that act on the model's floating input."""
    trace = flow.trace
    given = [v for _, v in trace.calls[0].arguments if trace.values[v].floating] if trace.calls else []
    reached = {flow.root[value] for value in given[:1]}
    works = []
    for op in trace.ops:
        if any(value in reached or flow.root[value] in reached for value in op.inputs):
            if flow.is_convolution(op) or flow.is_linear(op):
                works.append(op)
            else:
                reached.update(op.outputs)
    return works


def _around(flow: Flow, first: Op, blocks: set[int]) -> Call | None:
    """The largest call around the first work that does nothing but embed."""
    best: Call | None = None
    call = first.call
    while call is not None and call.parent is not None and _embeds_alone(flow, call, first, blocks):
        best, call = call, call.parent
    return best


def _embeds_alone(flow: Flow, call: Call, first: Op, blocks: set[int]) -> bool:
    if len(call.results) < 1 or id(call.module) in blocks:
        return False
    if any(id(other.module) in blocks and other.within(call) for other in flow.trace.calls):
        return False
    reached = set(first.outputs)
    for op in flow.trace.ops[first.index + 1 : call.end]:
        if any(value in reached for value in op.inputs):
            if op.name in ADDS or op.name in JOINED:
                return False
            reached.update(op.outputs)
    return call.results[0] in reached


def _layout_of_tokens(flow: Flow, first: Op, result: int, batch: int) -> Layout | None:
    """Of the tokens: the axis of the channels is followed from the first work on."""
    shape = flow.shape(result)
    if shape[0] != batch or len(shape) not in (3, 4, 5):
        return None
    start = first.outputs[0]
    axes = {start: 1 if flow.is_convolution(first) else len(flow.shape(start)) - 1}
    maker = flow.trace.values[result].maker or 0
    flow.follow(axes, flow.trace.ops[first.index + 1 : maker + 1])
    axis = axes.get(result)
    if axis is None or (len(shape) == 3 and axis != 2):
        return None
    if len(shape) == 3:
        return "NLC"
    return "NCHW" if axis == 1 else "NHWC"
