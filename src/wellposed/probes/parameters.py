r"""How well conditioned the weights of a model's blocks are, and how large their gradients.

Of the weights (:func:`weight_spectra`), which needs no images: kappa and stable rank |W|_F^2 / sigma_max^2 of
each linear layer, those of the queries, keys and values apart, as the layers use them: with the edits of
weights (:func:`wellposed.condition_weights`, :func:`wellposed.normalise_spectrum`) in place.

Of the gradients, in training those of the loss, as they lie in the parameters' ``.grad``
(:func:`norms_in_place`). Of a model at hand, without labels, those of v^T f(x) with f(x) the output for one
image and v a fixed random direction of length 1: how much of what the output asks for reaches each block
(:func:`gradient_norms`).

>>> import timm
>>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
>>> [record.position for record in weight_spectra(model) if record.measure == "weight kappa"]
['attn.qkv q', 'attn.qkv k', 'attn.qkv v', 'attn.proj', 'mlp.fc1', 'mlp.fc2']
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import Block, BlockSelection, select
from wellposed.anatomy.model import blocks as all_blocks
from wellposed.anatomy.projections import ProjectionLayer, find_projections
from wellposed.anatomy.subclass import inner
from wellposed.interrupts import let_through, uninterrupted
from wellposed.linalg import condition_number, singular_values, stable_rank
from wellposed.linalg.spectrum import estimator, tolerance
from wellposed.probes.images import Batch, image_batches
from wellposed.probes.named_inputs import NamedInputs, run
from wellposed.probes.nonfinite import norm_of
from wellposed.probes.ntk_gradients import output_of
from wellposed.probes.observe import observed, plain, preserved
from wellposed.probes.passes import Sample, place_of, summarize
from wellposed.records import Record, Status, dtype_name, not_measured


def weight_spectra(model: nn.Module, *, blocks: BlockSelection = None, example: Any = None) -> list[Record]:
    """``"weight kappa"`` and ``"weight stable rank"`` of the linear layers of the blocks.

    Args:
        model: a model that :func:`wellposed.anatomy.blocks` knows; left as it was.
        blocks: an index, a slice, several indices, or None for all.
        example: an input of your own model. A run shows how its weights pack queries, keys and values;
            where that is not known, or is not one after another, a packed weight is measured as one.

    Returns:
        Two records a weight; the position is the layer's path in its block.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
    >>> [record.position for record in weight_spectra(model, blocks=1)][::2][-2:]
    ['mlp.fc1', 'mlp.fc2']
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
    where = place_of(block, position, dtype=dtype_name(weight.dtype))
    size = f"{weight.shape[0]} x {weight.shape[1]}"
    values = singular_values(weight[None])
    kappa, at_least = condition_number(weight[None], singular_values=values)
    if not values.isfinite().all():
        for measure in ("weight kappa", "weight stable rank"):
            yield not_measured(measure, f"{size}; it has values that are not finite", **where)
        return
    where |= {"note": size, "estimator": estimator(weight[None]), "tolerance": tolerance(weight[None])}
    status: Status = "at least" if at_least.item() else "ok"
    yield Record(measure="weight kappa", value=kappa.item(), status=status, **where)
    yield Record(measure="weight stable rank", value=stable_rank(values).item(), **where)


IMAGES = 4
"""One backward pass each."""

_SEED = 0
_TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Of float32 gradients 1.4e-6 was seen, in a trained DeiT-Ti; what half precision does is not known."""


def norms_in_place(found: Sequence[Block]) -> dict[int, float]:
    """By block, the norm of the gradients that lie in its parameters; those without any are not there."""
    norms = {}
    for block in found:
        gradients = [p.grad for p in block.module.parameters() if p.grad is not None]
        if gradients:
            norms[block.index] = _norm(gradients)
    return norms


def gradient_norms(
    model: nn.Module, images: object, *, blocks: BlockSelection = None, max_images: int = IMAGES
) -> list[Record]:
    """``"gradient norm"`` of each block: of v^T f(x) with respect to all its parameters.

    Args:
        model: a model that :func:`wellposed.anatomy.blocks` knows, not sharded; left as it was, with its
            gradients.
        images: see :func:`wellposed.probes.images.image_batches`.
        blocks: an index, a slice, several indices, or None for all.
        max_images: of which the median is taken; one backward pass each.

    Returns:
        One record a block.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
    >>> [record.block for record in gradient_norms(model, torch.randn(1, 3, 224, 224))]
    [0, 1]
    """
    model = plain(model)
    batches = image_batches(images, model, batch_size=1, limit=max_images)
    with uninterrupted(), observed(model) as present, torch.inference_mode(False), torch.enable_grad():
        found = select(present, blocks)
        parameters = [[p for p in block.module.parameters() if p.is_floating_point()] for block in found]
        frozen = [p for own in parameters for p in own if not p.requires_grad]
        rows = []
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            for batch in batches:
                let_through()
                rows.append(_of_one(model, batch, parameters))
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
    dtype = next((p.dtype for own in parameters for p in own), torch.float32)
    made: dict[str, Any] = {
        "note": "of the output in a fixed random direction of length 1, by all parameters of the block",
        "estimator": "a backward pass of each image",
        "dtype": dtype_name(dtype),
        "tolerance": _TOLERANCES.get(dtype),
    }
    return [
        summarize("gradient norm", Sample(column), block=block.index, module=block.name, **made)
        for block, column in zip(found, torch.tensor(rows, dtype=torch.float64).T, strict=True)
    ]


def _of_one(model: nn.Module, batch: Batch, parameters: list[list[nn.Parameter]]) -> list[float]:
    one = batch.unpadded() if isinstance(batch, NamedInputs) else batch
    flat = [p for own in parameters for p in own]
    gradients = iter(torch.autograd.grad(in_one_direction(run(model, one)), flat, allow_unused=True))
    return [_norm([g for g in (next(gradients) for _ in own) if g is not None]) for own in parameters]


def in_one_direction(output: Any) -> Tensor:
    """v^T f(x) of a model's output f(x), with a fixed random v of length 1."""
    values = output_of(output)
    generator = torch.Generator().manual_seed(_SEED)
    direction = torch.randn(values.shape, generator=generator, dtype=torch.float64)
    weighted: Tensor = values * (direction / direction.norm()).to(values)
    return weighted.sum()


def _norm(gradients: Sequence[Tensor]) -> float:
    return float(torch.tensor(list(map(norm_of, gradients)), dtype=torch.float64).norm())
