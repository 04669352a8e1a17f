"""Putting an operation on tokens before or after a submodule, and taking it out again.

The operation is a child of that submodule, run by a hook that is a function of this module: so it
moves, copies, pickles and compiles with the model, and its parameters are in the state dict. The query of
``nn.MultiheadAttention`` is no submodule's output; there the operation is run by the module's class.
"""

from typing import Any, cast

from torch import Tensor, nn

from wellposed.anatomy.layout import from_tokens, to_tokens
from wellposed.anatomy.marked import mark, unmark
from wellposed.anatomy.model import Place
from wellposed.anatomy.packed_query import close_packed_query, open_packed_query
from wellposed.anatomy.rows import Layout

_CHILD = {"before": "inserted_before", "after": "inserted_after", "query": "inserted_query"}


class Inserted(nn.Module):
    """An operation on (B, N, D) tokens that meets them in another layout.

    ``layout=None`` passes the tensor as it is. Of a tuple the first element is taken.
    """

    def __init__(self, op: nn.Module, kind: str, where: str, layout: Layout | None) -> None:
        super().__init__()
        self.op = op
        self.kind = kind
        self.where = where
        self.layout = layout

    def forward(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return (self._apply_op(value[0]), *value[1:])
        return self._apply_op(value)

    def _apply_op(self, x: Tensor) -> Tensor:
        if self.layout is None:
            return cast(Tensor, self.op(x))
        return from_tokens(self.op(to_tokens(x, self.layout)), x, self.layout)


def run_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: the first argument goes through the inserted operation."""
    inserted = cast(Inserted, module.inserted_before)
    if args:
        return (inserted(args[0]), *args[1:]), kwargs
    name, value = next(iter(kwargs.items()))
    return args, {**kwargs, name: inserted(value)}


def run_after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook: the output goes through the inserted operation."""
    return cast(Inserted, module.inserted_after)(output)


def inserted_at(place: Place) -> Inserted | None:
    """What was inserted at a place, if anything."""
    found = getattr(place.owner, _CHILD[place.side], None)
    return found if isinstance(found, Inserted) else None


def insert(place: Place, inserted: Inserted) -> None:
    mark(place.owner)
    place.owner.add_module(_CHILD[place.side], inserted.train(place.owner.training))
    if place.side == "before":
        place.owner.register_forward_pre_hook(run_before, with_kwargs=True)
    elif place.side == "query":
        open_packed_query(place.owner)
    else:
        place.owner.register_forward_hook(run_after)


def take_out(owner: nn.Module) -> None:
    """Remove whatever was inserted at a module."""
    close_packed_query(owner)
    for child in _CHILD.values():
        if isinstance(getattr(owner, child, None), Inserted):
            delattr(owner, child)
            unmark(owner)
    # By the function: a handle would not survive a copy of the model.
    for key in [key for key, hook in owner._forward_pre_hooks.items() if hook is run_before]:
        del owner._forward_pre_hooks[key]
        owner._forward_pre_hooks_with_kwargs.pop(key, None)
    for key in [key for key, hook in owner._forward_hooks.items() if hook is run_after]:
        del owner._forward_hooks[key]
