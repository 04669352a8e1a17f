"""The layers that make the queries, keys and values of an attention, by the names that libraries give them.

Libraries name and pack the same three projections in their own ways: one ``qkv``, a ``q`` and a ``kv``, three
layers, one parameter of ``nn.MultiheadAttention``.
"""

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from wellposed.anatomy.model import join_names
from wellposed.anatomy.subclass import inner

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
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "h")
"""What modules call the number of their heads."""


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
