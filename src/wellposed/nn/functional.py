"""Token Graying (arXiv 2505.01996) and Context Broadcasting (arXiv 2210.08457) of x (..., N, D).

N tokens, D channels, any batch shape. Both compute in at least float32 whatever autocast says, and
return the dtype they were given.
"""

import numbers
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from wellposed.linalg import (
    DEFAULT_FLOOR,
    Precision,
    dct2,
    idct2,
    power_for_kappa,
    power_gain,
    spectral_condition,
    spectral_plan,
    spectral_power,
    svd_power,
)
from wellposed.linalg.precision import without_autocast
from wellposed.linalg.spectral_plan import DEFAULT_TOLERANCE

Method = Literal["spectral", "svd", "dct", "condition", "energy"]

DEFAULT_EPS: dict[Method, float] = {"spectral": 0.7, "svd": 0.7, "dct": 0.95, "energy": 0.7}
"""What the paper found best for each method that has a power."""


def gray(
    x: Tensor,
    eps: float | Tensor | None = None,
    method: Method = "spectral",
    *,
    target_kappa: float | None = None,
    rescale: bool = True,
    floor: float | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    precision: Precision = "auto",
) -> Tensor:
    r"""Token Graying: flatten the spectrum of the token matrix.

    .. math::
        X = U S V^T \;\mapsto\; U S' V^T, \qquad S' = s_{\max} (S / s_{\max})^\epsilon

    so that the condition number kappa becomes kappa^eps. With ``method="dct"`` the magnitudes of the
    coefficients of a two-dimensional DCT take the place of the singular values; their signs stay.

    Args:
        x: (..., N, D) tokens, floating point.
        eps: in (0, 1]. 1 leaves the tokens as they are, less is flatter; None is the paper's choice for the
            method (0.7, DCT 0.95). A tensor of one number, on x's device, may change without compiling again;
            its range is not checked, and it gets no gradient. With ``"spectral"`` it may also have one
            number for each matrix (...).
        method: ``"spectral"`` is the map above: exact on a CPU, by an eigendecomposition of the Gram matrix;
            by matrix products on a GPU, each singular value right to ``tolerance``. ``"svd"`` is the same by
            ``torch.linalg.svd``; it is far slower on a GPU, and ONNX has none. ``"dct"`` is the paper's cheap
            stand-in. ``"condition"`` has no eps: X + s_max U V^T (arXiv 2505.12789), of kappa at most 2. All
            gradients are finite where singular values repeat or vanish. ``"energy"`` is a control in studies:
            x times one number a matrix, which gives it the Frobenius norm that ``"spectral"`` would; its
            spectrum keeps its shape. The gradient takes that number for a constant.
        target_kappa: instead of eps, with ``"spectral"``: each matrix gets the eps that makes its kappa this
            one, or stays as it is if that is smaller already. kappa counts up to 1 / floor. The gradient
            takes the eps found for a constant.
        rescale: False gives the paper's literal (S / s_max)^eps, whose largest value is 1.
        floor: values below ``floor`` times the largest are scaled linearly, which bounds the gradient. None
            is 1e-7 for ``"svd"`` and ``"dct"``; otherwise 1e-6 on a CPU, 1e-5 elsewhere, or 1/300 where the
            arithmetic is float32.
        tolerance, precision: of ``"spectral"`` and ``"condition"``, see
            :func:`wellposed.linalg.spectral_power`; ``print(wellposed.linalg.spectral_plan(x))`` says what
            they come to.

    A matrix that holds a non-finite value gives a non-finite result, the others are untouched. Zero
    tokens give zeros, and pass their gradient on as it is.

    >>> import torch
    >>> x = torch.diag(torch.tensor([100.0, 1.0]))
    >>> torch.linalg.cond(gray(x, 0.5, "svd"))
    tensor(10.)
    >>> round(torch.linalg.cond(gray(x, target_kappa=4)).item(), 1)
    4.0
    """
    _check_tokens(x)
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}.")
    _check_choices(method, eps, target_kappa, rescale)
    if floor is not None:
        _check_fraction("floor", floor, "it is relative to the largest value, and None is the method's own")
    _check_fraction("tolerance", tolerance, f"the default is {DEFAULT_TOLERANCE}")
    if method in ("svd", "dct") and (tolerance != DEFAULT_TOLERANCE or precision != "auto"):
        raise ValueError(f"tolerance and precision go with spectral and condition, got method={method!r}.")
    if method == "condition":
        return spectral_condition(x, floor=floor, tolerance=tolerance, precision=precision)
    if target_kappa is not None:
        # Down to 1/300 would be too few: real tokens have a kappa of some thousands and more.
        is_open = precision == "auto" and floor is None and x.device.type != "mps"
        precision = "float64" if is_open else precision
        plan = spectral_plan(x, floor=floor, tolerance=tolerance, precision=precision)
        eps = power_for_kappa(x, float(target_kappa), plan.floor)
    elif eps is None:
        eps = DEFAULT_EPS[method]
    elif isinstance(eps, Tensor):
        _check_powers(eps, x, method)
    else:
        _check_fraction("eps", eps, "1 leaves the tokens as they are, less flattens their spectrum")
        eps = float(eps)
        if eps == 1 and rescale:
            return x
    if method in ("spectral", "energy"):
        grayed = spectral_power(
            x, eps, rescale=rescale, floor=floor, tolerance=tolerance, precision=precision
        )
        return grayed if method == "spectral" else _with_norm_of(grayed, x)
    lowest = DEFAULT_FLOOR if floor is None else floor
    if method == "svd":
        return _in_float32(lambda wide: svd_power(wide, eps, rescale=rescale, floor=lowest), x)
    # Where products of 8 bits are asked for, a GPU gives them with 11, at a fraction of the price of 24.
    half = x.is_cuda and (x.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled("cuda"))
    return _in_float32(lambda wide: _gray_dct(wide, eps, rescale=rescale, floor=lowest, half=half), x)


def _with_norm_of(like: Tensor, x: Tensor) -> Tensor:
    """Each matrix of x, scaled to the Frobenius norm that the one of ``like`` has."""
    with torch.no_grad():
        wide = torch.promote_types(x.dtype, torch.float32)
        norms = [torch.linalg.matrix_norm(each.to(wide), keepdim=True) for each in (like, x)]
        ratio = torch.where(norms[1] > 0, norms[0] / norms[1], 1)
    return (x * ratio).to(x.dtype)


def broadcast(x: Tensor, scale: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
    r"""Context Broadcasting: mix the mean token into every token.

    .. math::
        x_i \mapsto (1 - a)\, x_i + a \cdot \frac{1}{N} \sum_j x_j

    CB is a = 1/2. CB_S learns a for each channel, which is ``scale`` here: 1/2 is CB, 0 leaves the
    tokens as they are, 1 is uniform attention. The mean over the tokens stays what it was.

    Args:
        x: (..., N, D) tokens, floating point.
        scale: (D,) or a scalar; None is CB.
        padding: (..., N), True for tokens that do not count in the mean; they get it too.

    >>> import torch
    >>> broadcast(torch.tensor([[0.0, 2.0], [4.0, 6.0]]))
    tensor([[1., 3.],
            [3., 5.]])
    """
    _check_tokens(x)
    if scale is not None:
        _check_scale(scale, x.shape[-1])
    _check_padding(padding, x)
    return _in_float32(lambda wide: _broadcast(wide, scale, padding), x)


def mix_mean(
    x: Tensor, mean: Tensor | float, difference: Tensor | float, padding: Tensor | None = None
) -> Tensor:
    r"""Scale the mean of the tokens, and what differs from it, each by its own factor.

    .. math::
        x_i = m + d_i \;\mapsto\; a\, m + b\, d_i, \qquad m = \frac{1}{N} \sum_j x_j

    Context Broadcasting is a = 1, b = 1/2; CB_S is a = 1 with a learned b; FeatScale is a and b learned.

    Args:
        x: (..., N, D) tokens, floating point.
        mean, difference: a and b, each a number, a scalar tensor or (D,).
        padding: (..., N), True for tokens that do not count in the mean; they are mapped too.

    >>> import torch
    >>> mix_mean(torch.tensor([[0.0, 2.0], [4.0, 6.0]]), 1.0, 0.5)
    tensor([[1., 3.],
            [3., 5.]])
    """
    _check_tokens(x)
    for factor in (mean, difference):
        if isinstance(factor, Tensor):
            _check_scale(factor, x.shape[-1])
    _check_padding(padding, x)

    def mixed(wide: Tensor) -> Tensor:
        a, b = (each.to(wide.dtype) if isinstance(each, Tensor) else each for each in (mean, difference))
        return b * wide + (a - b) * _mean(wide, padding)

    return _in_float32(mixed, x)


def _mean(x: Tensor, padding: Tensor | None) -> Tensor:
    if padding is None:
        return x.mean(-2, keepdim=True)
    keep = ~padding[..., None]
    return torch.where(keep, x, 0).sum(-2, keepdim=True) / keep.sum(-2, keepdim=True).clamp(min=1)


def _broadcast(x: Tensor, scale: Tensor | None, padding: Tensor | None) -> Tensor:
    mean = _mean(x, padding)
    if scale is None:
        return (x + mean) * 0.5
    return torch.lerp(x, mean.expand_as(x), scale.to(x.dtype).expand_as(x))


def _gray_dct(x: Tensor, eps: float | Tensor, *, rescale: bool, floor: float, half: bool) -> Tensor:
    coefficients = dct2(x, half=half)
    if isinstance(eps, Tensor):
        eps = eps.detach()
    with torch.no_grad():
        size = coefficients.abs().amax((-2, -1), keepdim=True)
        # The inverse of a subnormal number is infinite; this one is normal, and that is all it must be.
        unit = torch.where(size > 0, size, 1).clamp(2.0**-100, 2.0**100)
    scaled = coefficients / unit
    magnitude = scaled.abs()
    largest = magnitude.amax((-2, -1), keepdim=True)
    is_zero = largest == 0
    largest = torch.where(is_zero, 1, largest)
    # Of a zero matrix nothing is small compared with the largest: its gradient is the identity.
    relative = torch.where(is_zero, 1, magnitude / largest)
    gain = power_gain(relative, eps, floor)
    if not rescale:
        return idct2(scaled / largest * gain, half=half, size=torch.ones_like(largest))
    # Multiplied by the unit at last, for the digits of what the gradient goes through.
    return idct2(scaled * gain, half=half, size=largest) * unit


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


def _check_choices(
    method: Method, eps: float | Tensor | None, target_kappa: float | None, rescale: bool
) -> None:
    """What cannot be chosen together."""
    if method == "condition" and eps is not None:
        raise ValueError("eps must be None with method='condition', which has no power; leave it out.")
    if method == "condition" and not rescale:
        raise ValueError("rescale=False goes with a power, got method='condition'; leave it out.")
    if target_kappa is None:
        return
    if method != "spectral":
        raise ValueError(f"target_kappa goes with method='spectral', got {method!r}; give eps instead.")
    if eps is not None:
        raise ValueError("target_kappa stands instead of eps, got both; leave one of them out.")
    if not isinstance(target_kappa, numbers.Real) or isinstance(target_kappa, bool):
        raise TypeError(f"target_kappa must be a number, got {type(target_kappa).__name__}.")
    if not 1 <= target_kappa < float("inf"):
        raise ValueError(f"target_kappa must be at least 1 and finite, got {target_kappa}.")


def _check_powers(eps: Tensor, x: Tensor, method: Method) -> None:
    if eps.numel() == 1 or (method == "spectral" and eps.shape == x.shape[:-2]):
        return
    also = f" or one for each matrix {tuple(x.shape[:-2])}" if method == "spectral" else ""
    raise ValueError(f"eps must be one number{also}, got a tensor of shape {tuple(eps.shape)}.")


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


def _check_padding(padding: Tensor | None, x: Tensor) -> None:
    if padding is not None and padding.shape != x.shape[:-1]:
        raise ValueError(
            f"padding must have one entry a token, {tuple(x.shape[:-1])}, got {tuple(padding.shape)}."
        )


def _check_fraction(name: str, value: float, remedy: str) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number in (0, 1], got {type(value).__name__}; {remedy}.")
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value}; {remedy}.")
