"""What a model does with one example: every operation on tensors, and what it was computed from.

The model runs once, as it is: nothing in it is replaced. A mode of torch sees each operation with its inputs
and outputs, hooks see which module is at work, and the frame of an add says where in the source it stands. So
the result is the model's own, bit for bit.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from wellposed.interrupts import let_through

ADDS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
"""Operations that add one tensor to another."""

HIDDEN_ADDS = frozenset({"addcmul", "addcmul_", "lerp", "lerp_", "sub", "sub_"})
"""Operations that add among other things, so that no join can stand for them."""

_TORCH = torch.__name__ + "."


@dataclass(frozen=True)
class Spot:
    """Where in the source an operation was called: the code, the position in it and whose method it is."""

    code: CodeType
    position: tuple[int | None, ...]
    owner: nn.Module | None


@dataclass
class Value:
    """A tensor at one time: an operation in place makes a new value of the same tensor."""

    shape: tuple[int, ...]
    floating: bool
    maker: int | None  # the operation that made it; None for parameters, buffers and inputs
    learned: bool  # a parameter or a buffer
    tensor: Tensor  # kept, so that no id is used twice


@dataclass
class Op:
    """One operation."""

    index: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    call: "Call | None"
    given: tuple[tuple[Any, ...], dict[str, Any]]  # its arguments
    spot: Spot | None = None


@dataclass
class Call:
    """One call of a module."""

    module: nn.Module
    parent: "Call | None"
    begin: int
    arguments: tuple[tuple[int, int], ...]  # (place, value); behind those with a position the named ones
    end: int = -1
    results: tuple[int, ...] = ()  # as the module returned them, the main one first
    returns_tensor: bool = False  # it, and not a tuple or something else that holds some

    def holds(self, index: int) -> bool:
        return self.begin <= index < self.end

    def argument(self, place: int) -> int:
        """The first value of an argument."""
        return next(value for each, value in self.arguments if each == place)

    def within(self, other: "Call | None") -> bool:
        call: Call | None = self
        while call is not None and call is not other:
            call = call.parent
        return call is other


@dataclass
class Trace:
    """All operations and calls of one forward pass, in their order."""

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # as they began
    ended: list[Call] = field(default_factory=list)  # as they ended
    output: Any = None

    def within(self, call: Call) -> list[Call]:
        """The calls that another one makes itself."""
        return [each for each in self.calls if each.parent is call]

    def innermost(self, call: Call, number: int) -> Call:
        """The first (0) or last (-1) call in nested Sequentials, to which no operation can be added."""
        while isinstance(call.module, nn.Sequential) and (inside := self.within(call)):
            call = inside[number]
        return call


def trace(model: nn.Module, run: Callable[[nn.Module], Any], *, gradients: bool = False) -> Trace:
    """Run the model by ``run(model)`` and record what happens. Hooks of its own run as they always do."""
    recorder = _Recorder(model)
    handles: list[Any] = []
    with removing(handles):
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(recorder.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(recorder.leave, with_kwargs=True))
        with torch.set_grad_enabled(gradients), without_fast_path(), recorder:
            recorder.trace.output = run(model)
    return recorder.trace


@contextlib.contextmanager
def removing(handles: list[Any]) -> Iterator[None]:
    """Removes the hooks at the end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """Inside, torch.nn runs its attention as it is written, and makes no nested tensor of padded texts."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = Trace()
        self._known: dict[int, int] = {}  # id of a tensor -> its value now
        self._stack: list[Call] = []
        for tensor in (*model.parameters(), *model.buffers()):
            self._new(tensor, None, learned=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        inputs = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        if not inputs:
            return func(*args, **kwargs)
        before = tuple(self._value(x) for x in inputs)
        result = func(*args, **kwargs)
        outputs = [x for x in tree_iter(result) if isinstance(x, Tensor)]
        if name == "__setitem__":
            outputs = [args[0]]
        if not outputs:
            return result
        op = self._record(name, before, args, kwargs)
        wholes: list[int] = []
        op.outputs = tuple(self._output(x, op, wholes) for x in outputs)
        op.outputs += tuple(wholes)
        if name in ADDS or name in HIDDEN_ADDS:
            op.spot = _spot()
        return result

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        let_through()
        arguments = tuple(
            (place, self._value(x))
            for place, given in enumerate((*args, *kwargs.values()))
            for x in tree_iter(given)
            if isinstance(x, Tensor)
        )
        call = Call(module, self._call(), len(self.trace.ops), arguments)
        self.trace.calls.append(call)
        self._stack.append(call)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # Still the one at work: what it returns unseen was computed from its arguments.
        call = self._stack[-1]
        call.results = tuple(self._value(x) for x in tree_iter(output) if isinstance(x, Tensor))
        call.returns_tensor = isinstance(output, Tensor)
        call.end = len(self.trace.ops)
        self.trace.ended.append(call)
        self._stack.pop()

    def _call(self) -> Call | None:
        return self._stack[-1] if self._stack else None

    def _record(self, name: str, inputs: tuple[int, ...], args: Any = (), kwargs: Any = None) -> Op:
        op = Op(len(self.trace.ops), name, inputs, (), self._call(), (args, kwargs or {}))
        self.trace.ops.append(op)
        return op

    def _value(self, tensor: Tensor) -> int:
        """The value of a tensor, which may come from an operation that no mode sees."""
        known = self._known.get(id(tensor))
        if known is not None:
            return known
        call = self._call()
        if call is None or not tensor.is_floating_point() or not self.trace.ops:
            return self._new(tensor, None)
        inputs = tuple(value for _, value in call.arguments)
        op = self._record("unseen", inputs)
        op.outputs = (self._new(tensor, op.index),)
        return op.outputs[0]

    def _output(self, tensor: Tensor, op: Op, wholes: list[int]) -> int:
        """The value of a result; ``wholes`` gets that of the tensor that the result was written into."""
        base = tensor._base
        in_place = op.name.endswith("_") and not op.name.endswith("__")
        in_place |= op.given[1].get("out") is not None
        changed = in_place or op.name in ("__iadd__", "__imul__", "__setitem__")
        if changed and base is not None and id(base) in self._known:
            wholes.append(self._new(base, op.index))  # what the tensor is a part of has changed too
        return self._new(tensor, op.index)

    def _new(self, tensor: Tensor, maker: int | None, *, learned: bool = False) -> int:
        shape, floating = tuple(tensor.shape), tensor.is_floating_point()
        self.trace.values.append(Value(shape, floating, maker, learned, tensor))
        self._known[id(tensor)] = len(self.trace.values) - 1
        return self._known[id(tensor)]


def is_linear_layer(module: nn.Module) -> bool:
    """Whether a module says that it is a linear layer, as quantised ones do that keep no plain weight."""
    return all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":  # an attribute such as x.mT
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def _spot() -> Spot | None:
    """The nearest frame that is not torch's own."""
    frame = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith((_TORCH, __name__)):
        if frame.f_globals.get("__name__") == "torch.nn.modules.transformer":
            break
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return None
    code = frame.f_code
    positions = list(code.co_positions())
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return Spot(code, positions[frame.f_lasti // 2], owner if isinstance(owner, nn.Module) else None)
