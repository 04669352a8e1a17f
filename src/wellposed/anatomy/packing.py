"""Whether a weight that packs several projections packs them one after another, as it is read.

Others put them side by side for each head (MaxViT, TinyViT), or give them different widths, under the same
names. So a copy of the block with random weights runs on what comes there, and gradients tell which rows of
the weight reach the values, which the queries and the keys. Of attention that is not fused they reach the
logits, where nobody can tell one from the other.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from wellposed.anatomy.cores import Core, reaching
from wellposed.anatomy.model import Block, no_attention
from wellposed.anatomy.projections import ProjectionLayer, projection_layers
from wellposed.anatomy.queries import Twin, is_of_library, kind_key, see_calls
from wellposed.anatomy.subclass import inner, quantised, read_plainly

_NO_RUN = (
    "it takes a run of the model to see how its weight packs queries, keys and values: give an input as "
    "example=, and edit the model before it goes to the meta device"
)
_NOT_REACHED = "the example did not reach it, so that it is not known how its weight packs its projections"
_NO_CORE = "no softmax over tokens and product with values was seen in it"

_OF_KINDS: dict[str, str] = {}
_OF_OWN: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def find_projections(
    model: nn.Module, found: list[Block], example: Any = None
) -> dict[int, list[ProjectionLayer] | str]:
    """The layers of q, k and v of each block, by its index, or why they are not known."""
    wrong = packed_otherwise(model, found, example)
    return {b.index: b.row.refused or wrong.get(b.index) or _layers(b) for b in found}


def packed_otherwise(model: nn.Module, found: list[Block], example: Any = None) -> dict[int, str]:
    """Of the blocks whose weights pack projections in another way, or in one that is not known, why.

    It runs the model up to the first block of each kind that it has not seen.
    """
    reasons = {block.index: _known(block) for block in found if not block.row.refused}
    missing = [block for block in found if reasons.get(block.index, "") is None]

    def see(block: Block, args: Any, kwargs: dict[str, Any]) -> None:
        reason = _seen(block, args, kwargs)
        if is_of_library(block.module):
            _OF_KINDS[kind_key(block)] = reason
        else:
            _OF_OWN[block.module] = reason

    no_run = bool(missing) and see_calls(model, missing, example, see)
    for block in missing:
        known = _known(block)
        reasons[block.index] = (_NO_RUN if no_run else _NOT_REACHED) if known is None else known
    return {index: reason for index, reason in reasons.items() if reason}


def _known(block: Block) -> str | None:
    """What was seen of such a block; nothing is to be seen where no weight packs several projections."""
    layers = _layers(block)
    if isinstance(layers, str) or not _packed(layers):
        return ""
    for each in _packed(layers):
        rows, parts = len(each.weight), len(each.packed)
        if rows % parts:
            return f"the {rows} rows of {each.name} are not {parts} projections of one width"
    return _OF_KINDS.get(kind_key(block)) if is_of_library(block.module) else _OF_OWN.get(block.module)


def _layers(block: Block) -> list[ProjectionLayer] | str:
    if reason := no_attention(block):
        return reason
    try:
        found = projection_layers(*block.attention())
    except ValueError as none:
        return str(none)
    for each in () if isinstance(found, str) else found:
        if reason := quantised(each.weight):
            return f"a weight of its attention {reason}; edit the model and call wp.fold(model) before"
    return found


def _packed(layers: list[ProjectionLayer]) -> list[ProjectionLayer]:
    """Those that pack several; of ``nn.MultiheadAttention`` it is known how."""
    packed = [each for each in layers if len(each.packed) > 1]
    return [each for each in packed if not isinstance(inner(each.layer), nn.MultiheadAttention)]


def _seen(block: Block, args: Any, kwargs: dict[str, Any]) -> str:
    path = block.attention()[0].removeprefix(block.name).lstrip(".")
    try:
        twin = Twin(block, args, kwargs)
        for module in twin.module.modules():
            read_plainly(module)
        attention = twin.module.get_submodule(path)
        layers = projection_layers(block.attention()[0], attention)
        assert not isinstance(layers, str)
        weights = [(each, each.weight.requires_grad_()) for each in _packed(layers)]
        cores = [core for core in twin.run(gradients=True).cores if id(attention) in core.within]
    except Exception as error:  # whatever a foreign block does with a copy of its input
        return f"a copy of it with random weights could not be run: {error}"
    if not cores:
        return _NO_CORE
    wrong = [each.name for each, weight in weights if not any(_is_so(core, each, weight) for core in cores)]
    return f"the weight of {wrong[0]} packs them otherwise than one after another" if wrong else ""


def _is_so(core: Core, each: ProjectionLayer, weight: Tensor) -> bool:
    """Whether the rows of each part of the weight reach what the part is said to make, and only that."""
    made: dict[str, Tensor | None] = {"v": core.value}
    if core.query is not None:
        made |= {"q": core.query, "k": core.key}
    else:
        made["qk"] = core.logits
    for letters, tensor in made.items():
        if tensor is None:
            continue
        with torch.enable_grad():
            (mask,) = reaching(tensor, [weight])
        rows = mask.flatten(1).any(1).chunk(len(each.packed))
        if [bool(part.any()) for part in rows] != [letter in letters for letter in each.packed]:
            return False
    return True
