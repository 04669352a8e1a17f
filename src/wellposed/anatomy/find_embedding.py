"""Finding where a model makes tokens of its input, in a trace of it.

The tokens are what comes out of the largest module around the first convolution (or linear layer) that does
nothing else: it holds no block, and adds no positions and puts no class token in front.
"""

from torch import nn

from wellposed.anatomy.find import Found, family_of
from wellposed.anatomy.flow import Flow
from wellposed.anatomy.rows import EmbeddingRow, Layout, after
from wellposed.anatomy.trace import ADDS, Call, Op

_FRONT = frozenset({"cat", "concat", "concatenate"})
_NO_CONVOLUTION = "it makes tokens without a convolution over the pixels"
_OF_FRAMES = "its patches are of several frames, and graying of pixels is of single images"


def find_embeddings(
    model: nn.Module, flow: Flow, found: list[Found], batch: int = 1
) -> tuple[EmbeddingRow, ...]:
    """The rows of a traced model's embeddings, with paths from the model: one for each stream.

    None at all where one of several cannot be told: an operation on some of them would be half done.
    """
    blocks = {id(block.module) for block in found}
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
    inner = _last_within(flow, call)
    layout = _layout(flow, first, call.results[0], batch)
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
            if op.name in ADDS or op.name in _FRONT:
                return False
            reached.update(op.outputs)
    return call.results[0] in reached


def _last_within(flow: Flow, call: Call) -> Call:
    while isinstance(call.module, nn.Sequential):
        call = [other for other in flow.trace.calls if other.parent is call][-1]
    return call


def _layout(flow: Flow, first: Op, result: int, batch: int) -> Layout | None:
    """Of the tokens: the axis of the channels is followed from the first work on."""
    shape = flow.shape(result)
    if shape[0] != batch or len(shape) not in (3, 4, 5):
        return None
    start = first.outputs[0]
    axes = {start: 1 if flow.is_convolution(first) else len(flow.shape(start)) - 1}
    for op in flow.trace.ops[first.index + 1 :]:
        value = next((v for v in op.inputs if v in axes), None)
        if value is None:
            continue
        for out in op.outputs:
            axis = flow.moved(op, axes[value], flow.shape(value), flow.shape(out))
            if axis is not None:
                axes.setdefault(out, axis)
        if result in axes:
            break
    axis = axes.get(result)
    if axis is None or (len(shape) == 3 and axis != 2):
        return None
    if len(shape) == 3:
        return "NLC"
    return "NCHW" if axis == 1 else "NHWC"
