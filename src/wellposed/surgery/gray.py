"""Token Graying of a model's input tokens, in place."""

import warnings
from typing import Any, Literal, cast, get_args

from torch import nn

from wellposed.anatomy.model import Block, BlockSelection, Place, embeddings, refuse_wrapped
from wellposed.anatomy.subclass import inner
from wellposed.errors import NoMeaningError
from wellposed.linalg import Precision
from wellposed.linalg.spectral_plan import DEFAULT_TOLERANCE
from wellposed.nn import PixelGraying, TokenGraying
from wellposed.nn.functional import Method
from wellposed.surgery.apply import insert_all
from wellposed.surgery.choose import choose
from wellposed.surgery.insertion import Inserted
from wellposed.surgery.record import Edits

GrayWhere = Literal["embedding", "pixels", "blocks"]
KIND = "gray_tokens"
_CAUSAL = (
    "the attention of these blocks is causal, but graying is of all tokens of a text together: through the "
    "singular vectors each token gets something of those after it, so that the loss of a language model "
    "looks better than it is. Use it to study conditioning, not to train or to generate."
)


def gray_tokens(
    model: nn.Module,
    eps: float | None = None,
    method: Method = "spectral",
    where: GrayWhere = "embedding",
    *,
    blocks: BlockSelection = None,
    target_kappa: float | None = None,
    rescale: bool = True,
    floor: float | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    precision: Precision = "auto",
    example: Any = None,
) -> Edits:
    """Put Token Graying into a model, in place.

    Args:
        model: any transformer, not yet compiled, sharded or replicated.
        eps: in (0, 1]; None is the paper's choice for the method (0.7, DCT 0.95; "condition" has none).
        method: see :func:`wellposed.nn.functional.gray`.
        where: ``"embedding"``, the patch embedding's output, before position embedding and prefix
            tokens; ``"pixels"``, the pixel patches that go into it; ``"blocks"``, the input of the
            blocks named, prefix tokens included. Padding is kept out: the mask is the one that the block or
            the embedding is called with; in compiled or exported code it must hide nothing. In a causal
            model a grayed token knows of later ones through the singular vectors: there is a UserWarning.
        blocks: with ``where="blocks"`` only: an index, a slice, several indices, or None for all.
        target_kappa: instead of eps, the condition number that the tokens of every image get.
        rescale, floor, tolerance, precision: see :func:`wellposed.nn.functional.gray`.
        example: an input to run your own model on, once, to find its blocks; see
            :func:`wellposed.anatomy.blocks`. Not needed for timm, transformers and torchvision.

    Returns:
        What was touched.

    >>> import timm, wellposed as wp
    >>> model = timm.create_model("vit_tiny_patch16_224")
    >>> print(wp.gray_tokens(model, eps=0.7, method="svd"))
    edit         where      block  module       detail
    gray_tokens  embedding  -      patch_embed  TokenGraying(eps=0.7, method='svd')
    """
    refuse_wrapped(model)
    if where not in get_args(GrayWhere):
        raise ValueError(f"where must be one of {', '.join(get_args(GrayWhere))}, got {where!r}.")
    if blocks is not None and where != "blocks":
        raise ValueError(f'blocks= goes with where="blocks", got where={where!r}; leave one of them out.')

    settings: dict[str, Any] = {
        "target_kappa": target_kappa,
        "rescale": rescale,
        "floor": floor,
        "tolerance": tolerance,
        "precision": precision,
    }

    def inserted(place: Place) -> Inserted:
        op = TokenGraying(eps, method, **settings)
        return Inserted(op, KIND, where, place.layout)

    mixed: list[Block] = []
    if where == "blocks":
        chosen = choose(model, blocks, lambda block: block.place("block.start"), "graying its input", example)
        mixed = [block for block, _ in chosen]
        insertions = [(place, inserted(place)) for _, place in chosen]
        if any(block.row.causal for block in mixed):
            warnings.warn(_CAUSAL, UserWarning, stacklevel=2)
    elif where == "embedding":
        tokens = [embedding.tokens() for embedding in embeddings(model, example)]
        insertions = [(place, inserted(place)) for place in tokens]
    else:
        insertions = []
        for name, convolution in _patch_convolutions(model, example):
            height, width = cast(nn.Conv2d, inner(convolution)).kernel_size
            pixels = PixelGraying((height, width), eps, method, **settings)
            place = Place(name, convolution, "before", "NCHW")
            insertions.append((place, Inserted(pixels, KIND, where, layout=None)))
    return insert_all(model, insertions, mixed)


def _patch_convolutions(model: nn.Module, example: Any) -> list[tuple[str, nn.Conv2d]]:
    found = []
    for embedding in embeddings(model, example):
        convolution = embedding.patch_convolution()
        if isinstance(convolution, str):
            owner = embedding.name or type(model).__name__
            raise NoMeaningError(
                f'where="pixels" has no meaning for {owner}: {convolution}; use where="embedding".',
                (convolution,),
            )
        found.append(convolution)
    return found
