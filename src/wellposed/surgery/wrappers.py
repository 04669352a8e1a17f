"""Edits of a module that is wrapped later, as peft does with the layers that it adapts.

A LoRA layer calls the layer it wraps, its ``base_layer``, and adds something of its own: an operation that
runs before or after that layer alone would miss it. So the operation stays a child of the wrapped layer, and
is there when the adapters are merged, while its hook moves to what is outermost. That happens when one module
becomes a child of another; torch notifies us of that from the first edit of the process on.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from wellposed.anatomy.subclass import BASE, edited_weights, inner, is_adapted
from wellposed.errors import WrappedModelError

Hooks = Callable[[nn.Module], None]
_watching: list[Any] = []
_refusing: list[Any] = []
_FOLD = (
    "peft adds what it merges to the weight that a layer reads, and where that is W through an edit it would "
    "be lost"
)


def place_of(name: str) -> str | None:
    """The name of the edited module, of the name of an operation in it; None of a copy that does not run."""
    owner, _, behind = name.partition(".inserted_")
    if "original_module" in name.split("."):  # what peft keeps besides the one that it trains
        return None
    return owner.removesuffix(f".{BASE}") if behind else name.rpartition(".")[0]


def follow_wrappers(is_edited: Callable[[nn.Module], bool], hook: Hooks, unhook: Hooks) -> None:
    """From now on, keep hooks on the outermost module around an edited one.

    Args:
        is_edited: whether a module holds an operation.
        hook, unhook: put the hooks of a module's operations on it, and take them off.
    """
    if _watching:
        return

    def see(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(child, torch.jit.ScriptModule):  # its program has the operations in it
            return
        before = parent._modules.get(name)
        if before is not None and is_edited(inner(before)):
            _warn_of_loss(name, before, child, "is gone")
        if child is None or not is_edited(inner(child)):
            return
        if name == BASE and is_adapted(parent):
            unhook(child)
            parent._modules[name] = child  # so that the hooks find what they run
            hook(parent)
        else:
            unhook(child)
            hook(child)

    _watching.append(register_module_module_registration_hook(see))


def _warn_of_loss(name: str, before: nn.Module, after: nn.Module | None, lost: str) -> None:
    kept = after is not None and any(inner(before) is module for module in after.modules())
    if not kept and before is not after:
        warnings.warn(
            f"{name!r}, a {type(before).__name__} with an edit, was replaced by a "
            f"{type(after).__name__}: the edit {lost}. Make it again; wp.edits(model) lists what is left.",
            UserWarning,
            stacklevel=4,
        )


def refuse_adapters() -> None:
    """From now on, refuse adapters of peft around a layer whose weight is edited."""

    def see(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        before = parent._modules.get(name)
        if before is not None and edited_weights(inner(before)):
            _warn_of_loss(name, before, child, "is gone, or in the new weights for good")
        if child is not None and name == BASE and is_adapted(parent) and edited_weights(child):
            raise WrappedModelError(
                f"expected a layer without an edit of its weight to adapt, got a {type(child).__name__} with "
                f"{', '.join(edited_weights(child))} edited: {_FOLD}; call wp.fold(model) before "
                "get_peft_model."
            )

    if not _refusing:
        _refusing.append(register_module_module_registration_hook(see))


def refuse_adapted(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Raise if one of these layers, by name, is adapted by peft: its weight cannot be edited."""
    inside = {id(part) for module in model.modules() if is_adapted(module) for part in module.modules()}
    for name, layer in layers.items():
        if id(layer) in inside:
            raise WrappedModelError(
                f"expected layers that peft has not adapted, got {name}: {_FOLD}; edit the model first, call "
                "wp.fold(model), then get_peft_model."
            )
