"""Finding the blocks of any model in a trace of it: their residual joins, and where operations go in.

A block is the module whose methods hold an attention's join and its FFN's, or, where these stand in
submodules (BERT's output layers), the nearest module around both. What a run shows is written as a
:class:`~wellposed.anatomy.table.BlockRow`, the same as one that was taught.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from wellposed.anatomy.flow import Flow, Kind, Residual
from wellposed.anatomy.places import IN_PIECES, ONE_TOKEN, Places, family_of, layout_of
from wellposed.anatomy.source import Method, wrapped_functions
from wellposed.anatomy.subclass import unmarked_class
from wellposed.anatomy.table import (
    Add,
    BlockRow,
    Role,
    Site,
    Tap,
    no_taps,
)
from wellposed.anatomy.trace import Call, is_linear_layer
from wellposed.errors import SeamError


@dataclass(frozen=True)
class Found:
    """A block that a run has shown: its row, or why it cannot be edited.

    Args:
        splitter: of a block that sees images in pieces, the module around it that cuts them.
    """

    name: str
    module: nn.Module
    row: BlockRow
    splitter: nn.Module | None = None


@dataclass
class _Group:
    """The joins of one call of one block, and what was read off them."""

    call: Call
    residuals: list[Residual] = field(default_factory=list)
    row: BlockRow | None = None
    splitter: nn.Module | None = None
    ends: list[Tap] = field(default_factory=list)  # where attention.end could be, the nearest first


def find_blocks(model: nn.Module, flow: Flow, batch: int = 1) -> list[Found]:
    """The blocks of a traced model, in the order of its modules.

    Args:
        flow: of a pass with ``batch`` images.
    """
    main = flow.main()
    attends = any(residual.kind in ("attention", "parallel") for residual in main)
    groups = [group for group in _grouped(flow, main) if _is_of_blocks(flow, group, attends)]
    for group in groups:
        try:
            group.row = _row(flow, group, attends, batch)
        except SeamError as error:
            group.row = refused_row(group.call.module, str(error))
    _share_ends(groups)
    found = []
    for name, module in model.named_modules():
        of_it = [group for group in groups if group.call.module is module]
        rows = [group.row for group in of_it if group.row is not None]
        if rows:
            row = rows[0] if all(one == rows[0] for one in rows) else refused_row(module, _DIFFERENT)
            if set(row.roles) != {"local"}:
                found.append(Found(name, module, row, of_it[-1].splitter))
    return found


def seen_instead(flow: Flow) -> str:
    """What a run without blocks has shown."""
    if flow.residuals:
        owners = {type(_owner_call(residual).module).__name__ for residual in flow.residuals}
        return f"skips in {', '.join(sorted(owners))} around convolutions, none around attention or an MLP"
    owners = {type(op.call.module).__name__ for op in flow.trace.ops if op.spot and op.call}
    if owners:
        return f"adds in {', '.join(sorted(owners))}, none of a tensor and what layers have made of it"
    return "no add of tensors"


def _is_of_blocks(flow: Flow, group: _Group, attends: bool) -> bool:
    """Whether joins are not those of a convolution beside attention, or those of a ConvNet.

    These mix tokens by convolutions that mix channels too.
    """
    if attends:
        return any(residual.kind != "spatial" for residual in group.residuals)
    return any(not any(map(flow.is_dense_convolution, r.path)) for r in group.residuals)


def refused_row(block: nn.Module, reason: str) -> BlockRow:
    """The row of a block that was seen and can be neither edited nor measured."""
    return BlockRow(family_of(block), (), no_taps(reason), refused=reason, no_token_attention=reason)


_DIFFERENT = "its calls differ: not every one of them adds its skips in the same places"


def _owner_call(residual: Residual) -> Call:
    """The call in whose method the add stands; the innermost one where it stands in no module's method."""
    spot, call = residual.op.spot, residual.op.call
    assert call is not None
    while spot is not None and spot.owner is not None and call.module is not spot.owner:
        if call.parent is None:
            break
        call = call.parent
    return call


def _grouped(flow: Flow, main: list[Residual]) -> list[_Group]:
    """Blocks, each with its joins; what belongs to none stays a block of its own."""
    groups: dict[int, _Group] = {}
    for residual in main:
        call = _owner_call(residual)
        groups.setdefault(id(call), _Group(call)).residuals.append(residual)
    blocks = {key: group for key, group in groups.items() if _is_complete(group.residuals)}
    rest = [group for key, group in groups.items() if key not in blocks]
    stages = {  # of which some hold several layers: no blocks, those of one layer neither
        type(call.module) for call in flow.trace.calls if _repeats(_held(call, main))
    }
    for group in rest:
        around = _around(group, main)
        if around is None or type(around.module) in stages:
            continue
        if not any(around.within(block.call) for block in blocks.values()):
            blocks[id(around)] = _Group(around, _held(around, main))
    taken = {id(r) for block in blocks.values() for r in block.residuals}
    for group in rest:
        left = [r for r in group.residuals if id(r) not in taken]
        home = next((b for b in blocks.values() if left and group.call.within(b.call)), None)
        if home is not None:  # a convolution with a skip of its own, inside a block
            if not _is_shared(group.call.module, blocks.values()):
                home.residuals.extend(left)
        elif left:
            blocks[id(group.call)] = _Group(group.call, left)
    for block in blocks.values():
        block.residuals.sort(key=lambda r: r.op.index)
    return list(blocks.values())


def _held(call: Call, main: list[Residual]) -> list[Residual]:
    return [residual for residual in main if call.holds(residual.op.index)]


def _is_shared(module: nn.Module, blocks: Iterable[_Group]) -> bool:
    """Whether several blocks have a module among theirs: a join in it would be one of all of them."""
    homes = {id(b.call.module): b.call.module for b in blocks}.values()
    return sum(any(module is one for one in home.modules()) for home in homes) > 1


def _around(group: _Group, main: list[Residual]) -> Call | None:
    """The nearest call that holds more joins than the group's, if they are those of one block."""
    call: Call | None = group.call
    while call is not None and not isinstance(call.module, nn.Sequential):
        within = _held(call, main)
        if len(within) > len(group.residuals):
            attend = any(residual.kind == "attention" for residual in within)
            return call if attend and _is_complete(within) and not _repeats(within) else None
        call = call.parent
    return None


def _is_complete(residuals: list[Residual]) -> bool:
    there = [residual.kind for residual in residuals]
    attend = there.count("attention")
    return "parallel" in there or 0 < attend < len(there) or (not attend and len(there) > 1)


def _repeats(residuals: list[Residual]) -> bool:
    """Whether some joins are those of several blocks: two of them attend, or two are FFNs."""
    there = [residual.kind for residual in residuals if residual.kind != "spatial"]
    return len(set(there)) < len(there)


def _row(flow: Flow, group: _Group, attends: bool, batch: int) -> BlockRow:
    """The row of a group. Raises SeamError with the reason where it can have none."""
    residuals, module = group.residuals, group.call.module
    last = flow.channels_last(residuals)
    roles = _roles([flow.kind(r, last) for r in residuals], attends)
    adds = _adds(flow, group, roles)
    if any(_is_nested(flow, residual, group) for residual in flow.residuals):
        raise SeamError("the skip around its attention lies inside the branch of another skip of its own")
    if any(_is_beside(flow, *pair) for pair in itertools.pairwise(residuals)):
        raise SeamError(
            "it adds attention and FFN, computed side by side, to its stream one after the other: x + a + f "
            "has no place where the skip alone could be removed. Write it as x + (a + f)"
        )
    _refuse_unseen_work(residuals, roles)
    place, stream = _stream(flow, group)
    layout, pieces = layout_of(flow.shape(stream), last, batch)
    if layout == "LNC" and not _attends_along_the_first_axis(flow, group, flow.shape(stream)[0]):
        layout, pieces = "NLC", IN_PIECES
    reader = Places(flow, group.call, residuals, roles, layout, last, batch)
    if reader.tokens > 1:
        _refuse_unseen_attention(flow, group, stream)
    family = family_of(module)
    taps = no_taps(pieces) if pieces else reader.taps()
    if pieces:
        group.splitter = _splitter(flow, group.call, batch)
    elif reader.updates_one_token():
        taps = no_taps(ONE_TOKEN)
        family += ", class attention"
    else:
        group.ends = reader.attention_ends
        if place != 0:
            taps = (
                ("block.start", f"its tokens are argument {place} of its forward, not the first"),
                *taps[1:],
            )
    return BlockRow(
        family=family,
        adds=adds,
        taps=taps,
        layout=layout,
        stream=place,
        unchained=_unchained(flow, group, roles, stream),
        no_token_attention=reader.no_token_attention(),
        causal=any(flow.is_causal(r) for r, role in zip(residuals, roles, strict=True) if role != "ffn"),
        pieces=bool(pieces),
    )


def _refuse_unseen_work(residuals: list[Residual], roles: list[Role]) -> None:
    """Raise where a branch computes something that no run sees."""
    for residual, role in zip(residuals, roles, strict=True):
        for op in residual.path:
            where = type(op.call.module).__name__ if op.call else "the model"
            of_linear = op.call is not None and is_linear_layer(op.call.module)
            if op.name == "unseen" and role not in ("attention", "parallel") and not of_linear:
                raise SeamError(
                    f"part of what {where} computes in it cannot be seen (compiled or scripted code, a "
                    "kernel of its own): it may be attention"
                )
            if op.name == "flex_attention" and not _is_plain(*op.given):
                raise SeamError(
                    f"the flex_attention of {where} has a mask or scores of its own, of which it cannot be "
                    "seen what they hide"
                )


def _is_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of flex_attention hides nothing and changes no score: its default functions do not."""
    given = [x for x in tree_iter((args, kwargs)) if callable(x) and not isinstance(x, Tensor)]
    return all(getattr(x, "__name__", "") in ("_identity", "noop_mask") for x in given)


def _is_beside(flow: Flow, one: Residual, next_one: Residual) -> bool:
    """Whether the second branch starts where the first one did, before that was added."""
    follows = flow.root[next_one.skip] == flow.root[one.out]
    return follows and next_one.start == flow.root[one.skip]


def _is_nested(flow: Flow, residual: Residual, group: _Group) -> bool:
    """Whether a skip around attention stands in a block's own method, inside another one's branch."""
    if residual in group.residuals or not group.call.holds(residual.op.index):
        return False
    outer = any(op.index == residual.op.index for r in group.residuals for op in r.path)
    return outer and _owner_call(residual) is group.call and flow.attends(residual.path, residual.inside)


def _splitter(flow: Flow, call: Call, batch: int) -> nn.Module:
    """The nearest module around a block that is given whole images."""
    parent = call.parent
    while parent is not None and parent.parent is not None:
        if any(flow.shape(value)[:1] == (batch,) for _, value in parent.arguments):
            break
        parent = parent.parent
    return parent.module if parent is not None else call.module


def _attends_along_the_first_axis(flow: Flow, group: _Group, tokens: int) -> bool:
    """Whether (N, B, D) are N tokens: pieces of one token each have the same shape."""
    products = [op for r in group.residuals for op in flow.core(r) if op.name != "softmax"]
    fused = any(op.name == "multi_head_attention_forward" for op in products)
    return fused or not products or flow.shape(products[0].inputs[0])[-2] == tokens


def _refuse_unseen_attention(flow: Flow, group: _Group, stream: int) -> None:
    """Raise where attention runs in a block outside all branches: its skip would be missed."""
    call = group.call
    inside = {op.index for residual in flow.residuals for op in residual.path}
    products = flow.products(call.begin, call.end)
    for op in flow.cores():
        if not call.holds(op.index) or op.index in inside:
            continue
        earlier = [flow.root[r.out] for r in group.residuals if r.op.index < op.index]
        later = [r.start for r in group.residuals if r.op.index > op.index]
        start = earlier[-1] if earlier else flow.root[stream]
        end = later[0] if later else call.results[0]
        if flow.can_bypass(start, end, products):
            where = type(op.call.module).__name__ if op.call else "the model"
            raise SeamError(f"the attention of {where} in it runs outside all branches whose skip was found")


def _share_ends(groups: list[_Group]) -> None:
    """Give the blocks of one class one place for ``attention.end``, if there is one that serves them all.

    Where one window covers the image, the end of the attention itself would do; in other blocks it would not.
    """
    by_class: dict[type, list[_Group]] = {}
    for group in groups:
        if group.ends:
            by_class.setdefault(type(group.call.module), []).append(group)
    for alike in by_class.values():
        common = [tap for tap in alike[0].ends if all(_at(tap) in map(_at, one.ends) for one in alike)]
        for group in alike if common else ():
            assert group.row is not None
            tap = next(tap for tap in group.ends if _at(tap) == _at(common[0]))
            taps = tuple((at, tap if at == "attention.end" else old) for at, old in group.row.taps)
            group.row = replace(group.row, taps=taps)


def _at(tap: Tap) -> tuple[str, tuple[str, ...]]:
    return tap.side, tap.paths


def _roles(kinds: list[Kind], attends: bool) -> list[Role]:
    has_attention = "attention" in kinds or "parallel" in kinds
    mixes: Role = "local" if attends else "mixer"
    roles: list[Role] = []
    for kind in kinds:
        match kind:
            case "attention" | "parallel":
                roles.append(kind)
            case "pointwise":
                roles.append("ffn")
            case "mixed" if has_attention and "pointwise" not in kinds:
                roles.append("ffn")
            case _:
                roles.append(mixes)
    return roles


def _adds(flow: Flow, group: _Group, roles: list[Role]) -> tuple[Add, ...]:
    """The adds of a block, those in arms that were not taken too."""
    block = group.call.module
    paths = {id(module): path for path, module in block.named_modules()}
    methods: dict[tuple[str, str], tuple[Method, nn.Module]] = {}
    adds: dict[tuple[str, str, int], Add] = {}
    for residual, role in zip(group.residuals, roles, strict=True):
        owner, name = _method(residual)
        if id(owner) not in paths:
            raise SeamError(f"its {role} skip is added by {type(owner).__name__}, which is not within it.")
        path = paths[id(owner)]
        if (path, name) not in methods:
            methods[path, name] = Method(unmarked_class(owner), name), owner
        method, _ = methods[path, name]
        assert residual.op.spot is not None
        number = method.add_at(residual.op.spot.position)
        if number is None:
            raise SeamError(
                f"its {role} skip is added by an expression of {method.where} that is no plain add."
            )
        if (path, name, number) in adds:
            raise SeamError(
                f"{method.where} adds its {role} skips in a loop: one line of it serves several layers. Put "
                "what the loop does into a module of its own, one for each layer."
            )
        site = Site(path, name, number, residual.skip_is_left, method.digest)
        order = 1 + sum(add.role == role for add in adds.values())
        adds[path, name, number] = Add(role, site=site, order=order)
    twins = []  # in arms that were not taken, as joins of the same names
    for (path, name), (method, owner) in methods.items():
        joins = {at[2]: add for at, add in adds.items() if at[:2] == (path, name)}
        sides = {number: add.site.skip_is_left for number, add in joins.items() if add.site}
        found = method.twins(sides, _ran(flow, group.call, method), owner)
        for twin, (join, skip_is_left) in found.items():
            site = Site(path, name, twin, skip_is_left, method.digest)
            twins.append(replace(joins[join], site=site))
    return (*adds.values(), *twins)


def _ran(flow: Flow, call: Call, method: Method) -> set[int]:
    code = method.function.__code__
    spots = [op.spot for op in flow.trace.ops[call.begin : call.end] if op.spot and op.spot.code is code]
    return {number for spot in spots if (number := method.add_at(spot.position)) is not None}


def _method(residual: Residual) -> tuple[nn.Module, str]:
    """The module in whose method an add stands, and the method's name."""
    spot = residual.op.spot
    if spot is None or spot.owner is None:
        where = "code that is not Python" if spot is None else f"the function {spot.code.co_qualname}"
        raise SeamError(f"a skip is added in {where}, which is no method of a module and cannot be edited.")
    cls: Any = unmarked_class(spot.owner)
    name = _method_name(cls, spot.code)
    if name is None:
        raise SeamError(
            f"a skip is added in {spot.code.co_qualname}, which is no method of {type(spot.owner).__name__} "
            "itself: a local function, or a base's method called by super()."
        )
    return spot.owner, name


def add_places(flow: Flow) -> Iterator[tuple[nn.Module, str, tuple[int | None, ...]]]:
    """Where the residual adds of the stream stand: whose method, its name, the position in it."""
    for residual in flow.main():
        if residual.op.spot is not None:
            with suppress(SeamError):
                yield *_method(residual), residual.op.spot.position


@functools.cache
def _method_name(cls: type, code: object) -> str | None:
    overridden: set[str] = set()
    for base in cls.__mro__:
        for name, member in vars(base).items():
            for function in wrapped_functions(member, name):
                if getattr(function, "__code__", None) is code and name not in overridden:
                    return name
        overridden |= set(vars(base))
    return None


def _stream(flow: Flow, group: _Group) -> tuple[int, int]:
    """Which argument of the block's forward carries its tokens, and its value."""
    residual, call = group.residuals[0], group.call
    for wanted in (residual.start, flow.root[residual.skip]):
        for place, value in call.arguments:
            if flow.root[value] == wanted:
                return place, value
    made = _ancestors(flow, residual.start, call.begin)
    for place, value in call.arguments:
        if value in made or flow.root[value] in made:
            return place, value
    return 0, residual.skip


def _unchained(flow: Flow, group: _Group, roles: list[Role], stream: int) -> tuple[Role, ...]:
    """The roles whose skip is more than one module away from the sum before."""
    found: list[Role] = []
    for residual, role in zip(group.residuals, roles, strict=True):
        if not flow.leads(group.call, stream, residual.skip):
            found.append(role)
        stream = residual.out
    return tuple(dict.fromkeys(found))


def _ancestors(flow: Flow, value: int, begin: int) -> set[int]:
    """What a value was made of since an operation."""
    seen, todo = set(), [value]
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        maker = flow.trace.values[one].maker
        if maker is not None and maker >= begin:
            todo += flow.trace.ops[maker].inputs
    return seen
