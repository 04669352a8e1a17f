"""The least time of a training step and of what each edit adds to it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from wellposed.anatomy.model import blocks, embeddings
from wellposed.bench.floors import (
    FLOAT,
    HALF,
    Peaks,
    Work,
    broadcast_work,
    chain_of,
    dct_work,
    floor_of,
    spectral_work,
    svd_work,
)
from wellposed.bench.steps import CHANNELS, CLASSES, EDITS, PLAIN
from wellposed.nn.graying import DEFAULT_EPS
from wellposed.train.model import build_model
from wellposed.train.recipe import Recipe

_OPTIMIZER_TOUCHES = 7
"""Numbers that AdamW moves for a weight: reads it, its gradient, two moments; writes all but the gradient."""


@dataclass(frozen=True)
class ModelSize:
    """What the floors need of a model; operations are one image's, forward."""

    operations: float
    weights: int
    patches: tuple[int, int]
    """Rows and columns of the matrix of pixel patches."""
    embedded: tuple[int, int]
    block_tokens: list[tuple[int, int]]


def model_size(recipe: Recipe) -> ModelSize:
    """Of the model of a recipe without edits, by one image through it on the CPU."""
    model = build_model(recipe, CLASSES, CHANNELS).model.eval()
    embedding = embeddings(model)[0].patch_convolution()
    if isinstance(embedding, str):
        raise ValueError(f"the floors need a patch embedding that is a convolution: {embedding}.")
    _, convolution = embedding
    seen: dict[str, list[tuple[int, ...]]] = {"patches": [], "blocks": []}
    handles = [convolution.register_forward_hook(lambda _m, _a, out: seen["patches"].append(out.shape))]
    handles += [block.module.register_forward_pre_hook(_note_shape(seen)) for block in blocks(model)]
    side = recipe.image_size or 224
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model(torch.zeros(1, CHANNELS, side, side))
    for handle in handles:
        handle.remove()
    (_, width, rows, columns) = seen["patches"][0]
    height, breadth = convolution.kernel_size
    count = rows * columns
    return ModelSize(
        operations=float(counted.get_total_flops()),
        weights=sum(parameter.numel() for parameter in model.parameters()),
        patches=(count, convolution.in_channels * height * breadth),
        embedded=(count, width),
        block_tokens=[(shape[-2], shape[-1]) for shape in seen["blocks"]],
    )


def _note_shape(seen: dict[str, list[tuple[int, ...]]]) -> Any:
    def note(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen["blocks"].append(arguments[0].shape)

    return note


def plain_work(size: ModelSize, batch: int, precision: str) -> Work:
    """Forward and twice as much backward, and the optimizer."""
    kind = "half" if precision == "bf16" else "fp32"
    return Work(_OPTIMIZER_TOUCHES * FLOAT * size.weights, {kind: 3 * size.operations * batch})


def added_work(edit: str, size: ModelSize, precision: str) -> Work:
    """What an edit adds for one image; pixels need no gradient."""
    itemsize = HALF if precision == "bf16" else FLOAT
    changes = EDITS[edit]
    if "broadcast" in changes:
        works = [
            broadcast_work(*tokens, scaled=changes["broadcast"] == "cb_s", itemsize=itemsize)
            for tokens in size.block_tokens
        ]
        return sum(works, Work())
    backward = changes["gray_where"] == "embedding"
    shape = size.embedded if backward else size.patches
    if changes["graying"] == "svd":
        return svd_work(*shape, backward=backward)
    itemsize = itemsize if backward else FLOAT
    if changes["graying"] == "dct":
        return dct_work(*shape, backward=backward, itemsize=itemsize)
    chain = chain_of(DEFAULT_EPS["spectral"])
    return spectral_work(*shape, chain, backward=backward, itemsize=itemsize)


def step_floors(recipe: Recipe, edits: list[str], peaks: Peaks) -> dict[str, float]:
    """Seconds: of the plain step, and of what each edit adds."""
    size = model_size(recipe)
    floors = {PLAIN: floor_of(plain_work(size, recipe.batch_size, recipe.precision), peaks).seconds}
    for edit in edits:
        work = added_work(edit, size, recipe.precision) * recipe.batch_size
        floors[edit] = floor_of(work, peaks).seconds
    return floors
