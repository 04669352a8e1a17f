"""Spectral conditioning of attention (arXiv 2603.07162): W + lambda I, or W + sigma_max U V^T, in place."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import Block, BlockSelection, refuse_wrapped, select
from wellposed.anatomy.model import blocks as all_blocks
from wellposed.anatomy.projections import ProjectionLayer, find_projections
from wellposed.linalg.precision import in_float64
from wellposed.surgery.choose import choose
from wellposed.surgery.record import Edits, Setting
from wellposed.surgery.weights import WeightEdit, edit_weights

KIND = "condition_weights"
_LETTERS = "qkv"


class ConditionedWeight(WeightEdit):
    """W + C, with a fixed C for each of the projections that a weight packs.

    Args:
        which: of q, k and v, those that are conditioned.
        strength: lambda, of C = lambda I; or ``"exact"``, C = sigma_max U V^T of the weight as it is now,
            after which kappa is at most 2. That C is saved with the model, as ``correction``.
        packed: those that the rows of the weight make, in their order.
        weight: as it is now; needed for ``"exact"``.
    """

    correction: Tensor | None

    def __init__(
        self,
        which: str,
        strength: float | Literal["exact"],
        packed: str,
        weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.where = KIND, which
        self.strength: float | str = strength
        self.packed = packed
        correction = None
        if strength == "exact":
            assert weight is not None
            parts = [
                _polar(part) if letter in which else torch.zeros_like(part)
                for letter, part in zip(packed, weight.detach().chunk(len(packed)), strict=True)
            ]
            correction = torch.cat(parts)
        self.register_buffer("correction", correction)

    def forward(self, weight: Tensor) -> Tensor:
        if self.correction is not None:
            return weight + self.correction
        parts = weight.reshape(len(self.packed), -1, weight.shape[-1])
        identity = torch.eye(*parts.shape[1:], dtype=weight.dtype, device=weight.device)
        added = float(self.strength) * identity
        if set(self.packed) <= set(self.where):
            conditioned: Tensor = (parts + added).flatten(0, 1)
            return conditioned
        pairs = zip(self.packed, parts, strict=True)
        return torch.cat([part + added if letter in self.where else part for letter, part in pairs])

    @property
    def settings(self) -> Mapping[str, Setting]:
        return {"strength": self.strength}

    def extra_repr(self) -> str:
        return f"{'/'.join(letter for letter in self.packed if letter in self.where)}, {self.strength!r}"


def condition_weights(
    model: nn.Module,
    which: str = "qkv",
    strength: float | Literal["exact"] = 10.0,
    *,
    blocks: BlockSelection = None,
    example: Any = None,
) -> Edits:
    """Add a fixed, well-conditioned matrix to the projections of attention, in place.

    The learned weights stay what they are, are trained and saved under their names; the layers read
    W + C. The paper adds lambda I with lambda = 10 to the queries', keys' and values' projections of a model
    that is then trained from scratch. It changes what a trained model computes.

    Args:
        model: any transformer, not yet compiled, sharded or replicated.
        which: of ``"q"``, ``"k"`` and ``"v"``.
        strength: lambda; or ``"exact"`` for C = sigma_max U V^T of each weight as it is now, whose kappa
            then is at most 2.
        blocks: an index, a slice, several indices, or None for every block with attention.
        example: an input to run your own model on, once, to find its blocks; see
            :func:`wellposed.anatomy.blocks`. Not needed for timm, transformers and torchvision.

    Returns:
        What was touched.

    >>> import timm, wellposed as wp
    >>> model = timm.create_model("vit_tiny_patch16_224")
    >>> print(wp.condition_weights(model, blocks=0))
    edit               where  block  module             detail
    condition_weights  qkv    0      blocks.0.attn.qkv  ConditionedWeight(q/k/v, 10.0)
    """
    refuse_wrapped(model)
    if not which or set(which) - set(_LETTERS) or len(set(which)) < len(which):
        raise ValueError(f"which must be some of q, k and v, such as 'qkv' or 'v', got {which!r}.")
    if strength != "exact" and not (isinstance(strength, int | float) and 0 < strength < float("inf")):
        raise ValueError(f'strength must be a number above 0 or "exact", got {strength!r}.')
    wanted = "".join(letter for letter in _LETTERS if letter in which)

    known = find_projections(model, select(all_blocks(model, example), blocks), example)

    def target(block: Block) -> list[ProjectionLayer] | str:
        found = known[block.index]
        return found if isinstance(found, str) else [each for each in found if set(each.packed) & set(wanted)]

    chosen = choose(model, blocks, target, "conditioning the weights of attention", example)
    layers = {id(each.layer): each for _, found in chosen for each in found}
    return edit_weights(
        model,
        [
            (
                each.name,
                each.layer,
                each.parameter,
                ConditionedWeight(wanted, strength, each.packed, each.weight),
            )
            for each in layers.values()
        ],
    )


def _polar(weight: Tensor) -> Tensor:
    """sigma_max U V^T of a weight, in its dtype."""
    U, S, Vh = torch.linalg.svd(in_float64(weight), full_matrices=False)
    polar: Tensor = (S[0] * (U @ Vh)).to(weight)
    return polar
