"""Removing skip connections, in place."""

from typing import Any, Literal, get_args

from torch import nn

from wellposed.anatomy.model import Block, BlockSelection, join_names, refuse_wrapped
from wellposed.anatomy.seam import block_joins, close_seam, is_open, open_seam
from wellposed.anatomy.table import Role
from wellposed.interrupts import uninterrupted
from wellposed.surgery.choose import choose
from wellposed.surgery.record import Edits
from wellposed.surgery.undo import edits

Which = Literal["attention", "ffn", "both", "mixer", "local", "parallel", "all"]


def remove_skips(
    model: nn.Module,
    which: Which = "attention",
    *,
    blocks: BlockSelection = None,
    example: Any = None,
    allow_drop_path: bool = False,
) -> Edits:
    """Remove skip connections from a model's blocks, in place.

    What a block adds to its input becomes what it returns: x + f(x) -> f(x). A model with stochastic depth
    (timm's ``drop_path_rate``) is refused: where it drops f(x), nothing of the image is left.

    Args:
        model: any transformer, not yet compiled, sharded or replicated.
        which: ``"attention"``; ``"ffn"``; ``"both"`` of these; ``"mixer"``, the skip around token
            mixing without attention (MLP-Mixer, ResMLP, ConvMixer); ``"local"``, that around a convolution
            in a model with attention (XCiT's third); ``"parallel"``, one skip around attention and FFN side
            by side; ``"all"``, every skip of the block.
        blocks: an index, a slice, several indices, or None for every block that has such a skip.
        example: an input to run your own model on, once, to find its blocks; see
            :func:`wellposed.anatomy.blocks`. Not needed for timm, transformers and torchvision.

        allow_drop_path: remove the skips of blocks with stochastic depth all the same.

    Returns:
        What was touched.

    >>> import timm, wellposed as wp
    >>> model = timm.create_model("vit_tiny_patch16_224")
    >>> print(wp.remove_skips(model, "attention", blocks=[0, 1]))
    edit          where      block  module                   detail
    remove_skips  attention  0      blocks.0.join_attention
    remove_skips  attention  1      blocks.1.join_attention
    10 of 12 blocks have no remove_skips at attention: 2-11
    """
    refuse_wrapped(model)
    if which not in get_args(Which):
        raise ValueError(f"which must be one of {', '.join(get_args(Which))}, got {which!r}.")
    chosen = choose(model, blocks, lambda block: _roles(block, which), f"removing the {which} skip", example)
    for block, roles in chosen:
        for join in block_joins(block.module, block.row):
            if join.role in roles and not join.keep:
                raise ValueError(
                    f"{block.name} has no {join.role} skip any more; the same edit twice is a mistake, "
                    "wp.restore(model) undoes all edits."
                )
    if not allow_drop_path:
        _refuse_drop_path([block for block, _ in chosen])
    before = set(edits(model))
    with uninterrupted():
        # Every seam is opened before any skip goes, so that a refused block leaves the model as it was.
        _open_all([block for block, _ in chosen])
        for block, roles in chosen:
            for join in block_joins(block.module, block.row):
                if join.role in roles:
                    join.keep, join.allow_drop_path = False, allow_drop_path
    now = edits(model)
    return Edits((edit for edit in now if edit not in before), now.blocks)


def _refuse_drop_path(chosen: list[Block]) -> None:
    for block in chosen:
        for name, module in block.module.named_modules():
            rate = getattr(module, "drop_prob", getattr(module, "p", 0.0))
            is_one = any(word in type(module).__name__ for word in ("DropPath", "StochasticDepth"))
            if is_one and isinstance(rate, int | float) and rate > 0:
                raise ValueError(
                    f"{join_names(block.name, name)} drops branches at a rate of {rate:g} in training, and "
                    "where their skips are gone nothing of an image is left: build the model without "
                    "stochastic depth (timm: drop_path_rate=0), or pass allow_drop_path=True for one that is "
                    "not trained."
                )


def _roles(block: Block, which: Which) -> tuple[Role, ...] | str:
    """The skips of a block that ``which`` means, or why there are none."""
    there = block.row.roles
    wanted: tuple[Role, ...]
    match which:
        case "all":
            return there
        case "both":
            wanted = ("attention", "ffn")
        case _:
            wanted = (which,)
    missing = [role for role in wanted if role not in there]
    if missing:
        return f"no skip around {' and '.join(missing)}; it has {', '.join(there)}"
    return wanted


def _open_all(chosen: list[Block]) -> None:
    opened: list[Block] = []
    try:
        for block in chosen:
            if not is_open(block.module, block.row):
                open_seam(block.module, block.row)
                opened.append(block)
    except Exception:
        for block in opened:
            close_seam(block.module, block.row)
        raise
