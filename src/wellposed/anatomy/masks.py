"""Which tokens a block may not look at, read off the masks of its own call: padding, and what comes later.

A mask is known by the name of its argument and by its shape. Of booleans True means "may be looked at", as in
``scaled_dot_product_attention``, timm and transformers; in the classes of torch.nn, and in arguments called
``...padding_mask``, it means "hidden". Integers are 0 where hidden, floats a large negative number.

>>> keep = torch.tensor([[[[True, True, False]]]])
>>> hidden_keys(keep, "attention_mask", texts=1, tokens=3)
tensor([[False, False,  True]])
"""

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

_NAMES = frozenset(
    {
        "attention_mask",
        "attn_mask",
        "causal_mask",
        "mask",
        "src_mask",
        "key_padding_mask",
        "src_key_padding_mask",
        "padding_mask",
    }
)
_PADDING = "padding_mask"  # how names end where True is hidden


class MaskReader(NamedTuple):
    """Reads the masks of a block's calls.

    Args:
        names: of the arguments of its forward.
        of_torch: whether it is a class of torch.nn.
    """

    names: tuple[str, ...]
    of_torch: bool

    def padding(self, args: Any, kwargs: Any, texts: int, tokens: int) -> Tensor | None:
        """(texts, tokens), True for what no token may look at in this call; None where it has no mask."""
        hidden: Tensor | None = None
        for name, mask in self._masks(args, kwargs):
            one = hidden_keys(mask, name, texts, tokens, of_torch=self.of_torch)
            if one is not None:
                hidden = one if hidden is None else hidden | one
        return hidden

    def is_causal(self, args: Any, kwargs: Any, tokens: int) -> Tensor | bool:
        """Whether no token may look at those after it in this call; a tensor where a mask says so."""
        if tokens > 1 and kwargs.get("is_causal") is True:
            return True
        for name, mask in self._masks(args, kwargs):
            if mask.shape[-2:] == (tokens, tokens) and _has_queries(name, mask):
                return hides_later(hides(mask, name, of_torch=self.of_torch))
        return False

    def given(self, args: Any, kwargs: Any) -> list[Any]:
        """What a call has as masks, and as ``is_causal``, whatever it is; None and False left out."""
        every = (*zip(self.names, args, strict=False), *kwargs.items())
        named = [value for name, value in every if name in (*_NAMES, "is_causal")]
        return [value for value in named if value is not None and value is not False]

    def _masks(self, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for name, value in (*zip(self.names, args, strict=False), *kwargs.items()):
            if name in _NAMES and isinstance(value, Tensor) and value.ndim >= 2:
                yield name, value


def mask_reader(block: nn.Module) -> MaskReader:
    names = tuple(inspect.signature(type(block).forward).parameters)[1:]
    classes = [cls for cls in type(block).__mro__ if cls is not nn.Module]
    return MaskReader(names, any(cls.__module__.startswith("torch.nn.") for cls in classes))


def hides_later(hidden: Tensor) -> Tensor | bool:
    """Whether (..., N, N) hides from every token all that come after it, and not all before it."""
    tokens = hidden.shape[-1]
    if tokens < 2 or hidden.shape[-2] != tokens:
        return False
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=hidden.device).triu(1)
    return (hidden | ~later).all() & ~(hidden | later).all()


def hidden_keys(mask: Tensor, name: str, texts: int, tokens: int, *, of_torch: bool = False) -> Tensor | None:
    """(texts, tokens), True where a mask hides a token from all; None for a mask of other tokens."""
    if mask.ndim < 2 or mask.shape[-1] != tokens:
        return None
    hidden = hides(mask, name, of_torch=of_torch)
    if _has_queries(name, mask):
        hidden = hidden.all(-2)
    if hidden.ndim == 3:  # the heads
        hidden = hidden.all(1)
    elif hidden.ndim == 2 and hidden.shape[0] != texts and hidden.shape[0] % texts == 0:
        hidden = hidden.reshape(texts, -1, tokens).all(1)  # texts and heads on one axis
    if hidden.ndim == 1:
        hidden = hidden[None]
    if hidden.ndim != 2 or hidden.shape[0] not in (1, texts):
        return None
    return hidden.expand(texts, tokens)


READABLE = ("scaled_dot_product_attention", "multi_head_attention_forward", "softmax")
"""Functions whose arguments tell which keys they hide."""


def hidden_by(function: str, args: Any, kwargs: Any) -> Tensor | None:
    """What an attention function hides, True there, in a shape that broadcasts to (B, H, N, M).

    None where that is nothing.
    """
    if function == "softmax":
        scores = args[0] if args else kwargs["input"]
        return far_below(scores) if scores.ndim >= 2 else None
    if function == "scaled_dot_product_attention":
        call = FUSED.bind(*args, **kwargs).arguments
        mask = call.get("attn_mask")
        if call.get("is_causal"):
            size = call["query"].shape[-2], call["key"].shape[-2]
            return torch.ones(size, dtype=torch.bool, device=call["query"].device).triu(1)
        return None if mask is None else ~mask if mask.dtype == torch.bool else far_below(mask)
    call = MULTI_HEAD.bind(*args, **kwargs).arguments
    mask, padding = call.get("attn_mask"), call.get("key_padding_mask")
    hidden: Tensor | None = None
    if mask is not None:
        hidden = mask if mask.dtype == torch.bool else far_below(mask)
        if hidden.ndim == 3:
            hidden = hidden.unflatten(0, (-1, call["num_heads"]))
    if padding is not None:
        padded = (padding if padding.dtype == torch.bool else far_below(padding))[:, None, None]
        hidden = padded if hidden is None else hidden | padded
    return hidden


def _fused(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """The arguments of scaled_dot_product_attention, which has no signature of its own."""


FUSED = inspect.signature(_fused)
MULTI_HEAD = inspect.signature(functional.multi_head_attention_forward)


def far_below(scores: Tensor) -> Tensor:
    """Where scores, or what is added to them, are so low that the softmax is zero there."""
    return scores <= torch.finfo(scores.dtype).min / 2


def hides(mask: Tensor, name: str, *, of_torch: bool = False) -> Tensor:
    """True where a mask hides, in its own shape."""
    if mask.dtype == torch.bool:
        return mask if of_torch or name.endswith(_PADDING) else ~mask
    if not mask.is_floating_point():
        return mask != 0 if name.endswith(_PADDING) else mask == 0
    # Floats are added to the scores, but for a plain mask of ones and zeros.
    return far_below(mask) | ((mask == 0) & (mask == 1).any())


def _has_queries(name: str, mask: Tensor) -> bool:
    """Whether the last axis but one is that of the queries."""
    return mask.ndim >= 3 or not (name.endswith(_PADDING) or name.endswith("attention_mask"))
