"""Modules that peft has wrapped: an adapted layer calls its ``base_layer`` and adds something of its own."""

from torch import nn

BASE = "base_layer"


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer of peft around another one."""
    return hasattr(type(module), "get_base_layer")


def inner(module: nn.Module) -> nn.Module:
    """The layer inside an adapted one; another module is its own."""
    while is_adapted(module) and isinstance(wrapped := getattr(module, BASE, None), nn.Module):
        module = wrapped
    return module


def original(module: nn.Module) -> nn.Module:
    """A module of which peft trains a copy (``modules_to_save``); another one is its own."""
    kept = module._modules.get("original_module")
    return module if kept is None else kept
