"""Putting an operation on tokens before or after a submodule, and taking it out again.

The operation is a child of that submodule, run by a hook that is a function of this module: so it
moves, copies, pickles and compiles with the model, and its parameters are in the state dict. The query of
``nn.MultiheadAttention`` is no submodule's output; there the operation is run by the module's class.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from wellposed.anatomy.loops import open_loop
from wellposed.anatomy.model import Place
from wellposed.anatomy.subclass import close_packed_query, inner, mark, open_packed_query, original, unmark
from wellposed.anatomy.table import Layout, from_tokens, to_tokens
from wellposed.nn import ContextBroadcast
from wellposed.nn.operation import Operation
from wellposed.surgery.record import Setting
from wellposed.surgery.weights import WeightEdit
from wellposed.surgery.wrappers import follow_wrappers

_COMPILED = (
    "graying in compiled or exported code got padding, and how many tokens are left is not known there; give "
    "it texts of one length without padding, or run the model eagerly."
)
_CHILD = {"before": "inserted_before", "after": "inserted_after", "query": "inserted_query"}


class Inserted(Operation):
    """An operation on (B, N, D) tokens that meets them in another layout.

    ``layout=None`` passes the tensor as it is. Of a tuple the first element is taken. ``padding`` is there
    while a block runs that was given a mask; see :mod:`wellposed.surgery.padding`.
    """

    padding: Tensor | None = None

    def __init__(self, op: nn.Module, kind: str, where: str, layout: Layout | None) -> None:
        super().__init__()
        self.op = op
        self.kind = kind
        self.where = where
        self.layout = layout

    @property
    def settings(self) -> Mapping[str, Setting]:
        """The arguments of the edit, besides its place."""
        return cast(Mapping[str, Setting], original(self.op).settings)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        follow_wrappers(_is_edited, _hook, _unhook)

    def forward(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return (self._apply_op(value[0]), *value[1:])
        return self._apply_op(value)

    def _apply_op(self, x: Tensor) -> Tensor:
        if self.layout is None:
            return cast(Tensor, self.op(x))
        tokens = to_tokens(x, self.layout)
        out = self.op(tokens) if self.padding is None else apply_unpadded(self.op, tokens, self.padding)
        return from_tokens(out, x, self.layout)


def apply_unpadded(op: nn.Module, tokens: Tensor, padding: Tensor) -> Tensor:
    """An operation on the tokens (B, N, D) of each text without its padding (B, N), which stays as it is."""
    if tokens.shape[:-1] != padding.shape:
        raise ValueError(
            f"expected {tuple(padding.shape)} tokens as the mask has, got {tuple(tokens.shape[:-1])}: which "
            "of them are padding cannot be told."
        )
    if isinstance(original(op), ContextBroadcast):
        out: Tensor = op(tokens, padding)
        return out
    if torch.compiler.is_compiling():
        refuse_if(padding.any(), _COMPILED)
        return op(tokens)  # type: ignore[no-any-return]
    if not padding.any():
        return op(tokens)  # type: ignore[no-any-return]
    out, lengths = tokens.clone(), (~padding).sum(1)
    for length in sorted(set(lengths.tolist())):
        if length:
            chosen = ~padding & (lengths == length)[:, None]
            out[chosen] = op(tokens[chosen].reshape(-1, length, tokens.shape[-1])).flatten(0, 1)
    return out


def refuse_if(condition: Tensor | bool, message: str) -> None:
    """Raise where a condition holds; compiled code checks it when it runs."""
    if isinstance(condition, Tensor) and torch.compiler.is_compiling():
        torch._assert_async(~condition, message)
    elif condition:
        raise ValueError(message)


def run_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: the first argument goes through the inserted operation."""
    inserted = cast(Inserted, inner(module).inserted_before)
    if args:
        return (inserted(args[0]), *args[1:]), kwargs
    name, value = next(iter(kwargs.items()))
    return args, {**kwargs, name: inserted(value)}


def run_after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook: the output goes through the inserted operation."""
    return cast(Inserted, inner(module).inserted_after)(output)


def scales(model: nn.Module) -> dict[str, Tensor]:
    """What edits keep in the state dict, by name: the scales of CB_S, the tensors of weight edits."""
    return {
        f"{name}.{key}": tensor
        for name, module in model.named_modules()
        if isinstance(module, Inserted | WeightEdit)
        for key, tensor in module.state_dict(keep_vars=True).items()
    }


def inserted_at(place: Place) -> Inserted | None:
    """What was inserted at a place, if anything."""
    found = inner(place.owner)._modules.get(_CHILD[place.side])
    found = None if found is None else original(found)
    return found if isinstance(found, Inserted) else None


def insert(place: Place, inserted: Inserted) -> None:
    open_loop(place.owner)
    owner = inner(place.owner)
    mark(owner)
    owner.add_module(_CHILD[place.side], inserted.train(owner.training))
    if place.side == "query":
        open_packed_query(owner)
    else:
        _unhook(place.owner)
        _hook(place.owner)
    follow_wrappers(_is_edited, _hook, _unhook)


def _is_edited(module: nn.Module) -> bool:
    return any(_CHILD[side] in module._modules for side in ("before", "after"))


def _hook(module: nn.Module) -> None:
    """Run the operations of a module, or of the one that it wraps, before and after it."""
    if "inserted_before" in inner(module)._modules:
        module.register_forward_pre_hook(run_before, with_kwargs=True)
    if "inserted_after" in inner(module)._modules:
        module.register_forward_hook(run_after)


def _unhook(module: nn.Module) -> None:
    # By the function: a handle would not survive a copy of the model.
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is run_before]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    for key in [key for key, hook in module._forward_hooks.items() if hook is run_after]:
        del module._forward_hooks[key]


def take_out(owner: nn.Module) -> None:
    """Remove whatever was inserted at a module, and its hooks there or on what wraps it."""
    close_packed_query(owner)
    for child in _CHILD.values():
        found = owner._modules.get(child)
        if found is not None and isinstance(original(found), Inserted):
            delattr(owner, child)
            unmark(owner)
    _unhook(owner)
