"""Watching attention in tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from wellposed.anatomy.model import Block
from wellposed.probes.attention_maps import Source, watching_attention

Maps = list[tuple[int, Tensor, Source]]


def maps_of(found: list[Block], run: Callable[[], Any], images: int = 2) -> tuple[Maps, Any]:
    """What the blocks show while ``run`` runs, and its result."""
    shown: Maps = []
    with watching_attention(found, lambda b, p: shown.append((b.index, p, watch.source)), images) as watch:
        result = run()
    return shown, result


def nothing_is_left() -> bool:
    """No mode and no switch of a watch is on."""
    return not _get_current_function_mode_stack() and torch.backends.mha.get_fastpath_enabled()
