"""Watching attention in tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from wellposed.anatomy.model import Block, blocks
from wellposed.probes.attention_maps import Source, watching_attention
from zoo import output

Maps = list[tuple[int, Tensor, Source]]


def maps_of(found: list[Block], run: Callable[[], Any], images: int = 2) -> tuple[Maps, Any]:
    """What the blocks show while ``run`` runs, and its result."""
    shown: Maps = []
    with watching_attention(found, lambda b, p: shown.append((b.index, p, watch.source)), images) as watch:
        result = run()
    return shown, result


def maps_by_block(model: nn.Module, x: Tensor) -> dict[int, Tensor]:
    """(images, W, H, N, M) of each block, of a model of the zoo."""
    shown, _ = maps_of(blocks(model), lambda: output(model, x))
    return {index: p for index, p, _ in shown}


def nothing_is_left() -> bool:
    """No mode and no switch of a watch is on."""
    return not _get_current_function_mode_stack() and torch.backends.mha.get_fastpath_enabled()
