"""Context Broadcasting (arXiv 2210.08457) as a module."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from wellposed.nn import functional

Init = Literal["cb", "identity"]


class ContextBroadcast(nn.Module):
    """CB, or with ``channels`` given CB_S: see :func:`wellposed.nn.functional.broadcast`.

    Args:
        channels: the size of the last axis; gives the module one learned ``scale`` a channel (CB_S).
            None is CB, which has no parameters.
        init: where ``scale`` starts: ``"cb"`` (1/2, a fresh model) or ``"identity"`` (0, so that a
            trained model computes what it did).
        device, dtype: of ``scale``.

    The CB_S here keeps the mean token whatever the scale, and its family of functions holds both CB
    and the identity. After a linear layer, as at the end of an MLP, it can express the same functions
    as (x + scale * mean) / 2: the two differ by a factor for each channel of that layer.

    >>> ContextBroadcast()
    ContextBroadcast()
    >>> ContextBroadcast(192).scale.shape
    torch.Size([192])
    """

    scale: nn.Parameter | None
    init: Init = "cb"

    def __init__(
        self,
        channels: int | None = None,
        *,
        init: Init = "cb",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if init not in get_args(Init):
            raise ValueError(f"init must be one of {', '.join(get_args(Init))}, got {init!r}.")
        self.init = init
        if channels is None:
            if init != "cb":
                raise ValueError(
                    f"init={init!r} needs a learned scale, got channels=None; "
                    "give channels= (CB_S), CB itself has no parameters."
                )
            self.register_parameter("scale", None)
        else:
            if channels < 1:
                raise ValueError(f"channels must be at least 1, got {channels}; None is CB without a scale.")
            start = 0.5 if init == "cb" else 0.0
            self.scale = nn.Parameter(torch.full((channels,), start, device=device, dtype=dtype))

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return functional.broadcast(x, self.scale, padding)

    @property
    def settings(self) -> dict[str, bool | str]:
        """What it was made with, as plain words."""
        return {"scaled": self.scale is not None, "init": self.init}

    def extra_repr(self) -> str:
        return "" if self.scale is None else f"channels={len(self.scale)}"
