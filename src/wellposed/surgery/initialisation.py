"""Initialisations of a model's linear layers, in place.

Per head, with the queries q = x Q, the keys k = x K, the values v = x V and the output o = h O of attention:

- ``"mimetic"`` (arXiv 2305.09828): Q K^T is the best approximation of its rank to alpha Z + beta I, and
  V O = alpha Z - beta I over all heads, as trained models have it. Other layers stay.
- ``"skipless"`` (arXiv 2510.00345), for training without skips: Q K^T as above, V = c U and O = c W^T with
  orthogonal U and W, so that V O has equal singular values; the MLP's weights are orthogonal.
- ``"xavier"``, ``"torch"``, ``"timm"``: every linear layer by Glorot's uniform law, by PyTorch's default, or
  by a truncated normal of deviation 0.02.

Z has entries N(0, 1/D). Biases of the layers that are drawn become zero, but for ``"torch"``.
"""

# Shapes: weights are (D_out, D_in), as layers keep them; of maps x -> x W they are the transposes.

import math
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import Block, BlockSelection, join_names, refuse_wrapped, select
from wellposed.anatomy.model import blocks as all_blocks
from wellposed.anatomy.projections import ProjectionLayer, find_projections, head_count, output_layer
from wellposed.anatomy.subclass import edited_weights, inner
from wellposed.surgery.choose import choose

Scheme = Literal["skipless", "mimetic", "torch", "timm", "xavier"]
MIMETIC = {"alpha": 0.7, "beta": 0.7, "output_alpha": 0.4, "output_beta": 0.4}
SKIPLESS = {"alpha": 2.0, "beta": 0.6, "c": 3.0}


def initialise(
    model: nn.Module,
    scheme: Scheme,
    *,
    seed: int | None = None,
    blocks: BlockSelection = None,
    example: Any = None,
    **constants: float,
) -> list[str]:
    """Draw the weights of a model's blocks again, in place. It is no edit: nothing restores what was there.

    Args:
        model: any transformer, not yet compiled, sharded or replicated.
        scheme: ``"skipless"``, ``"mimetic"``, ``"torch"``, ``"timm"`` or ``"xavier"``.
        seed: of the draws; None takes them from torch's generator.
        blocks: an index, a slice, several indices, or None for every block that has such layers.
        example: an input to run your own model on, once, to find its blocks; see
            :func:`wellposed.anatomy.blocks`. Not needed for timm, transformers and torchvision.
        constants: of ``"skipless"``: alpha=2, beta=0.6, c=3 (the paper's for a ViT-B; 1.8, 1 and 3 for a
            ViT-S); of ``"mimetic"``: alpha=0.7, beta=0.7, output_alpha=0.4, output_beta=0.4.

    Returns:
        The names of the layers that were drawn.

    >>> import timm, wellposed as wp
    >>> model = timm.create_model("vit_tiny_patch16_224")
    >>> wp.initialise(model, "mimetic", seed=0, blocks=0)
    ['blocks.0.attn.qkv', 'blocks.0.attn.proj']
    """
    refuse_wrapped(model)
    if any(edited_weights(module) for module in model.modules()):
        raise ValueError(
            "expected plain weights, got a model that reads some through an edit; wp.restore(model) before "
            "drawing them again, and edit it after."
        )
    if scheme not in get_args(Scheme):
        raise ValueError(f"scheme must be one of {', '.join(get_args(Scheme))}, got {scheme!r}.")
    known = {"skipless": SKIPLESS, "mimetic": MIMETIC}.get(scheme, {})
    if unknown := constants.keys() - known.keys():
        has = f"takes {', '.join(known)}" if known else "takes no constants"
        raise TypeError(f"scheme {scheme!r} {has}, got {', '.join(sorted(unknown))}.")
    values = known | constants
    target: Callable[[Block], Any] = _linear_layers
    if scheme in ("skipless", "mimetic"):
        projections = find_projections(model, select(all_blocks(model, example), blocks), example)
        target = lambda block: _attention(block, projections[block.index])  # noqa: E731
    chosen = choose(model, blocks, target, f"the {scheme} initialisation", example)
    generator = torch.Generator()
    generator.manual_seed(int(torch.randint(2**63 - 1, ())) if seed is None else seed)
    drawn: list[str] = []
    found: Any
    for block, found in chosen:
        if isinstance(found, _Attention):
            drawn += found.draw(scheme, values, generator)
            if scheme == "skipless":
                inside = {id(inner(layer)) for layer in found.layers}
                for name, layer in cast(list[tuple[str, nn.Linear]], _linear_layers(block)):
                    if id(layer) not in inside:
                        _set(layer.weight, orthogonal(layer.out_features, layer.in_features, generator))
                        _zero(layer.bias)
                        drawn.append(name)
        else:
            for name, layer in found:
                _LAWS[scheme](layer, generator)
                drawn.append(name)
    return list(dict.fromkeys(drawn))


def orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A weight with orthogonal rows or columns, in float64; it keeps the mean square of random inputs."""
    tall = torch.randn(max(rows, columns), min(rows, columns), generator=generator, dtype=torch.float64)
    Q, R = torch.linalg.qr(tall)
    Q = Q * R.diagonal().sign()  # uniform over the orthogonal matrices
    weight: Tensor = Q * math.sqrt(rows / columns) if rows >= columns else Q.mT
    return weight


class _Attention:
    """The layers of an attention, and its heads."""

    def __init__(
        self,
        owner: nn.Module,
        projections: list[ProjectionLayer],
        output: tuple[str, nn.Module],
        heads: int,
    ) -> None:
        self.owner, self.projections, self.output, self.heads = owner, projections, output, heads

    @property
    def layers(self) -> list[nn.Module]:
        return [each.layer for each in self.projections] + [self.output[1]]

    def draw(self, scheme: Scheme, values: dict[str, float], generator: torch.Generator) -> list[str]:
        width = len(_weight(self.output[1]))
        q, k = self._query_and_key(width, values["alpha"], values["beta"], generator)
        if scheme == "mimetic":
            v, o = _value_and_output(width, values["output_alpha"], -values["output_beta"], generator)
        else:
            gaussian = torch.randn(width, width, generator=generator, dtype=torch.float64)
            U, _, Vh = torch.linalg.svd(gaussian)
            v, o = values["c"] * U.mT, values["c"] * Vh.mT
        made = {"q": q, "k": k, "v": v}
        for each in self.projections:
            _set(each.weight, torch.cat([made[letter] for letter in each.packed]))
            layer: Any = inner(each.layer)
            _zero(layer.in_proj_bias if isinstance(layer, nn.MultiheadAttention) else layer.bias)
            for letter in each.packed:  # apart from the layer in BEiT and EVA
                _zero(getattr(self.owner, f"{letter}_bias", None))
        name, output = self.output
        _set(_weight(output), o)
        _zero(cast(Any, inner(output)).bias)
        return [*(each.name for each in self.projections), name]

    def not_square(self) -> str:
        """Why its projections do not have the tokens' channels at both ends; empty where they do."""
        parts = [part for each in self.projections for part in each.weight.chunk(len(each.packed))]
        sizes = dict.fromkeys(tuple(weight.shape) for weight in (*parts, _weight(self.output[1])))
        if len({side for size in sizes for side in size}) == 1:
            return ""
        shapes = ", ".join(map(str, sizes))
        return f"its queries, keys and values must have the tokens' channels, its projections are {shapes}"

    def _query_and_key(
        self, width: int, alpha: float, beta: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Weights (D, D); Q K^T of each head is the best approximation of alpha Z + beta I of its rank."""
        queries, keys = [], []
        for _ in range(self.heads):
            U, S, Vh = torch.linalg.svd(_noisy_identity(width, alpha, beta, generator))
            rank = width // self.heads
            root = S[:rank].sqrt()
            queries.append((U[:, :rank] * root).mT)
            keys.append(root[:, None] * Vh[:rank])
        return torch.cat(queries), torch.cat(keys)


def _value_and_output(
    width: int, alpha: float, beta: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Weights (D, D) with V O = alpha Z + beta I, each with the root of its singular values."""
    U, S, Vh = torch.linalg.svd(_noisy_identity(width, alpha, beta, generator))
    root = S.sqrt()
    return (U * root).mT, (root[:, None] * Vh).mT


def _noisy_identity(width: int, alpha: float, beta: float, generator: torch.Generator) -> Tensor:
    noise = torch.randn(width, width, generator=generator, dtype=torch.float64) / math.sqrt(width)
    return alpha * noise + beta * torch.eye(width, dtype=torch.float64)


def _attention(block: Block, projections: list[ProjectionLayer] | str) -> _Attention | str:
    if isinstance(projections, str):
        return projections
    name, attention = block.attention()
    output = output_layer(name, attention)
    heads = head_count(name, attention)
    if isinstance(output, str) or isinstance(heads, str):
        return output if isinstance(output, str) else str(heads)
    found = _Attention(attention, projections, output, heads)
    return found.not_square() or found


def _linear_layers(block: Block) -> list[tuple[str, nn.Linear]] | str:
    found = [
        (join_names(block.name, path), module)
        for path, module in block.module.named_modules()
        if isinstance(module, nn.Linear)
    ]
    return found or "it has no linear layer"


def _glorot(layer: nn.Linear, generator: torch.Generator) -> None:
    bound = math.sqrt(6 / sum(layer.weight.shape))
    _set(layer.weight, _uniform(layer.weight.shape, bound, generator))
    _zero(layer.bias)


def _pytorch(layer: nn.Linear, generator: torch.Generator) -> None:
    bound = 1 / math.sqrt(layer.in_features)
    _set(layer.weight, _uniform(layer.weight.shape, bound, generator))
    if layer.bias is not None:
        _set(layer.bias, _uniform(layer.bias.shape, bound, generator))


def _truncated(layer: nn.Linear, generator: torch.Generator) -> None:
    drawn = torch.empty(layer.weight.shape, dtype=torch.float64)
    _set(layer.weight, nn.init.trunc_normal_(drawn, std=0.02, generator=generator))
    _zero(layer.bias)


_LAWS: dict[str, Callable[[nn.Linear, torch.Generator], None]] = {
    "xavier": _glorot,
    "torch": _pytorch,
    "timm": _truncated,
}


def _uniform(shape: torch.Size, bound: float, generator: torch.Generator) -> Tensor:
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * bound


def _weight(layer: nn.Module) -> Tensor:
    return cast(Tensor, inner(layer).weight)


@torch.no_grad()
def _set(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value)


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        nn.init.zeros_(bias)
