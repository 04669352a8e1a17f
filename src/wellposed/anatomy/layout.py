"""From the layout that a model uses to token matrices (B, N, D), and back."""

from torch import Tensor

from wellposed.anatomy.rows import Layout


def to_tokens(x: Tensor, layout: Layout) -> Tensor:
    """(B, N, D) of a tensor in ``layout``. Three axes are tokens already, whatever a grid would be.

    More than four are a grid of several dimensions, as of videos, or windows of one image.

    Two are the tokens of one image, (N, D), whichever comes first in a batch.
    """
    if x.ndim >= 4:
        return x.flatten(2).mT if layout == "NCHW" else x.flatten(1, -2)
    return x.transpose(0, 1) if layout == "LNC" and x.ndim == 3 else x


def from_tokens(tokens: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """Undo :func:`to_tokens`, to the shape of ``like``."""
    if like.ndim >= 4:
        return (tokens.mT if layout == "NCHW" else tokens).reshape(like.shape)
    return tokens.transpose(0, 1) if layout == "LNC" and like.ndim == 3 else tokens
