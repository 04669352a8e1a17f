"""Layers whose skips stand in the loop of their encoder, as in vit-pytorch: no module is called once a layer.

::

    for attn, ff in self.layers:                    for layer in self.layers:
        x = attn(x) + x                  ->             x = layer(x)
        x = ff(x) + x

An open loop calls its layers, and each layer, here a list of two, is of a subclass whose forward is the body
of the loop. It computes what the loop did, in the same order, and is a block like any other: its adds become
joins, operations go before it, and its input is seen by hooks. A loop is open as long as one of its layers
holds any of these.
"""

import ast
import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import nn

from wellposed.anatomy.source import Method, compiled_like
from wellposed.anatomy.subclass import own_class_of, set_class, subclass, unmarked_class
from wellposed.errors import SeamError

_LAYER = "layer_of_the_loop"


@dataclass(frozen=True)
class Loop:
    """A ``for`` over the layers of an encoder.

    Args:
        method: in which it stands.
        number: among the loops of that method.
        path: of the list of layers, from the encoder.
        digest: of the method's source.
    """

    method: str
    number: int
    path: str
    digest: str

    def layers(self, encoder: nn.Module) -> list[nn.Module]:
        found: Any = encoder.get_submodule(self.path)
        return list(found)


def loop_at(
    encoder: nn.Module, name: str, position: tuple[int | None, ...], called: Iterable[nn.Module]
) -> Loop | None:
    """The loop around a position in a method of an encoder, if it goes over layers that can be called.

    Args:
        called: the modules that a run called.
    """
    cls: Any = own_class_of(type(encoder))
    method = Method(cls, name)
    for number, node in enumerate(_loops(method.definition)):
        if _is_within(node, method, position):
            try:
                body = _Body(method.definition, node)
            except _Unliftable:
                return None
            paths = [body.path] if body.path else _lists_of(encoder)
            ran = {id(module) for module in called}
            fits = [path for path in paths if _are_layers(encoder, path, body, ran)]
            return Loop(name, number, fits[0], method.digest) if len(fits) == 1 else None
    return None


def _lists_of(encoder: nn.Module) -> list[str]:
    """The lists in an encoder, where the source does not say which one its loop goes over."""
    return [path for path, module in encoder.named_modules() if isinstance(module, nn.ModuleList)]


def _are_layers(encoder: nn.Module, path: str, body: "_Body", ran: set[int]) -> bool:
    """Whether a list holds layers, none of which was called, but parts of each of which were."""
    try:
        layers: list[Any] = list(encoder.get_submodule(path))  # type: ignore[call-overload]
    except (AttributeError, TypeError):
        return False
    kind = nn.ModuleList if body.unpacks else nn.Module
    return (
        len({id(layer) for layer in layers} - ran) == len(layers) > 0
        and all(isinstance(layer, kind) for layer in layers)
        and all(any(id(part) in ran for part in layer.children()) for layer in layers)
    )


def _is_within(node: ast.For, method: Method, position: tuple[int | None, ...]) -> bool:
    line = (position[0] or 0) - method.first_line + 1
    return node.body[0].lineno <= line <= (node.end_lineno or 0)


def _loops(definition: ast.FunctionDef) -> list[ast.For]:
    return [node for node in ast.walk(definition) if isinstance(node, ast.For)]


class _Unliftable(Exception):  # noqa: N818
    """Of a loop whose body cannot be made a method."""


_KEPT = (
    *(ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.For, ast.While),
    *(ast.Lambda, ast.FunctionDef, ast.ClassDef, ast.Global, ast.Nonlocal, ast.Delete, ast.NamedExpr),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
"""What a body cannot hold that becomes a method: ways out of it, and names that are seen from elsewhere."""


class _Body:
    """What the body of a loop takes from around it and gives back.

    Args:
        definition: of the method.
        loop: one of its loops.
    """

    def __init__(self, definition: ast.FunctionDef, loop: ast.For) -> None:
        self.loop = loop
        parameters = [*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs]
        self.owner = parameters[0].arg if parameters else ""
        inside = [node for statement in loop.body for node in ast.walk(statement)]
        if loop.orelse or any(isinstance(node, _KEPT) for node in inside):
            raise _Unliftable
        self.index, self.target, self.path = self._over()
        within = {id(node) for node in ast.walk(loop)}
        outside = [node for node in ast.walk(definition) if id(node) not in within]
        elements = {node.id for node in ast.walk(self.target) if isinstance(node, ast.Name)}
        if elements & {node.id for node in outside if isinstance(node, ast.Name)}:
            raise _Unliftable
        before = {p.arg for p in parameters[1:]} | {
            node.id for node in outside if _is_stored(node) and node.lineno < loop.lineno
        }
        before |= {node.id for node in ast.walk(self.index) if isinstance(node, ast.Name)}
        stored, needed, always = self._names()
        loaded = {node.id for node in outside if _is_loaded(node)} | needed
        self.outputs = [name for name in stored if name in loaded and name not in elements]
        if not self.outputs or any(name not in before | always for name in self.outputs):
            raise _Unliftable
        kept = [name for name in self.outputs if name in before and (name in needed or name not in always)]
        self.inputs = kept + sorted(needed & before - set(kept) - elements)
        self.attributes = self._of_owner(inside)

    def _over(self) -> tuple[ast.expr, ast.expr, str]:
        """What counts the layers, what names them, and their path, "" where that is not in the source."""
        target, over = self.loop.target, self.loop.iter
        index: ast.expr = ast.Tuple([], ast.Store())
        counts = (
            isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "enumerate"
        )
        if counts and isinstance(over, ast.Call) and len(over.args) == 1 and not over.keywords:
            if not isinstance(target, ast.Tuple) or len(target.elts) != 2:
                raise _Unliftable
            index, target, over = target.elts[0], target.elts[1], over.args[0]
        path: list[str] = []
        while isinstance(over, ast.Attribute):
            path.insert(0, over.attr)
            over = over.value
        if not isinstance(over, ast.Name) or bool(path) != (over.id == self.owner):
            raise _Unliftable
        if any(isinstance(node, ast.Starred | ast.Attribute) for node in ast.walk(target)):
            raise _Unliftable
        return index, target, ".".join(path)

    @property
    def unpacks(self) -> bool:
        return not isinstance(self.target, ast.Name)

    def _names(self) -> tuple[list[str], set[str], set[str]]:
        """The names that the body stores, needs from before, and stores whichever way it goes.

        Of those stored the last comes first, as it is the stream.
        """
        stored: list[str] = []
        needed: set[str] = set()
        always: set[str] = set()
        for statement in self.loop.body:
            nodes = list(ast.walk(statement))
            loaded = {node.id for node in nodes if _is_loaded(node)}
            added = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
            needed |= (loaded | {to.id for to in added if isinstance(to, ast.Name)}) - always
            stored += [node.id for node in nodes if _is_stored(node)]
            if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
                always |= {node.id for node in nodes if _is_stored(node)}
        return list(dict.fromkeys(reversed(stored))), needed, always

    def _of_owner(self, inside: list[ast.AST]) -> list[str]:
        """The attributes of the encoder that the body reads."""
        read = [
            node
            for node in inside
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == self.owner
        ]
        bare = sum(isinstance(node, ast.Name) and node.id == self.owner for node in inside)
        if bare != len(read) or not all(isinstance(node.ctx, ast.Load) for node in read):
            raise _Unliftable
        return sorted({node.attr for node in read})

    def method(self) -> ast.FunctionDef:
        """The forward of a layer."""
        names = [*self.inputs, *(self._called(name) for name in self.attributes)]
        arguments = ast.arguments(
            posonlyargs=[],
            args=[ast.arg(_LAYER), *map(ast.arg, names)],
            kwonlyargs=[],
            kw_defaults=[],
            defaults=[],
        )
        body: list[ast.stmt] = [
            ast.Assign([self.target], ast.Name(_LAYER, ast.Load())),
            *(_OwnersAsNames(self).visit(statement) for statement in self.loop.body),
            ast.Return(_names(self.outputs, ast.Load())),
        ]
        return ast.FunctionDef(name="forward", args=arguments, body=body, decorator_list=[])

    def call_layers(self) -> None:
        """Let the loop call its layers."""
        layer = ast.Name(_LAYER, ast.Store())
        counts = isinstance(self.loop.iter, ast.Call)
        self.loop.target = ast.Tuple([self.index, layer], ast.Store()) if counts else layer
        given: list[ast.expr] = [ast.Name(name, ast.Load()) for name in self.inputs]
        owner = ast.Name(self.owner, ast.Load())
        given += [ast.Attribute(owner, name, ast.Load()) for name in self.attributes]
        call = ast.Call(ast.Name(_LAYER, ast.Load()), given, [])
        self.loop.body = [ast.Assign([_names(self.outputs, ast.Store())], call)]

    def _called(self, attribute: str) -> str:
        return f"{self.owner}_{attribute}"


class _OwnersAsNames(ast.NodeTransformer):
    """Reads the attributes of the encoder from arguments."""

    def __init__(self, body: _Body) -> None:
        self.body = body

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == self.body.owner:
            return ast.Name(self.body._called(node.attr), ast.Load())
        return self.generic_visit(node)


def _names(names: list[str], context: ast.expr_context) -> ast.expr:
    found: list[ast.expr] = [ast.Name(name, context) for name in names]
    return found[0] if len(found) == 1 else ast.Tuple(found, context)


def _is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _is_loaded(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _read(encoder: Any, loop: Loop) -> tuple[Method, ast.FunctionDef, ast.For]:
    method = Method(encoder, loop.method)
    if method.digest != loop.digest:
        raise SeamError(
            f"the source of {method.where} is not the one in which the loop over its layers was found: the "
            "edited model is from another version; install that version, or edit the model again."
        )
    definition = method.parsed()
    return method, definition, _loops(definition)[loop.number]


@functools.cache
def _calling_class(base: Any, loops: tuple[Loop, ...]) -> type[nn.Module]:
    """An encoder whose loops call their layers."""
    members: dict[str, Any] = {"_loops": loops}
    for name in dict.fromkeys(loop.method for loop in loops):
        method, definition, _ = _read(base, next(loop for loop in loops if loop.method == name))
        fors = _loops(definition)
        for body in [_Body(definition, fors[loop.number]) for loop in loops if loop.method == name]:
            body.call_layers()
        members[name] = method.replaced(definition)
    return subclass(_calling_class, base, loops, members=members)


@functools.cache
def _layer_class(base: Any, encoder: Any, loop: Loop) -> type[nn.Module]:
    """A layer whose forward is the body of a loop of its encoder."""
    method, definition, node = _read(encoder, loop)
    forward = compiled_like(method.function, _Body(definition, node).method(), f"{method.where}, a layer")
    forward.__defaults__ = forward.__kwdefaults__ = None
    forward.__annotations__ = {}
    members = {"forward": forward, "_loop": loop, "__module__": encoder.__module__}
    if issubclass(base, nn.ModuleList):  # which hold their joins besides what they list
        members |= {"__iter__": _listed, "__len__": _length}
    return subclass(_layer_class, base, encoder, loop, members=members)


def _listed(self: nn.ModuleList) -> Iterator[nn.Module]:
    return iter([module for name, module in self._modules.items() if name.isdigit() and module is not None])


def _length(self: nn.ModuleList) -> int:
    return sum(name.isdigit() for name in self._modules)


_HOMES: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], tuple[Loop, ...]]]
_HOMES = weakref.WeakKeyDictionary()
"""The encoder of a layer, from when its blocks were looked up."""


def remember(encoder: nn.Module, loops: tuple[Loop, ...]) -> None:
    """From now on :func:`open_loop` knows the encoder of these layers."""
    for loop in loops:
        for layer in loop.layers(encoder):
            _HOMES[layer] = weakref.ref(encoder), loops


def open_loops(encoder: nn.Module) -> tuple[Loop, ...]:
    """The open loops of an encoder."""
    return getattr(type(encoder), "_loops", ())


def encoder_of(layer: nn.Module) -> nn.Module | None:
    """The encoder in whose loop a layer stands; None of what is no such layer."""
    return _HOMES[layer][0]() if layer in _HOMES else None


def is_looped(module: nn.Module) -> bool:
    """Whether a module is an encoder or a layer of an open loop."""
    return looped_class(type(module)) is not None


def looped_class(cls: Any) -> Any:
    """Of the classes below one, that of an open loop; None where there is none."""
    return next((each for each in cls.__mro__ if {"_loop", "_loops"} & set(vars(each))), None)


def open_loop(layer: nn.Module) -> None:
    """Let the encoder of a layer call its layers, in place; nothing for what stands in no loop."""
    encoder = encoder_of(layer)
    if encoder is not None and not is_looped(layer):
        _open(encoder, _HOMES[layer][1])


def _open(encoder: nn.Module, loops: tuple[Loop, ...]) -> None:
    cls: Any = unmarked_class(encoder)
    calling = _calling_class(cls, loops)
    own: Any = own_class_of(cls)
    layers: list[tuple[Any, Loop]] = [(layer, loop) for loop in loops for layer in loop.layers(encoder)]
    made = [_layer_class(unmarked_class(layer), own, loop) for layer, loop in layers]  # type: ignore[arg-type]
    set_class(encoder, calling)
    for (layer, _), layer_class in zip(layers, made, strict=True):
        set_class(layer, layer_class)


def close_loop(layer: nn.Module) -> None:
    """Undo :func:`open_loop` where no layer of the loop needs it any more."""
    encoder = encoder_of(layer)
    if encoder is not None and is_looped(encoder):
        loops = _HOMES[layer][1]
        if not any(_is_needed(one) for loop in loops for one in loop.layers(encoder)):
            _close(encoder, loops)


def _is_needed(layer: nn.Module) -> bool:
    """Whether a layer holds a join or an operation, or is watched."""
    held = any(name.startswith(("join_", "inserted_")) for name in layer._modules)
    return held or bool(layer._forward_hooks or layer._forward_pre_hooks)


def _close(encoder: nn.Module, loops: tuple[Loop, ...]) -> None:
    for module in (encoder, *(layer for loop in loops for layer in loop.layers(encoder))):
        if (made := looped_class(type(module))) is not None:
            set_class(module, vars(made)["_made_by"][1])


@contextlib.contextmanager
def opened(found: Iterable[tuple[nn.Module, tuple[Loop, ...]]]) -> Iterator[None]:
    """Inside, some loops call their layers."""
    done: list[tuple[nn.Module, tuple[Loop, ...]]] = []
    try:
        for encoder, loops in found:
            if not is_looped(encoder):
                _open(encoder, loops)
                done.append((encoder, loops))
        yield
    finally:
        for encoder, loops in done:
            _close(encoder, loops)
