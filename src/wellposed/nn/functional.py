"""Token Graying (arXiv 2505.01996) and Context Broadcasting (arXiv 2210.08457) of x (..., N, D).

N tokens, D channels, any batch shape. Both compute in at least float32 whatever autocast says, and
return the dtype they were given.
"""

import numbers
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from wellposed.linalg import DEFAULT_FLOOR, dct2, idct2, power_gain, svd_power
from wellposed.linalg.precision import without_autocast

Method = Literal["spectral", "svd", "dct"]


def gray(
    x: Tensor,
    eps: float | Tensor,
    method: Method = "spectral",
    *,
    rescale: bool = True,
    floor: float = DEFAULT_FLOOR,
) -> Tensor:
    r"""Token Graying: flatten the spectrum of the token matrix.

    .. math::
        X = U S V^T \;\mapsto\; U S' V^T, \qquad S' = s_{\max} (S / s_{\max})^\epsilon

    so that the condition number kappa becomes kappa^eps. With ``method="dct"`` the magnitudes of the
    coefficients of a two-dimensional DCT take the place of the singular values; their signs stay.

    Args:
        x: (..., N, D) tokens, floating point.
        eps: in (0, 1]. 1 leaves the tokens as they are, less is flatter. A tensor of one number, on x's
            device, may change without compiling again; its range is not checked, and it gets no gradient.
        method: ``"svd"`` is exact, by ``torch.linalg.svd``, with a gradient that is finite where
            singular values repeat or vanish. ``"dct"`` is the paper's cheap stand-in. ``"spectral"``
            is the same map as ``"svd"``, and at present the same code. ONNX has no SVD: a model to be
            exported there takes ``"dct"``.
        rescale: False gives the paper's literal (S / s_max)^eps, whose largest value is 1.
        floor: values below ``floor`` times the largest are scaled linearly, which bounds the gradient.

    A matrix that holds a non-finite value gives a non-finite result, the others are untouched. Zero
    tokens give zeros, and pass their gradient on as it is.

    >>> import torch
    >>> x = torch.diag(torch.tensor([100.0, 1.0]))
    >>> torch.linalg.cond(gray(x, 0.5, "svd"))
    tensor(10.)
    """
    _check_tokens(x)
    if not isinstance(eps, Tensor):
        _check_fraction("eps", eps, "1 leaves the tokens as they are, less flattens their spectrum")
        eps = float(eps)
    elif eps.numel() != 1:
        raise ValueError(f"eps must be one number, got a tensor of shape {tuple(eps.shape)}.")
    _check_fraction("floor", floor, f"the default is {DEFAULT_FLOOR}")
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}.")
    if isinstance(eps, float) and eps == 1 and rescale:
        return x
    flatten = _gray_dct if method == "dct" else svd_power
    return _in_float32(lambda wide: flatten(wide, eps, rescale=rescale, floor=floor), x)


def broadcast(x: Tensor, scale: Tensor | None = None) -> Tensor:
    r"""Context Broadcasting: mix the mean token into every token.

    .. math::
        x_i \mapsto (1 - a)\, x_i + a \cdot \frac{1}{N} \sum_j x_j

    CB is a = 1/2. CB_S learns a for each channel, which is ``scale`` here: 1/2 is CB, 0 leaves the
    tokens as they are, 1 is uniform attention. The mean over the tokens stays what it was.

    Args:
        x: (..., N, D) tokens, floating point.
        scale: (D,) or a scalar; None is CB.

    >>> import torch
    >>> broadcast(torch.tensor([[0.0, 2.0], [4.0, 6.0]]))
    tensor([[1., 3.],
            [3., 5.]])
    """
    _check_tokens(x)
    if scale is not None:
        _check_scale(scale, x.shape[-1])
    return _in_float32(lambda wide: _broadcast(wide, scale), x)


def _broadcast(x: Tensor, scale: Tensor | None) -> Tensor:
    mean = x.mean(-2, keepdim=True)
    if scale is None:
        return (x + mean) * 0.5
    return torch.lerp(x, mean.expand_as(x), scale.to(x.dtype).expand_as(x))


def _gray_dct(x: Tensor, eps: float | Tensor, *, rescale: bool, floor: float) -> Tensor:
    coefficients = dct2(x)
    magnitude = coefficients.abs()
    largest = magnitude.amax((-2, -1), keepdim=True)
    is_zero = largest == 0
    largest = torch.where(is_zero, 1, largest)
    # Of a zero matrix nothing is small beside the largest: its gradient is the identity.
    relative = torch.where(is_zero, 1, magnitude / largest)
    if not rescale:
        coefficients = coefficients / largest
    return idct2(coefficients * power_gain(relative, eps, floor))


def _in_float32(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply ``function`` in at least float32, outside autocast, and give x's dtype back."""
    with without_autocast(x):
        return function(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)


def _check_tokens(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"tokens must be a torch.Tensor, got {type(x).__name__}; torch.as_tensor makes one.")
    if not x.is_floating_point():
        raise TypeError(f"tokens must be floating point, got {x.dtype}; convert with x.float().")
    if x.is_nested:
        raise TypeError(
            "tokens must be a dense tensor, got a nested one; "
            "build nn.TransformerEncoder with enable_nested_tensor=False."
        )
    if x.ndim < 2:
        raise ValueError(
            f"tokens must have at least two axes (..., N, D), got shape {tuple(x.shape)}; "
            "x[None] makes a single token of a vector."
        )
    if x.shape[-1] == 0 or x.shape[-2] == 0:
        raise ValueError(
            f"tokens need at least one token and one channel, got shape {tuple(x.shape)}; "
            "the last two axes are tokens and channels."
        )


def _check_scale(scale: Tensor, channels: int) -> None:
    if not isinstance(scale, Tensor):
        raise TypeError(f"scale must be a torch.Tensor, got {type(scale).__name__}; torch.tensor makes one.")
    if not scale.is_floating_point():
        raise TypeError(f"scale must be floating point, got {scale.dtype}; convert with scale.float().")
    if scale.ndim > 0 and scale.shape != (channels,):
        raise ValueError(
            f"scale must have one value for each of the {channels} channels, "
            f"got shape {tuple(scale.shape)}; the channels are the last axis of x."
        )


def _check_fraction(name: str, value: float, remedy: str) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number in (0, 1], got {type(value).__name__}; {remedy}.")
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value}; {remedy}.")
