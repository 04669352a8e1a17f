"""Context Broadcasting (arXiv 2210.08457) as a module, with FeatScale (arXiv 2203.05962) in the same form."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from wellposed.nn import functional
from wellposed.nn.operation import Operation

Init = Literal["cb", "identity"]
CB = (1.0, 0.5)
"""Factors of the mean and of what differs from it."""


class ContextBroadcast(Operation):
    """CB, or with ``channels`` given CB_S: see :func:`wellposed.nn.functional.broadcast`.

    Args:
        channels: the size of the last axis; gives the module one learned ``scale`` a channel (CB_S).
            None is CB, which has no parameters.
        init: where ``scale`` starts: ``"cb"`` (1/2, a fresh model) or ``"identity"`` (0, so that a
            trained model computes what it did).
        mean, difference: y = m + d becomes ``mean * m + difference * d``, m the mean over the tokens. CB is
            1 and 1/2.
        learned: with ``channels``: learn both factors, one of each a channel, from these numbers. From 1 and
            1, the identity, this is FeatScale.
        device, dtype: of what is learned.

    The CB_S here keeps the mean token whatever the scale, and its family of functions holds both CB
    and the identity. After a linear layer, as at the end of an MLP, it can express the same functions
    as (x + scale * mean) / 2: the two differ by a factor for each channel of that layer.

    >>> ContextBroadcast()
    ContextBroadcast()
    >>> ContextBroadcast(192).scale.shape
    torch.Size([192])
    >>> ContextBroadcast(mean=2.0, difference=1.0)
    ContextBroadcast(mean=2, difference=1)
    """

    scale: nn.Parameter | None
    mean: nn.Parameter | None
    difference: nn.Parameter | None
    init: Init = "cb"
    factors: tuple[float, float] = CB
    learned: bool = False

    def __init__(
        self,
        channels: int | None = None,
        *,
        init: Init = "cb",
        mean: float = CB[0],
        difference: float = CB[1],
        learned: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if init not in get_args(Init):
            raise ValueError(f"init must be one of {', '.join(get_args(Init))}, got {init!r}.")
        if channels is not None and channels < 1:
            raise ValueError(f"channels must be at least 1, got {channels}; None is CB without a scale.")
        check_factors(mean, difference, learned, scaled=channels is not None and not learned)
        if learned and channels is None:
            raise ValueError("learned=True learns a factor a channel, got channels=None; give channels=.")
        self.init, self.factors, self.learned = init, (float(mean), float(difference)), learned
        for name, factor in zip(("mean", "difference"), self.factors, strict=True):
            start = (
                torch.full((channels,), factor, device=device, dtype=dtype) if learned and channels else None
            )
            self.register_parameter(name, None if start is None else nn.Parameter(start))
        if learned:
            self.register_parameter("scale", None)
        elif channels is None:
            if init != "cb":
                raise ValueError(
                    f"init={init!r} needs a learned scale, got channels=None; "
                    "give channels= (CB_S), CB itself has no parameters."
                )
            self.register_parameter("scale", None)
        else:
            half = 0.5 if init == "cb" else 0.0
            self.scale = nn.Parameter(torch.full((channels,), half, device=device, dtype=dtype))

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        if self.mean is not None and self.difference is not None:
            return functional.mix_mean(x, self.mean, self.difference, padding)
        if self.factors != CB:
            return functional.mix_mean(x, *self.factors, padding)
        return functional.broadcast(x, self.scale, padding)

    @property
    def settings(self) -> dict[str, bool | float | str]:
        """What it was made with, as plain numbers and words."""
        if self.learned or self.factors != CB:
            return {"mean": self.factors[0], "difference": self.factors[1], "learned": self.learned}
        return {"scaled": self.scale is not None, "init": self.init}

    def extra_repr(self) -> str:
        parts = [f"channels={len(each)}" for each in (self.scale, self.mean) if each is not None]
        if self.learned or self.factors != CB:
            parts += ["mean={:g}, difference={:g}".format(*self.factors)]
        return ", ".join(parts)


def check_factors(mean: float, difference: float, learned: bool, *, scaled: bool) -> None:
    """Raise unless the factors are finite, and CB's own where CB_S learns its scale."""
    for name, value in (("mean", mean), ("difference", difference)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value!r}; CB has mean=1, difference=0.5.")
    if scaled and (learned or (mean, difference) != CB):
        raise ValueError(
            f"scaled=True (CB_S) has factors of its own, got mean={mean:g}, difference={difference:g}, "
            f"learned={learned}; use learned=True without scaled=True."
        )
