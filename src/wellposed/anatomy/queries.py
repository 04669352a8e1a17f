"""Where a block's queries are made, and which channels of which module belong to which head.

Nothing is listed by class. The model runs up to the block, and a copy of the block with random weights runs
on what came there. Gradients tell which channels of which module reach the logits of which head, and a second
run of the copy proves it: with the query of a head at zero its weights are the same for all keys that a row
may see, and the other heads' weights and all values are what they were. The weights are random because a bias
that is zero at initialisation would not be seen.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from wellposed.anatomy.cores import (
    HIDDEN,
    INSTEAD,
    TALKING,
    UNSEEN,
    Core,
    HeadChannels,
    Heads,
    Reach,
    at_least_float32,
    cores,
)
from wellposed.anatomy.example import LIBRARIES, Example, eagerly, examples_of, preserved
from wellposed.anatomy.loops import close_loop, encoder_of, open_loop
from wellposed.anatomy.model import Block
from wellposed.anatomy.proof import as_built, block_signature, own_class, proofs
from wellposed.anatomy.trace import Call, Trace, removing, trace
from wellposed.interrupts import let_through

BIASED = (
    "its attention adds something besides q k^T to the logits, such as a relative position bias, so that a "
    f"query of zeros does not weigh all tokens alike; {INSTEAD}"
)
CLASS = "the class token alone attends there, the edit is of attention among all tokens"
NO_CORE = f"no softmax over tokens and product with values was seen in it; {INSTEAD}"
_GIVE_EXAMPLE = "it takes a run of the model to find its query: give an input as example="
_META = "it is on the meta device, where no run can find its query; edit it on another device"

HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "h")
"""What modules call the number of their heads."""


@dataclass(frozen=True)
class FoundQuery:
    """The module whose output holds the query, by its path in the block, and where its heads are."""

    path: str
    channels: HeadChannels


_T = TypeVar("_T")


class Memory(Generic[_T]):
    """What a run has shown of blocks: of a library's by their kind, of others by themselves.

    A model of one's own may give its blocks a bias from outside, each another one.

    Args:
        kinds: what is known of kinds.
    """

    def __init__(self, kinds: Callable[[], dict[str, _T]]) -> None:
        self._kinds = kinds
        self._own: WeakKeyDictionary[nn.Module, _T] = WeakKeyDictionary()

    def of(self, block: nn.Module) -> _T | None:
        return self._kinds().get(_kind(block)) if is_of_library(block) else self._own.get(block)

    def run(
        self,
        model: nn.Module,
        wanted: list[Block],
        example: Any,
        see: Callable[[Block, tuple[Any, ...], dict[str, Any]], _T],
    ) -> bool:
        """Run the model up to the first block of each kind and remember what its call shows.

        Returns whether there was no run, as the model is on the meta device or there is no example.
        """
        if any(parameter.is_meta for parameter in model.parameters()):
            return True
        runs = examples_of(model, example)
        if not runs:
            return True
        with preserved(model), eagerly(), as_built(model), torch.inference_mode(False), torch.no_grad():
            model.eval()
            for block in wanted:
                open_loop(block.module)
            for _, part, one in runs:
                for block, args, kwargs in _calls(part, {_key(block): block for block in wanted}, one):
                    if is_of_library(block.module):
                        self._kinds()[_key(block)] = see(block, args, kwargs)
                    else:
                        self._own[block.module] = see(block, args, kwargs)
            for block in wanted:
                close_loop(block.module)
        return False


_QUERIES: Memory[dict[str, Any]] = Memory(lambda: proofs().queries)


def find_queries(model: nn.Module, found: list[Block], example: Any = None) -> dict[int, FoundQuery | str]:
    """For each block, by its index, where its query is, or why its heads cannot be made uniform.

    Runs the model up to the first block of each kind that is not known yet.
    """
    known = {block.index: known_query(block.module) for block in found}
    missing = [block for block in found if known[block.index] is None]
    reason = _proven_by_runs(model, missing, example) if missing else ""
    return {
        block.index: known[block.index] or known_query(block.module) or reason or _NOT_REACHED
        for block in found
    }


_NOT_REACHED = "the example did not reach it, so that it is not known where its query is"


def known_query(block: nn.Module) -> FoundQuery | str | None:
    """What a run has shown of such a block, None where there was none."""
    row = _QUERIES.of(block)
    if row is None or "refused" in row:
        return None if row is None else row["refused"]
    return _recalled(row, block)


def _proven_by_runs(model: nn.Module, missing: list[Block], example: Any) -> str:
    """Find the queries of some blocks and remember them. Returns why there was no run, if there was none."""
    if not _QUERIES.run(model, missing, example, _row):
        return ""
    return _META if any(parameter.is_meta for parameter in model.parameters()) else _GIVE_EXAMPLE


def is_of_library(block: nn.Module) -> bool:
    """Whether a module's class is one of timm, torchvision, transformers or torch."""
    block = encoder_of(block) or block
    return own_class(block).__module__.partition(".")[0] in (*LIBRARIES, "torch")


def _key(block: Block) -> str:
    """One for all blocks of a kind; of one's own blocks each has its own."""
    return _kind(block.module) if is_of_library(block.module) else block.name


def _kind(block: nn.Module) -> str:
    """Of a block's structure, and of what its configuration says of positions: they may come from outside."""
    config = getattr(block, "config", None) or next(
        (c for m in block.modules() if (c := getattr(m, "config", None)) is not None), None
    )
    settings = sorted(
        f"{name}={value}"
        for name, value in vars(config or object).items()
        if isinstance(value, bool | str) and ("bias" in name or "position" in name)
    )
    return ",".join([block_signature(block), *settings])


class _ReachedAllError(Exception):
    """Ends a run once every block has been reached."""


_Call = tuple[Block, tuple[Any, ...], dict[str, Any]]


def _calls(model: nn.Module, wanted: dict[str, Block], example: Example) -> list[_Call]:
    """The first call of each block, with copies of its arguments."""
    calls: dict[str, _Call] = {}

    def keep(key: str, args: Any, kwargs: Any) -> None:
        calls.setdefault(key, (wanted[key], *copy.deepcopy((args, kwargs))))
        if len(calls) == len(wanted):
            raise _ReachedAllError

    _run_up_to(model, wanted, example, keep)
    return _with_learned_noise(model, list(calls.values()), example)


def _run_up_to(
    model: nn.Module, wanted: dict[str, Block], example: Example, see: Callable[[str, Any, Any], None]
) -> None:
    """Show the arguments of some blocks until ``see`` has seen enough."""
    handles: list[Any] = []
    with suppress(_ReachedAllError), removing(handles):
        for key, block in wanted.items():

            def hook(_: Any, args: Any, kwargs: Any, key: str = key) -> None:
                let_through()
                see(key, args, kwargs)

            handles.append(block.module.register_forward_pre_hook(hook, with_kwargs=True))
        example.run(model)


def _with_learned_noise(model: nn.Module, calls: list[_Call], example: Example) -> list[_Call]:
    """The calls with noise for arguments that are learned and zero, as a bias at initialisation is.

    A mask that hides nothing is zero too, but made of no parameter.
    """
    zero = {_key(block): block for block, *given in calls if any(map(_is_zero, tree_leaves(given)))}
    if not zero:
        return calls
    learned: dict[str, list[bool]] = {}

    def see(key: str, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves([args, kwargs])
        learned.setdefault(key, [isinstance(x, Tensor) and x.requires_grad for x in leaves])
        if len(learned) == len(zero):
            raise _ReachedAllError

    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            _run_up_to(model, zero, example, see)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    return [(block, *_noised(args, kwargs, learned.get(_key(block)))) for block, args, kwargs in calls]


def _noised(args: Any, kwargs: Any, learned: list[bool] | None) -> tuple[Any, dict[str, Any]]:
    leaves, structure = tree_flatten([args, kwargs])
    for number, x in enumerate(leaves):
        if learned is not None and learned[number] and _is_zero(x):
            leaves[number] = torch.randn_like(x)
    args, kwargs = tree_unflatten(leaves, structure)
    return args, kwargs


def _is_zero(x: Any) -> bool:
    return _is_floating(x) and not bool(x.any())


def _row(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What is remembered of a block."""
    try:
        twin = Twin(block, args, kwargs)
        found = _found(twin)
    except Exception as error:  # whatever a foreign block does with a copy of its input
        return {"refused": f"a copy of it with random weights could not be run: {error}"}
    if isinstance(found, str):
        return {"refused": found}
    return _remembered(found, block.module)


class Twin:
    """A copy of a block with random weights, and one call of it."""

    def __init__(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given: list[Tensor] = []
        self.module = _randomised(copy.deepcopy(block.module))
        self.args, self.kwargs = tree_map_only(Tensor, at_least_float32, (args, kwargs))
        try:
            attention = block.attention()[1]
        except ValueError:
            attention = None
        paths = {id(module): path for path, module in block.module.named_modules()}
        path = paths.get(id(attention))
        self.attention = None if path is None else self.module.get_submodule(path)

    def run(self, *, gradients: bool = False) -> Trace:
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        if gradients:
            self.given = [x for x in tree_leaves((args, kwargs)) if _is_floating(x)]
            for x in self.given:
                x.requires_grad_()
            # A leaf cannot be changed in place, its copy can.
            with torch.enable_grad():
                args, kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        return trace(self.module, lambda block: block(*args, **kwargs), gradients=gradients)


def _randomised(block: nn.Module) -> nn.Module:
    for tensor in (*block.parameters(), *block.buffers()):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            tensor.data = tensor.data.float()
    block.train().eval()  # what is cached for evaluation is made again
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(False)
        if not parameter.is_floating_point():
            continue
        if "bias" in name:
            parameter.normal_(std=0.3)
        elif parameter.ndim < 2:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=1.5 * max(parameter[0].numel(), 1) ** -0.5)
    return block


def _found(twin: Twin) -> FoundQuery | str:
    """The query of a block's self-attention, proven, or why it cannot be used."""
    run = twin.run(gradients=True)
    seen = cores(run)
    number, trouble = _only_core(seen, twin.attention)
    if trouble:
        return trouble
    core = seen[number]
    if core.p.shape[-2] < 2:
        return CLASS
    paths = {id(module): path for path, module in twin.module.named_modules()}
    if core.is_packed:
        return _packed(core, paths)
    trouble = UNSEEN
    for call in _candidates(run, core):
        result = run.values[call.results[0]].tensor
        with torch.enable_grad():
            heads = Reach(core, result, twin.given).heads()
        if isinstance(heads, str):
            trouble = heads if trouble == UNSEEN else trouble
        elif _is_uniform(twin, seen, number, call.module, heads):
            return FoundQuery(paths[id(call.module)], heads.channels)
        else:
            trouble = BIASED
    return trouble


def _packed(core: Core, paths: dict[int, str]) -> FoundQuery | str:
    """The queries of nn.MultiheadAttention, which come first in its packed weight."""
    module = core.call.module if core.call else None
    if not isinstance(module, nn.MultiheadAttention):
        return UNSEEN
    if core.bias is not None and not bool(((core.bias == 0) | (core.bias < -HIDDEN)).all()):
        return BIASED
    return FoundQuery(paths[id(module)], HeadChannels(module.num_heads, span=(1, 3)))


def _only_core(seen: list[Core], attention: nn.Module | None) -> tuple[int, str]:
    """The number of the attention that is the block's own, and why there is no such one."""
    numbers = list(range(len(seen)))
    if len(numbers) > 1 and attention is not None:
        numbers = [n for n in numbers if seen[n].is_within(attention)]
    if not numbers:
        return -1, NO_CORE
    if len(numbers) > 1:
        return -1, f"it attends {len(numbers)} times, and it is not known which one is meant; {INSTEAD}"
    if seen[numbers[0]].is_mixed:
        return -1, TALKING
    return numbers[0], ""


def _candidates(run: Trace, core: Core) -> Iterator[Call]:
    """Calls of modules that ran once, ended before queries and keys met; the last ones first."""
    ran = Counter(id(call.module) for call in run.calls)
    for call in reversed(run.ended):
        is_list = isinstance(call.module, nn.Sequential | nn.ModuleList)
        if call.parent is None or call.end > core.met or is_list or ran[id(call.module)] > 1:
            continue
        if call.returns_tensor and run.values[call.results[0]].tensor.requires_grad:
            yield call


def _is_uniform(twin: Twin, plain: list[Core], number: int, module: nn.Module, heads: Heads) -> bool:
    """Whether zeros in the channels of a head make its weights uniform, and change nothing else."""
    for head in {0, heads.channels.heads - 1}:

        def cut(_: Any, args: Any, output: Tensor, head: int = head) -> Tensor:
            return heads.channels.zeroed(output, [head])

        handle = module.register_forward_hook(cut)
        try:
            seen = cores(twin.run())
        finally:
            handle.remove()
        if len(seen) != len(plain) or not _is_as_claimed(plain[number], seen[number], heads, head):
            return False
    return True


def _is_as_claimed(before: Core, after: Core, heads: Heads, head: int) -> bool:
    sees = before.sees
    share = sees / sees.sum(-1, keepdim=True).clamp(min=1)
    expected = before.p.detach().clone()
    indices = heads.indices[head]
    if heads.axis is None:
        expected = share
    else:
        for index in indices:
            expected.select(heads.axis, index).copy_(share.select(heads.axis, index))
    same = all(
        a is None or (b is not None and a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6))
        for a, b in ((before.value, after.value), (before.key, after.key))
    )
    return same and torch.allclose(after.p, expected.to(after.p.dtype), rtol=1e-5, atol=1e-7)


def _remembered(found: FoundQuery, block: nn.Module) -> dict[str, Any]:
    """What is remembered of a query. It serves blocks of other sizes that say how many heads they have."""
    channels = found.channels
    heads = _says_heads(block, found) or channels.heads
    return {
        "path": found.path,
        "axis": channels.axis,
        "parts": [list(part) for part in (channels.start, channels.span, channels.width)],
        "heads": heads,
        "sizes": _sizes(block, found.path, heads),
    }


def _recalled(row: dict[str, Any], block: nn.Module) -> FoundQuery | None:
    """A remembered query, None in a block whose proportions are others."""
    heads = row["heads"]
    if row["sizes"] != _sizes(block, row["path"], heads):
        return None
    if isinstance(heads, str):
        owner, _, attribute = heads.partition(":")
        heads = _attribute(block.get_submodule(owner), attribute)
    parts = (tuple(part) for part in row["parts"])
    return FoundQuery(row["path"], HeadChannels(heads, row["axis"], *parts)) if heads else None


def _says_heads(block: nn.Module, found: FoundQuery) -> str:
    """The path of a module around the query, and the attribute of it that says how many heads there are."""
    names = found.path.split(".")
    for length in range(len(names), -1, -1):
        path = ".".join(names[:length])
        owner = block.get_submodule(path)
        for attribute in (*HEAD_COUNTS, *(f"config.{name}" for name in HEAD_COUNTS)):
            if _attribute(owner, attribute) == found.channels.heads:
                return f"{path}:{attribute}"
    return ""


def _attribute(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


def _sizes(block: nn.Module, path: str, heads: str | int) -> list[Any]:
    """Of all weights of a block that does not say how many heads it has; else the proportions of those beside
    the query's, which are the same in other sizes.
    """
    if isinstance(heads, int):
        return [list(parameter.shape) for parameter in block.parameters()]
    parent = block.get_submodule(path.rpartition(".")[0])
    shapes = [tuple(p.shape[:2]) for p in parent.parameters() if p.ndim >= 2]
    unit = max(shapes[0][1], 1) if shapes else 1
    return [":".join(str(Fraction(size, unit)) for size in shape) for shape in shapes]


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
