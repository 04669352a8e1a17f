"""Blocks that are proven: found in a run of the model, and shown to be right by a second one.

The proof of a block is a run in which its adds are joins: the output must be the same, bit for bit, and the
joins must have run as often as the adds did. It is made once for a block's class, source and settings. What
was proven for the tested versions of timm, transformers and torchvision is shipped, so that their models need
no run.
"""

import functools
import hashlib
import importlib.metadata
import importlib.resources
import inspect
import json
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from wellposed.anatomy.example import Example, eagerly, preserved
from wellposed.anatomy.find import Found, add_places, find_blocks, refused_row, seen_instead
from wellposed.anatomy.flow import Flow
from wellposed.anatomy.loops import Loop, encoder_of, loop_at, looped_class, open_loops, opened, remember
from wellposed.anatomy.places import find_embeddings
from wellposed.anatomy.seam import block_joins, is_seamed, join_name, joins, opened_seams
from wellposed.anatomy.source import wrapped_functions
from wellposed.anatomy.subclass import (
    PackedQueryAttention,
    child_name,
    edited_weights,
    own_class_of,
    set_class,
)
from wellposed.anatomy.table import Add, BlockRow, EmbeddingRow, Position, Site, Tap
from wellposed.anatomy.trace import Trace, removing, trace, without_fast_path
from wellposed.errors import SeamError

INSERTED = ("inserted_before", "inserted_after", "inserted_query")
"""The names of the children that hold operations put into a model."""


class Proofs:
    """Rows by the signature of a block, and the classes of modules in which no skip is added."""

    def __init__(self) -> None:
        self.rows: dict[str, BlockRow] = {}
        self.classes: set[str] = set()  # of the blocks
        self.loops: dict[str, tuple[Loop, ...]] = {}  # by the class of their encoder
        self.embeddings: dict[str, tuple[EmbeddingRow, ...]] = {}
        # Classes with settings that cut images into pieces, and why blocks there are refused, if they are.
        self.splitters: dict[str, str] = {}
        self.quiet: set[str] = set()
        self.unreached: set[str] = set()
        # By signature, where the queries of blocks are; see wellposed.anatomy.queries.
        self.queries: dict[str, dict[str, Any]] = {}
        self.tested: dict[str, list[str]] = {}

    def to_json(self) -> dict[str, Any]:
        """All of it, as data: what is at its default is left out, and blocks that have one row share it."""
        keys: dict[BlockRow, list[str]] = {}
        for key, row in sorted(self.rows.items()):
            keys.setdefault(row, []).append(key)
        return {
            "tested": self.tested,
            "classes": sorted(self.classes),
            "loops": {key: _data(loops) for key, loops in sorted(self.loops.items())},
            "embeddings": {key: _data(rows) for key, rows in sorted(self.embeddings.items()) if rows},
            "splitters": dict(sorted(self.splitters.items())),
            "quiet": sorted(self.quiet),
            "unreached": sorted(self.unreached),
            "queries": dict(sorted(self.queries.items())),
            "rows": {
                " ".join(alike): _data(row) | {"taps": _data(dict(row.taps))} for row, alike in keys.items()
            },
        }

    def load(self, data: dict[str, Any]) -> None:
        """Take over what :meth:`to_json` wrote. Raises where it is of another form."""
        if set(data) != set(self.to_json()):
            raise ValueError(
                f"expected proofs with {', '.join(self.to_json())}, got {', '.join(data)}; they were "
                "written by another version of wellposed, install it again."
            )
        self.tested |= data["tested"]
        self.classes |= set(data["classes"])
        self.loops |= {key: tuple(Loop(**loop) for loop in loops) for key, loops in data["loops"].items()}
        for key, rows in data["embeddings"].items():
            self.embeddings[key] = tuple(
                EmbeddingRow(**row | {"tokens": _tap(row["tokens"])}) for row in rows
            )
        self.splitters |= data["splitters"]
        self.quiet |= set(data["quiet"])
        self.unreached |= set(data["unreached"])
        self.queries |= data["queries"]
        for keys, row in data["rows"].items():
            adds = tuple(Add(**add | {"site": Site(**add["site"])}) for add in row["adds"])
            if unknown := set(row["taps"]) - set(get_args(Position)):
                raise ValueError(f"expected the positions of a block, got {', '.join(sorted(unknown))}.")
            taps = tuple(
                (position, tap if isinstance(tap, str) else _tap(tap))
                for position, tap in row["taps"].items()
            )
            tuples = {"adds": adds, "taps": taps, "unchained": tuple(row.get("unchained", ()))}
            for key in keys.split():
                self.add(key, BlockRow(**row | tuples))

    def add(self, key: str, row: BlockRow) -> None:
        """Remember a row. One that is known stays, but for what only a causal mask would show."""
        known = self.rows.get(key, row)
        kept = row if known.refused or known.pieces else known
        self.rows[key] = replace(kept, causal=kept.causal if kept.causal == row.causal else None)


def _data(x: Any) -> Any:
    if is_dataclass(x):
        given = {each.name: getattr(x, each.name) for each in fields(x)}
        return {each.name: _data(given[each.name]) for each in fields(x) if given[each.name] != each.default}
    if isinstance(x, dict):
        return {key: _data(value) for key, value in x.items()}
    return [_data(each) for each in x] if isinstance(x, tuple) else x


def _tap(data: dict[str, Any]) -> Tap:
    return Tap(**data | {"paths": tuple(data["paths"])})


@functools.cache
def proofs() -> Proofs:
    """Those of this process, with the shipped ones."""
    found = Proofs()
    shipped = importlib.resources.files("wellposed.anatomy") / "proven.json"
    if shipped.is_file():
        found.load(json.loads(shipped.read_text(encoding="utf-8")))
    return found


def proven_row(module: nn.Module) -> BlockRow | None:
    """The row of a module that a run has shown to be a block."""
    known = proofs()
    if encoder_of(module) is not None:
        return known.rows.get(block_signature(module))
    return known.rows.get(block_signature(module)) if _key(module) in known.classes else None


def remember_loops(module: nn.Module) -> None:
    """Note which layers stand in loops of a module, if it is of a class that was seen to have some."""
    loops = open_loops(module)
    if not loops and proofs().loops:
        loops = proofs().loops.get(_key(module), ())
    with suppress(AttributeError):  # built otherwise than the one that was run
        remember(module, loops)


def splits_images(module: nn.Module) -> str | None:
    """Why blocks inside a module that cuts images into pieces are refused, "" if they are not.

    None of a module that was not seen to cut any.
    """
    return proofs().splitters.get(_setting_key(module)) if _key(module) else None


def proven_embeddings(module: nn.Module) -> tuple[EmbeddingRow, ...]:
    """The rows of a module in a run of which tokens were seen to be made."""
    return proofs().embeddings.get(_shallow_signature(module), ())


def is_quiet(module: nn.Module, *, ran: bool) -> bool:
    """Whether a run has shown that a module's own methods add no skips.

    With ``ran=False`` it is enough that a model with such a module was run, whether that reached it or not.
    """
    key = _key(module)
    return not key or key in proofs().quiet or (not ran and key in proofs().unreached)


def prove(model: nn.Module, example: Example) -> str:
    """Find the blocks of a model in a run of it, prove them in a second one, and remember them.

    Where skips are added in the loop of an encoder, a run more shows its layers one by one.

    Returns:
        What was seen, for an error.
    """
    with preserved(model), eagerly(), as_built(model), torch.inference_mode(False):
        model.eval()
        seen = trace(model, example.run)
        flow, output = Flow(seen), seen.output
        looped = _looped(flow)
        with opened(looped):
            if looped:
                flow = Flow(trace(model, example.run))
            found = _proven(model, example, flow, output)
        for encoder, loops in looped:
            proofs().loops[_class_key(own_class(encoder))] = loops
            remember(encoder, loops)
        _remember(model, example, flow, found)
    return f"{len(found)} blocks" if found else seen_instead(flow)


def _looped(flow: Flow) -> list[tuple[nn.Module, tuple[Loop, ...]]]:
    """The encoders in whose loops residual adds stand, with these loops."""
    encoders: dict[int, nn.Module] = {}
    loops: dict[int, dict[Loop, None]] = {}
    called = [call.module for call in flow.trace.calls]
    for owner, name, position in add_places(flow):
        loop = loop_at(owner, name, position, called)
        if loop is not None:
            encoders[id(owner)] = owner
            loops.setdefault(id(owner), {})[loop] = None
    return [(encoder, tuple(loops[key])) for key, encoder in encoders.items()]


def _proven(model: nn.Module, example: Example, flow: Flow, output: Any) -> list[Found]:
    found = find_blocks(model, flow, example.batch)
    usable = [block for block in found if not block.row.refused]
    joins_ran = _run_seamed(model, usable, example, output)
    ran = Counter(id(call.module) for call in flow.trace.calls)
    found = [_as_run(block, ran[id(block.module)], joins_ran) for block in found]
    return _with_images_first(model, found, example, flow)


def _remember(model: nn.Module, example: Example, flow: Flow, found: list[Found]) -> None:
    there = {id(block.module) for block in found}
    proofs().embeddings[_shallow_signature(model)] = find_embeddings(model, flow, there, example.batch)
    for block in found:
        if block.splitter is not None:
            proofs().splitters[_setting_key(block.splitter)] = block.row.refused
        proofs().add(block_signature(block.module), block.row)
        proofs().classes.add(_class_key(own_class(block.module)))
    within = {id(m) for block in found for m in block.module.modules()}
    within |= {id(block.splitter) for block in found}  # with other settings it may cut otherwise
    ran = {id(call.module) for call in flow.trace.calls}
    for module in model.modules():
        if id(module) not in within and (key := _key(module)):
            (proofs().quiet if id(module) in ran else proofs().unreached).add(key)


def _as_run(block: Found, ran: int, joins_ran: dict[str, int]) -> Found:
    """A block whose joins ran as often as it did, each once; else the block, refused."""
    if block.row.refused or joins_ran[block.name] == ran * len(block.row.names):
        return block
    reason = (
        f"its {len(block.row.names)} joins ran {joins_ran[block.name]} times in {ran} calls: one is in a loop"
    )
    return replace(block, row=refused_row(block.module, reason))


def _with_images_first(model: nn.Module, found: list[Found], example: Example, flow: Flow) -> list[Found]:
    """Blocks that see images in pieces, if they see those of the first image first; else refused.

    Shown by a run on another image behind the example's.
    """
    inside = [block for block in found if block.row.pieces]
    if not inside:
        return found
    alone = _streams(flow.trace, inside)
    among = _streams(trace(model, example.and_another().run), inside)
    mixed = {
        id(block.module)
        for block, one, several in zip(inside, alone, among, strict=True)
        if several is None or one is None or not _starts_with(several, one)
    }
    return [
        replace(block, row=refused_row(block.module, _MIXED)) if id(block.module) in mixed else block
        for block in found
    ]


_MIXED = "it sees pieces of images, and which of them are of one image could not be told"


def _streams(run: Trace, found: list[Found]) -> list[Tensor | None]:
    """The tokens that each block sees in its first call."""
    calls = {id(call.module): call for call in reversed(run.calls)}
    tokens = [(calls.get(id(block.module)), block.row.stream) for block in found]
    return [run.values[call.argument(place)].tensor if call else None for call, place in tokens]


def _starts_with(several: Tensor, one: Tensor) -> bool:
    """Whether the first half is what is seen of the first image alone, and the other half is not."""
    first, rest = several[: len(one)], several[len(one) :]
    if not first.shape == rest.shape == one.shape:
        return False
    return bool((first - one).norm() < 0.1 * (rest - one).norm())


def _run_seamed(model: nn.Module, found: list[Found], example: Example, expected: Any) -> dict[str, int]:
    """Run the model with its adds as joins and count these. Raises where the output is another one."""
    counts = {block.name: 0 for block in found}
    handles: list[Any] = []
    with opened_seams([(block.module, block.row) for block in found]), removing(handles):
        for block in found:

            def count(*args: Any, name: str = block.name) -> None:
                counts[name] += 1

            handles += [j.register_forward_hook(count) for j in block_joins(block.module, block.row)]
        with torch.no_grad(), without_fast_path():
            output = example.run(model)
    pairs = zip(_tensors(output), _tensors(expected), strict=True)
    if not all(torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
        raise SeamError(
            f"the output of {type(model).__name__} changes when its adds become joins: something in it "
            "computes otherwise than its source says, or at random. Describe its blocks with "
            "wellposed.anatomy.teach."
        )
    return counts


def _tensors(output: Any) -> list[Tensor]:
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    return [x for x in tree_leaves(output) if isinstance(x, Tensor)]


@contextmanager
def as_built(model: nn.Module) -> Iterator[None]:
    """The model without its edits: seams closed, inserted operations passed by. Open loops stay open."""
    edited = [
        (module, type(module), dict(module._modules))
        for module in model.modules()
        if is_seamed(module) or edited_weights(module) or any(name in module._modules for name in INSERTED)
    ]
    try:
        for module, _, children in edited:
            for join in joins(module):
                del module._modules[join_name(join.name)]
            for name in INSERTED:
                if name in children:
                    module._modules[name] = nn.Identity()
            for name in edited_weights(module):
                del module._modules[child_name(name)]
            set_class(module, looped_class(type(module)) or own_class(module))
        yield
    finally:
        for module, cls, children in edited:
            module._modules.clear()
            module._modules.update(children)
            module.__class__ = cls


def of_edits(model: nn.Module) -> set[int]:
    """The ids of what edits have put into a model: operations, joins, edits of weights."""
    found: set[int] = set()
    for module in model.modules():
        names = [
            *INSERTED,
            *map(child_name, edited_weights(module)),
            *(join_name(j.name) for j in joins(module)),
        ]
        children = [module._modules[name] for name in names if name in module._modules]
        found |= {id(part) for child in children if child is not None for part in child.modules()}
    return found


def own_class(module: nn.Module) -> Any:
    """The class that a module was made of: without marks and seams, and without what shards it."""
    for cls in type(module).__mro__:
        if not issubclass(cls, FSDPModule | PackedQueryAttention) and not _is_parametrized(module, cls):
            return own_class_of(cls)
    return type(module)


def _is_parametrized(module: nn.Module, cls: type) -> bool:
    return "parametrizations" in module._modules and cls.__name__.startswith("Parametrized")


def version_of(cls: Any) -> str:
    """The library of a class with its version, and the versions that were tested, for an error."""
    library = cls.__module__.partition(".")[0]
    try:
        version = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""
    tested = proofs().tested.get(library)
    known = f"; tested are {tested[0]} to {tested[1]}" if tested else ""
    return f" ({library} {version} is installed{known})"


def _key(module: nn.Module) -> str:
    """Of a module's class and its source; empty for one of torch.nn, which adds no skips."""
    cls = own_class(module)
    return _class_key(cls) if _may_add(cls) else ""


def _may_add(cls: Any) -> bool:
    return not cls.__module__.startswith("torch.nn.")


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def block_signature(block: nn.Module) -> str:
    """Of a block's structure: the classes in it with their sources, and the settings that lead their way."""
    encoder = encoder_of(block)  # of a layer without a forward of its own
    parts: list[Any] = [] if encoder is None else [_class_key(own_class(encoder)), _settings(encoder)]
    edits = of_edits(block)
    for path, module in block.named_modules():
        if id(module) in edits:
            continue
        if not _has_tensors(module) and not any(True for _ in module.children()):
            parts.append(path)  # an activation, a dropout: which one does not matter
            continue
        cls = own_class(module)
        if not _may_add(cls):
            parts.append((path, cls.__qualname__))
            continue
        parts.append((path, _class_key(cls), _settings(module)))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _shallow_signature(module: nn.Module) -> str:
    """Of a whole model: its class, and the classes and settings of what it is made of."""
    children = [
        (name, own_class(child).__qualname__, _may_add(own_class(child)) and _settings(child))
        for name, child in module.named_children()
    ]
    text = repr((_class_key(own_class(module)), children))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _setting_key(module: nn.Module) -> str:
    """Of a module's class and settings, whatever it is made of."""
    text = repr((_class_key(own_class(module)), _settings(module)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in sorted(vars(module).items()):
        if name == "training" or name.startswith("_"):
            continue
        if value is None or isinstance(value, bool | str):
            found.append((name, value))
        elif isinstance(value, int | float):
            found.append((name, (value > 0) - (value < 0)))
    found += [(name, value is None) for name, value in sorted(module._parameters.items())]
    return found


@functools.cache
def _class_key(cls: Any) -> str:
    """Of a class and of the source of its methods, those it inherits from a library of models too."""
    texts = [f"{cls.__module__}.{cls.__qualname__}"]
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc"):
            continue
        for name, member in vars(base).items():
            for function in wrapped_functions(member, name):
                if isinstance(function, types.FunctionType) and not (
                    name.startswith("__") and name != "__call__"
                ):
                    texts.append(_text(function))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _text(function: types.FunctionType) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return repr(function.__code__.co_code)
