"""Context Broadcasting in a model's blocks, in place; with other factors also FeatScale and its relatives."""

from typing import Any, Literal, get_args

from torch import Tensor, nn

from wellposed.anatomy.model import Block, BlockSelection, Place, refuse_wrapped
from wellposed.anatomy.subclass import inner
from wellposed.nn import ContextBroadcast
from wellposed.nn.broadcast import CB, Init, check_factors
from wellposed.surgery.apply import insert_all
from wellposed.surgery.choose import choose
from wellposed.surgery.insertion import Inserted
from wellposed.surgery.record import Edits

BroadcastWhere = Literal["mlp.end", "mlp.middle", "mlp.start", "attention.end"]
KIND = "broadcast_context"
_CAUSAL = (
    "its attention is causal, and the mean over all tokens would show each token those that come after it; "
    "gray_tokens and remove_skips do not need the mean"
)


def broadcast_context(
    model: nn.Module,
    where: BroadcastWhere = "mlp.end",
    *,
    scaled: bool = False,
    init: Init = "cb",
    mean: float = CB[0],
    difference: float = CB[1],
    learned: bool = False,
    blocks: BlockSelection = None,
    example: Any = None,
) -> Edits:
    """Put Context Broadcasting into a model's blocks, in place.

    Args:
        model: any transformer, not yet compiled, sharded or replicated.
        where: ``"mlp.end"`` as in the paper; ``"mlp.middle"``, before the MLP's last linear layer;
            ``"mlp.start"``; ``"attention.end"``, after the output projection. In post-norm blocks
            the ends lie before the norm. The mean is over all tokens of the image, prefix tokens
            included, also where attention sees windows. Padding does not count: the mask is the one that the
            block itself is called with. Causal blocks are refused, as the mean would look into the future.
        scaled: CB_S, one learned scale a channel. Make the optimizer after this edit.
        init: where the scale starts: ``"cb"``, or ``"identity"`` for a model already trained.
        mean, difference: an output y = m + d, m its mean over the tokens, becomes
            ``mean * m + difference * d``. CB is 1 and 1/2.
        learned: learn both factors, one of each a channel, from these numbers: FeatScale is
            ``where="attention.end", mean=1, difference=1, learned=True``. Make the optimizer after this edit.
        blocks: an index, a slice, several indices, or None for every block that has the position.
        example: an input to run your own model on, once, to find its blocks; see
            :func:`wellposed.anatomy.blocks`. Not needed for timm, transformers and torchvision.

    Returns:
        What was touched.

    >>> import timm, wellposed as wp
    >>> model = timm.create_model("vit_tiny_patch16_224")
    >>> print(wp.broadcast_context(model, blocks=[0, 11]))
    edit               where    block  module         detail
    broadcast_context  mlp.end  0      blocks.0.mlp   ContextBroadcast()
    broadcast_context  mlp.end  11     blocks.11.mlp  ContextBroadcast()
    10 of 12 blocks have no broadcast_context at mlp.end: 1-10
    """
    refuse_wrapped(model)
    if where not in get_args(BroadcastWhere):
        raise ValueError(f"where must be one of {', '.join(get_args(BroadcastWhere))}, got {where!r}.")
    if init != "cb" and not scaled:
        raise ValueError(f"init={init!r} is for CB_S, got scaled=False; add scaled=True.")
    check_factors(mean, difference, learned, scaled=scaled)

    def operation(block: Block) -> ContextBroadcast:
        factors: dict[str, Any] = {"mean": mean, "difference": difference, "learned": learned}
        if not (scaled or learned):
            return ContextBroadcast(**factors)
        return ContextBroadcast(init=init, **factors, **_channels(block, where))

    def target(block: Block) -> Place | str:
        return _CAUSAL if block.row.causal else block.place(where)

    chosen = choose(model, blocks, target, f"{where} broadcasting", example)
    return insert_all(
        model,
        [(place, Inserted(operation(block), KIND, where, place.layout)) for block, place in chosen],
        mixed=[block for block, _ in chosen],
    )


def _channels(block: Block, where: BroadcastWhere) -> dict[str, Any]:
    """Number, device and type of the channels at a place of a block."""
    last_linear = block.place("mlp.middle")
    assert isinstance(last_linear, Place)
    owner = inner(last_linear.owner)
    width = getattr(owner, "in_features" if where == "mlp.middle" else "out_features", None)
    weight = getattr(owner, "weight", None)
    if callable(weight):  # of torch's own quantised layers
        weight = weight()
    if not isinstance(width, int) or not isinstance(weight, Tensor):
        raise ValueError(
            f"expected a linear layer at {last_linear.name}, whose size is the number of channels that are "
            f"learned, got {type(owner).__name__}; use scaled=False and learned=False."
        )
    # A quantised layer has integer weights.
    dtype = weight.dtype if weight.is_floating_point() else None
    return {"channels": width, "device": weight.device, "dtype": dtype}
