"""How well conditioned the weights of a model's blocks are. It needs no images.

Kappa and stable rank |W|_F^2 / sigma_max^2 of each linear layer, those of the queries, keys and values apart,
as the layers use them: with the edits of weights (:func:`wellposed.condition_weights`,
:func:`wellposed.normalise_spectrum`) in place.

>>> import timm
>>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
>>> [record.position for record in weight_spectra(model) if record.measure == "weight kappa"]
['attn.qkv q', 'attn.qkv k', 'attn.qkv v', 'attn.proj', 'mlp.fc1', 'mlp.fc2']
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import Block, BlockSelection, select
from wellposed.anatomy.model import blocks as all_blocks
from wellposed.anatomy.packing import find_projections
from wellposed.anatomy.projections import ProjectionLayer
from wellposed.anatomy.subclass import inner
from wellposed.linalg import condition_number, singular_values, stable_rank
from wellposed.linalg.spectrum import estimator, tolerance
from wellposed.probes.observe import plain, preserved
from wellposed.records import Record, dtype_name


def weight_spectra(model: nn.Module, *, blocks: BlockSelection = None, example: Any = None) -> list[Record]:
    """``"weight kappa"`` and ``"weight stable rank"`` of the linear layers of the blocks.

    Args:
        model: a model that :func:`wellposed.anatomy.blocks` knows; left as it was.
        blocks: an index, a slice, several indices, or None for all.
        example: an input of a model of one's own. A run shows how its weights pack queries, keys and values;
            where that is not known, or is not one after another, a packed weight is measured as one.

    Returns:
        Two records a weight; the position is the layer's path in its block.
    """
    model = plain(model)
    found = select(all_blocks(model, example), blocks)
    known = find_projections(model, found, example)
    with preserved(model), torch.no_grad():
        model.eval()  # a look at a normalised weight is a step of its power iteration in training
        return [
            record
            for block in found
            for position, weight in _weights(block, known[block.index])
            for record in _records(block, position, weight)
        ]


def _weights(block: Block, projections: list[ProjectionLayer] | str) -> Iterator[tuple[str, Tensor]]:
    """The weights of a block's linear layers, those that pack several projections in parts."""
    known = [] if isinstance(projections, str) else projections
    packed = {id(inner(each.layer)): each for each in known}
    for path, module in block.module.named_modules():
        layer = packed.get(id(module))
        if layer is not None:
            parts = layer.weight.chunk(len(layer.packed))
            for letter, part in zip(layer.packed, parts, strict=True):
                yield path if len(parts) == 1 else f"{path} {letter}", part
        elif isinstance(module, nn.Linear) or hasattr(module, "nf"):  # the Conv1D of transformers
            weight = cast(Tensor, module.weight)
            if weight.is_floating_point():
                yield path, weight


def _records(block: Block, position: str, weight: Tensor) -> Iterator[Record]:
    where = {"block": block.index, "module": block.name, "position": position}
    made = {"dtype": dtype_name(weight.dtype), "note": f"{weight.shape[0]} x {weight.shape[1]}"}
    values = singular_values(weight[None])
    kappa, at_least = condition_number(weight[None], singular_values=values)
    if not values.isfinite().all():
        made["note"] += "; it has values that are not finite"
        for measure in ("weight kappa", "weight stable rank"):
            yield Record(measure=measure, value=None, status="not measured", **where, **made)  # type: ignore[arg-type]
        return
    made |= {"estimator": estimator(weight[None]), "tolerance": tolerance(weight[None])}  # type: ignore[dict-item]
    status = "at least" if at_least.item() else "ok"
    yield Record(measure="weight kappa", value=kappa.item(), status=status, **where, **made)  # type: ignore[arg-type]
    yield Record(measure="weight stable rank", value=stable_rank(values).item(), **where, **made)  # type: ignore[arg-type]
