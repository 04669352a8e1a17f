"""Which blocks an edit applies to.

Blocks that were named must all take the edit. With ``blocks=None`` those that can take it do (CaiT's
class-attention blocks have no tokens to broadcast, say); if none can, the reasons are the error.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from wellposed.anatomy.model import Block, BlockSelection, blocks, refusal, select
from wellposed.errors import NoMeaningError
from wellposed.text import few

_Target = TypeVar("_Target")


def choose(
    model: nn.Module,
    selection: BlockSelection,
    target: Callable[[Block], _Target | str],
    edit: str,
    example: Any = None,
) -> list[tuple[Block, _Target]]:
    """The selected blocks with ``target(block)``, which returns a sentence where there is none."""
    found: list[tuple[Block, _Target | str]] = [
        (block, block.row.refused or target(block)) for block in select(blocks(model, example), selection)
    ]
    chosen = [(block, t) for block, t in found if not isinstance(t, str)]
    refused = [(block, t) for block, t in found if isinstance(t, str)]
    if refused and (selection is not None or not chosen):
        if all(block.row.refused for block, _ in refused):
            raise refusal([block for block, _ in refused])
        reasons = dict.fromkeys(f"{type(block.module).__name__}: {reason}" for block, reason in refused)
        names = few((block.name for block, _ in refused), 3)
        raise NoMeaningError(
            f"{edit} has no meaning for {names} ({'; '.join(reasons)}).",
            tuple(dict.fromkeys(reason for _, reason in refused)),
        )
    return chosen
