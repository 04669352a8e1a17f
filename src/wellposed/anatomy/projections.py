"""The layers that make the queries, keys and values of an attention, by the names that libraries give them.

Libraries name and pack the same three projections in their own ways: one ``qkv``, a ``q`` and a ``kv``, three
layers, one parameter of ``nn.MultiheadAttention``. Most pack them one after another. Others put them side by
side for each head (MaxViT, TinyViT), or give them different widths, under the same names. So a copy of the
block with random weights runs on what comes there, and gradients tell which rows of the weight reach the
values, which the queries and the keys. Of attention that is not fused they reach the logits, where nobody can
tell one from the other.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from wellposed.anatomy.cores import Core, cores, reaching
from wellposed.anatomy.model import Block, join_names, no_attention
from wellposed.anatomy.queries import HEAD_COUNTS, Memory, Twin
from wellposed.anatomy.subclass import inner, quantised, read_plainly

# Which of q, k and v a layer makes, stacked in this order, and its path in the attention module.
PROJECTIONS: tuple[dict[str, str], ...] = (
    {"qkv": "qkv"},
    {"q": "q", "kv": "kv"},
    {"q": "q", "k": "k", "v": "v"},
    {"q": "q_proj", "k": "k_proj", "v": "v_proj"},
    {"q": "query", "k": "key", "v": "value"},
    {"q": "attention.query", "k": "attention.key", "v": "attention.value"},
    {"q": "self.query", "k": "self.key", "v": "self.value"},
    {"q": "q_lin", "k": "k_lin", "v": "v_lin"},
    {"q": "to_q", "k": "to_k", "v": "to_v"},
    {"q": "wq", "k": "wk", "v": "wv"},
    {"q": "to_q", "kv": "to_kv"},
    {"qkv": "to_qkv"},
    {"qkv": "attention.qkv"},
    {"qkv": "c_attn"},
)
OUTPUTS = (
    *("proj", "o_proj", "out_proj", "output.dense", "out_lin"),
    *("to_out", "to_out.0", "wo", "dense", "c_proj"),
)


@dataclass(frozen=True)
class ProjectionLayer:
    """A layer and what it makes.

    Args:
        name: of the layer in the model.
        layer: it may be wrapped by an adapter.
        parameter: the name of its weight.
        packed: which of q, k and v the rows of the weight make, in their order.
    """

    name: str
    layer: nn.Module
    parameter: str
    packed: str

    @property
    def weight(self) -> Tensor:
        return cast(Tensor, getattr(inner(self.layer), self.parameter))


def projection_layers(name: str, attention: nn.Module) -> list[ProjectionLayer] | str:
    """The layers of q, k and v of an attention module, or why they are not known."""
    if isinstance(attention, nn.MultiheadAttention):
        if attention.in_proj_weight is None:
            return "its keys or values have another width than its queries (kdim, vdim)"
        return [ProjectionLayer(name, attention, "in_proj_weight", "qkv")]
    for pattern in PROJECTIONS:
        found = {packed: linear_at(attention, path) for packed, path in pattern.items()}
        if all(layer is not None for layer in found.values()):
            return [
                ProjectionLayer(join_names(name, pattern[packed]), layer, "weight", packed)
                for packed, layer in found.items()
                if layer is not None
            ]
    linears = [path for path, child in attention.named_modules() if path and isinstance(child, nn.Linear)]
    known = " or ".join("(" + ", ".join(pattern.values()) + ")" for pattern in PROJECTIONS[:4])
    there = "the linear layers " + ", ".join(linears) if linears else "no linear layer"
    return (
        f"expected the projections {known} in {name} ({type(attention).__name__}), found {there} in it; name "
        "the layers as one of the libraries does"
    )


def output_layer(name: str, attention: nn.Module) -> tuple[str, nn.Module] | str:
    """The layer after the heads and its name, or why it is not known."""
    for path in OUTPUTS:
        if (layer := linear_at(attention, path)) is not None:
            return join_names(name, path), layer
    return f"expected the output projection {' or '.join(OUTPUTS)} in {name} ({type(attention).__name__})"


def head_count(name: str, attention: nn.Module) -> int | str:
    """How many heads an attention has, or why that is not known."""
    for owner in (attention, getattr(attention, "attention", None), getattr(attention, "self", None)):
        for attribute in HEAD_COUNTS:
            if isinstance(count := getattr(owner, attribute, None), int):
                return count
    names = " or ".join(HEAD_COUNTS)
    return f"expected the number of heads as {names} in {name} ({type(attention).__name__})"


def linear_at(module: nn.Module, path: str) -> nn.Module | None:
    """The linear layer at a path, with an adapter around it if it has one; None where there is none."""
    found: nn.Module | None = module
    for name in path.split("."):
        found = getattr(found, name, None)
        if not isinstance(found, nn.Module):
            return None
    return found if found is not None and isinstance(inner(found), nn.Linear) else None


# How a weight packs several projections

_NO_RUN = (
    "it takes a run of the model to see how its weight packs queries, keys and values: give an input as "
    "example=, and edit the model before it goes to the meta device"
)
_NOT_REACHED = "the example did not reach it, so that it is not known how its weight packs its projections"
_NO_CORE = "no softmax over tokens and product with values was seen in it"

_KINDS: dict[str, str] = {}
_PACKINGS: Memory[str] = Memory(lambda: _KINDS)


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
    no_run = bool(missing) and _PACKINGS.run(model, missing, example, _seen)
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
    return _PACKINGS.of(block.module)


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


def _seen(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    path = block.attention()[0].removeprefix(block.name).lstrip(".")
    try:
        twin = Twin(block, args, kwargs)
        for module in twin.module.modules():
            read_plainly(module)
        attention = twin.module.get_submodule(path)
        layers = projection_layers(block.attention()[0], attention)
        assert not isinstance(layers, str)
        weights = [(each, each.weight.requires_grad_()) for each in _packed(layers)]
        seen = [core for core in cores(twin.run(gradients=True)) if core.is_within(attention)]
    except Exception as error:  # whatever a foreign block does with a copy of its input
        return f"a copy of it with random weights could not be run: {error}"
    if not seen:
        return _NO_CORE
    wrong = [each.name for each, weight in weights if not any(_is_so(core, each, weight) for core in seen)]
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
