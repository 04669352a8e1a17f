"""The weights of a block's attention, feed-forward and depthwise convolution, and what goes into them.

Libraries name and pack the same three projections in their own ways: one ``qkv``, a ``q`` and a ``kv``,
three layers, one parameter of ``nn.MultiheadAttention``; with biases kept apart from the layer (BEiT, EVA)
or none for the keys; with the weight the other way round (GPT-2). Here they all come out as maps
x -> x W + b, in float64.

The inputs are read off the calls that use the weights: some libraries call the layer, others only
``F.linear`` with its weight, which no hook on the layer would see.
"""

# Shapes: tokens (B', N, D) of B' images or windows, or (1, B' N, D); W (D_in, D_out), b (D_out,).

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from wellposed.anatomy.model import Block
from wellposed.anatomy.projections import OUTPUTS, PROJECTIONS, head_count
from wellposed.anatomy.table import to_tokens
from wellposed.linalg.precision import in_float64
from wellposed.probes.observe import layout_of
from wellposed.text import few

Input = Literal["q", "k", "v", "ffn", "convolution"]
SeeInput = Callable[[Block, Input, Tensor], None]
"""Gets a block, what is made of the tokens (B', N, D), and these.

The convolution's image is (B, D, H, W). What goes into attention keeps the axes that the model gives it, as
(B', H, W, D), and where a model puts the tokens of all images below one another, it is (1, B' N, D).
"""

# Of a gated MLP's two input layers, the one that goes through the activation.
_GATES = ("gate_proj", "fc1_g", "w1")


class _Layer(NamedTuple):
    """A module that maps x to x W + b, with its weight as nn.Linear's (D_out, D_in)."""

    module: nn.Module
    weight: Tensor
    bias: Tensor | None
    source: Tensor  # the parameter itself

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    def map(self) -> "Map":
        return _map(self.weight, self.bias)


class Map(NamedTuple):
    """x -> x W + b."""

    W: Tensor
    b: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.W if self.b is None else x @ self.W + self.b

    def outputs_of(self, head: int, heads: int) -> "Map":
        """The part that makes one head's channels."""
        width = self.W.shape[1] // heads
        part = slice(head * width, (head + 1) * width)
        return Map(self.W[:, part], None if self.b is None else self.b[part])

    def inputs_of(self, head: int, heads: int) -> "Map":
        """The part that reads one head's channels, without the bias, which belongs to no head."""
        width = self.W.shape[0] // heads
        return Map(self.W[head * width : (head + 1) * width], None)


@dataclass(frozen=True)
class AttentionProjections:
    """The projections of one attention module; ``sources`` are the parameters they were read from."""

    heads: int
    q: Map
    k: Map
    v: Map
    out: Map
    sources: dict[str, Tensor]
    remark: str = ""

    def of(self, head: int | None) -> tuple[Map, Map, Map, Map]:
        """q, k, v and out of one head, or of all with None."""
        if head is None:
            return self.q, self.k, self.v, self.out
        q, k, v = (layer.outputs_of(head, self.heads) for layer in (self.q, self.k, self.v))
        return q, k, v, self.out.inputs_of(head, self.heads)


@dataclass(frozen=True)
class FeedForward:
    """First and last layer of an MLP; of a gated one, ``first`` is the one that is not the gate."""

    first: Map
    last: Map
    source: Tensor
    remark: str = ""


def attention_projections(block: Block) -> AttentionProjections:
    """The projections of the block's attention. Raises ValueError where they are not the known ones."""
    name, attention = block.attention()
    if isinstance(attention, nn.MultiheadAttention):
        return _of_multihead_attention(name, attention)
    for pattern in PROJECTIONS:
        layers = {letters: _linear(attention, path) for letters, path in pattern.items()}
        if all(layer is not None for layer in layers.values()):
            break
    else:
        raise _unknown(name, attention, f"the projections {_patterns()}")
    out = next((layer for path in OUTPUTS if (layer := _linear(attention, path))), None)
    if out is None:
        raise _unknown(name, attention, f"the output projection {' or '.join(OUTPUTS)}")
    maps: dict[str, Map] = {}
    sources: dict[str, Tensor] = {}
    for letters, layer in layers.items():
        assert layer is not None
        # Of a parametrization the weight is another tensor at each look: it is not known who uses it.
        if is_parametrized(layer.module):
            raise ValueError(f"expected plain weights in {name}, got a parametrization; remove it first.")
        bias = _bias(attention, letters, layer)
        sources[letters] = layer.source
        maps |= _unpacked(letters, layer.weight, bias)
    # CaiT lets its heads talk.
    remark = "the heads are mixed after the softmax" if _linear(attention, "proj_w") else ""
    out_map = out.map()
    heads = head_count(name, attention)
    if isinstance(heads, str):
        raise ValueError(heads)
    widths = [layer.W.shape[1] for layer in maps.values()]
    if len({*widths[:2]}) > 1 or widths[2] != len(out_map.W):
        raise ValueError(
            f"expected queries, keys and values of one width for each head in {name}, got "
            f"{', '.join(map(str, widths))} channels of them for an output projection of {len(out_map.W)}: "
            "heads share keys, or its projections are packed in parts of different widths."
        )
    return AttentionProjections(heads, maps["q"], maps["k"], maps["v"], out_map, sources, remark)


def feed_forward(block: Block) -> FeedForward | str:
    """The two layers of the block's channel MLP, or why there is none."""
    place = block.place("mlp.middle")
    if isinstance(place, str):
        return f"no MLP over several tokens: {place}"
    path = place.name.removeprefix(block.name).strip(".").rpartition(".")[0]
    parent, child = block.module.get_submodule(path), place.owner
    # In BERT and its kin a module with a norm and a dropout stands around each of the two layers.
    find = _layer if _layer(child) is not None else _only_layer
    last = find(child)
    while path and last is not None and _only_layer(parent) is not None:
        path, child, find = path.rpartition(".")[0], parent, _only_layer
        parent = block.module.get_submodule(path)
    layers = {
        name: layer
        for name, other in parent.named_children()
        if other is not child and (layer := find(other)) is not None
    }
    if last is not None:
        hidden = last.inputs
        plain = [name for name, layer in layers.items() if layer.outputs == hidden]
        packed = [name for name, layer in layers.items() if layer.outputs == 2 * hidden]
        ungated = [name for name in plain if name not in _GATES]
        last_map = last.map()
        if len(plain) == 1:
            first = layers[plain[0]]
            return FeedForward(first.map(), last_map, first.source, _between(parent))
        if len(plain) == 2 and len(ungated) == 1:
            first = layers[ungated[0]]
            return FeedForward(first.map(), last_map, first.source, f"gated: W1 is {ungated[0]}")
        if len(packed) == 1:
            first = layers[packed[0]]
            # timm's GluMlp takes the gate from either half, everyone else from the first.
            half = slice(0, hidden) if getattr(parent, "gate_last", False) else slice(hidden, None)
            first_map = _map(first.weight[half], None if first.bias is None else first.bias[half])
            remark = f"gated: W1 is the half of {packed[0]} that is not the gate"
            return FeedForward(first_map, last_map, first.source, remark)
    raise _unknown(place.name.rpartition(".")[0], parent, "the first linear layer of an MLP")


def depthwise_convolution(block: Block) -> nn.Conv2d | str | None:
    """The convolution that mixes the block's tokens, None where they are mixed otherwise.

    A sentence where it does not keep the image's size with a border of zeros.
    """
    if "mixer" not in block.row.roles:
        return None
    for module in block.module.modules():
        if isinstance(module, nn.Conv2d) and module.groups == module.in_channels == module.out_channels:
            sizes = zip(module.dilation, module.kernel_size, strict=True)
            same = tuple(step * (size - 1) / 2 for step, size in sizes)
            keeps = module.stride == (1, 1) and module.padding_mode == "zeros"
            return module if keeps and module.padding in ("same", same) else f"{module} changes the size"
    return None


@contextlib.contextmanager
def watching_inputs(sources: list[tuple[Block, dict[str, Tensor]]], see: SeeInput) -> Iterator[None]:
    """Inside, every call that uses one of the weights shows its input to ``see``.

    Args:
        sources: for each block, weights by what they make: ``qkv``, ``q``, ``kv``, ``ffn``, ``convolution``.
    """
    watched: dict[int, tuple[Block, str]] = {}
    for block, weights in sources:
        for kind, weight in weights.items():
            if id(weight) in watched:
                raise ValueError(
                    f"{block.name} and {watched[id(weight)][0].name} share their weights, so their inputs "
                    "cannot be told apart; choose one of them with blocks=."
                )
            watched[id(weight)] = (block, kind)
    with _Calls(watched, see):
        yield


class _Calls(TorchFunctionMode):
    """Looks at the calls that use a watched weight."""

    def __init__(self, watched: dict[int, tuple[Block, str]], see: SeeInput) -> None:
        super().__init__()
        self.watched, self.see = watched, see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear or func is functional.conv2d:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if found := self.watched.get(id(weight)):
                self._tell(*found, args[0] if args else kwargs["input"])
        elif func is torch.addmm:
            if found := self.watched.get(id(args[2] if len(args) > 2 else kwargs["mat2"])):
                self._tell(*found, (args[1] if len(args) > 1 else kwargs["mat1"])[None])
        elif func is functional.multi_head_attention_forward:
            weight = args[5] if len(args) > 5 else kwargs["in_proj_weight"]
            if found := self.watched.get(id(weight)):
                for letter, x in zip("qkv", _first_three(args, kwargs), strict=True):
                    # nn.MultiheadAttention has put the tokens first by now, whatever it was given.
                    self.see(found[0], _input(letter), x.detach().transpose(0, 1))
        return func(*args, **kwargs)

    def _tell(self, block: Block, kind: str, x: Tensor) -> None:
        x = x.detach()
        if kind in ("ffn", "convolution"):
            self.see(block, _input(kind), x if kind == "convolution" else to_tokens(x, layout_of(block)))
            return
        # Attention modules take (B, N, D) or a grid, class attention asks with (B, D).
        tokens = x[:, None] if x.ndim == 2 else x
        for letter in kind:
            self.see(block, _input(letter), tokens)


def _first_three(args: Any, kwargs: Any) -> list[Tensor]:
    return [*args[:3], *(kwargs[name] for name in ("query", "key", "value")[len(args[:3]) :])]


def _input(kind: str) -> Input:
    return kind  # type: ignore[return-value]


def _of_multihead_attention(name: str, attention: nn.MultiheadAttention) -> AttentionProjections:
    packed = attention.in_proj_weight
    if packed is None:
        raise _unknown(name, attention, "in_proj_weight, as with keys and values of the queries' width")
    maps = _unpacked("qkv", packed, attention.in_proj_bias)
    out = _map(attention.out_proj.weight, attention.out_proj.bias)
    return AttentionProjections(
        attention.num_heads, maps["q"], maps["k"], maps["v"], out, sources={"qkv": packed}
    )


def _bias(attention: nn.Module, letters: str, layer: _Layer) -> Tensor | None:
    biases = [getattr(attention, f"{letter}_bias", None) for letter in "qkv"]
    if letters == "qkv" and layer.bias is None and isinstance(biases[0], Tensor):
        q = biases[0]
        parts = [b if isinstance(b, Tensor) else torch.zeros_like(q) for b in biases]
        return torch.cat([part.detach() for part in parts])
    if letters == "qkv" and layer.bias is not None and hasattr(attention, "logit_scale"):
        # torchvision's Swin V2 sets the keys' part of the bias to zero when it runs.
        q, k, v = layer.bias.detach().chunk(3)
        return torch.cat([q, torch.zeros_like(k), v])
    return layer.bias


def _unpacked(letters: str, weight: Tensor, bias: Tensor | None) -> dict[str, Map]:
    count = len(letters)
    biases: Any = [None] * count if bias is None else bias.chunk(count)
    return {
        letter: _map(part, b) for letter, part, b in zip(letters, weight.chunk(count), biases, strict=True)
    }


def _map(weight: Tensor, bias: Tensor | None) -> Map:
    return Map(in_float64(weight).mT, None if bias is None else in_float64(bias))


def _linear(module: nn.Module, path: str) -> _Layer | None:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return _layer(found)


def _layer(module: Any) -> _Layer | None:
    if isinstance(module, nn.Linear):
        return _Layer(module, module.weight, module.bias, module.weight)
    # The Conv1D of transformers: its weight is (D_in, D_out) = (nx, nf).
    sizes = getattr(module, "nx", None), getattr(module, "nf", None)
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and tuple(weight.shape) == sizes:
        return _Layer(module, weight.mT, module.bias, weight)
    return None


def _only_layer(module: nn.Module) -> _Layer | None:
    """The linear layer in a module that holds one."""
    layers = [layer for part in module.modules() if (layer := _layer(part)) is not None]
    has_scale_behind = any(isinstance(part, _BatchNorm) for part in module.modules())
    return layers[0] if len(layers) == 1 and not has_scale_behind else None


def _between(mlp: nn.Module) -> str:
    names = [name for name, module in mlp.named_children() if isinstance(module, nn.Conv2d)]
    return f"the linear form leaves out {', '.join(names)}" if names else ""


def _patterns() -> str:
    return " or ".join(f"({', '.join(pattern)})" for pattern in PROJECTIONS[:3])


def _unknown(name: str, module: nn.Module, wanted: str) -> ValueError:
    def those(is_one: Callable[[nn.Module], bool]) -> str:
        return few(path for path, child in module.named_modules() if path and is_one(child))

    found = "no linear layer"
    if linears := those(lambda child: _layer(child) is not None):
        found = f"the linear layers {linears}"
    elif convolutions := those(lambda child: isinstance(child, nn.Conv1d | nn.Conv2d | nn.Conv3d)):
        found = f"the convolutions {convolutions}"
    return ValueError(
        f"expected {wanted} in {name} ({type(module).__name__}), found {found} in it; name the layers as one "
        "of the libraries does."
    )
