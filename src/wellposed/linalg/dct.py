r"""Orthonormal two-dimensional DCT-II: by FFT on a CPU, as two matrix products on a GPU and in programs.

.. math::
    C = D_N X D_D^T, \qquad
    (D_n)_{kj} = \sqrt{2/n}\, \cos\frac{\pi (2j + 1) k}{2n}, \quad (D_n)_{0j} = \sqrt{1/n}

>>> import torch
>>> x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
>>> torch.allclose(idct2(dct2(x)), x)
True
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from wellposed.linalg.execution import is_jit_traced, is_traced
from wellposed.linalg.precision import without_autocast


def _compute_dct_matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    k = torch.arange(n, device=device, dtype=torch.int64)
    # The angle is reduced in integers: the cosine of a large float would have lost its digits.
    quarter_turns = k[:, None] * (2 * k[None, :] + 1) % (4 * n)
    # MPS has no float64; everywhere else the matrix is rounded once, at the end.
    wide = torch.float32 if device.type == "mps" else torch.float64
    matrix = torch.cos(quarter_turns.to(wide) * (math.pi / 2) / n)
    matrix = matrix * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix.to(dtype)


@functools.lru_cache(maxsize=64)
def _cached_dct_matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A matrix made inside inference mode could not serve a later training step.
    with torch.inference_mode(False), torch.no_grad():
        return _compute_dct_matrix(n, dtype, device)


def dct_matrix(n: int, *, like: Tensor) -> Tensor:
    """The n x n orthonormal DCT-II matrix in the dtype and on the device of ``like``.

    Cached for each (n, dtype, device); inside a traced program it is part of the graph instead.
    """
    make = _compute_dct_matrix if is_traced() else _cached_dct_matrix
    return make(n, like.dtype, like.device)


def _half_products(x: Tensor, rows: Tensor, columns: Tensor, size: Tensor | None) -> Tensor:
    """The product rows @ x @ columns^T with factors of float16's 11 bits.

    Every matrix is divided by its size first: sums of N D numbers below 1 are far from the end of float16.
    """
    if size is None:
        size = x.abs().amax((-2, -1), keepdim=True)
    size = torch.where(size == 0, 1, size)
    # Sums over 200 tokens, whose rows begin at multiples of 16 bytes, load faster than over 196.
    tokens, channels = -x.shape[-2] % 8, -x.shape[-1] % 8
    pad = torch.nn.functional.pad
    inner = pad((x / size).half(), (0, channels, 0, tokens))
    out = pad(rows.half(), (0, tokens)) @ inner @ pad(columns.half(), (0, channels)).mT
    return out.to(x.dtype) * size


def _by_fft(x: Tensor, inverse: bool) -> Tensor:
    from scipy import fft  # here, since it takes a while

    transform = fft.idctn if inverse else fft.dctn
    # A tensor that is to be differentiated gives its numbers to nobody else.
    out = transform(x.detach().numpy(), axes=(-2, -1), norm="ortho", workers=torch.get_num_threads())
    return torch.from_numpy(out)


class _Rotate(torch.autograd.Function):
    """rows @ x @ columns^T, whose gradient keeps its digits in a backward pass inside autocast too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, rows: Tensor, columns: Tensor, inverse: bool, half: bool, size: Tensor | None
    ) -> Tensor:
        if half:
            return _half_products(x, rows, columns, size)
        if x.device.type == "cpu" and x.numel() > 0 and not is_traced():
            return _by_fft(x, inverse)
        return rows @ x @ columns.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, rows, columns, ctx.inverse, ctx.half, _ = inputs
        ctx.save_for_backward(rows, columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns = ctx.saved_tensors
        with without_autocast(grad):
            return _rotate(grad, rows.mT, columns.mT, not ctx.inverse, ctx.half), *[None] * 5


def _rotate(
    x: Tensor, rows: Tensor, columns: Tensor, inverse: bool, half: bool, size: Tensor | None = None
) -> Tensor:
    # Plain products under forward-mode differentiation, for which a Function needs a rule that the
    # compiler does not take, and under torch.jit.trace, which cannot save a Function.
    if not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or is_jit_traced()
    ):
        return rows @ x @ columns.mT
    out: Tensor = _Rotate.apply(x, rows, columns, inverse, half, None if size is None else size.detach())
    return out


def dct2(x: Tensor, *, half: bool = False) -> Tensor:
    """Orthonormal DCT-II over the last two axes of x (..., N, D).

    With ``half`` the factors of the products have the 11 bits of float16, whatever the size of x, which a GPU
    multiplies much faster. There and back that is an error of about 1e-3.
    """
    return _rotate(x, dct_matrix(x.shape[-2], like=x), dct_matrix(x.shape[-1], like=x), False, half)


def idct2(coefficients: Tensor, *, half: bool = False, size: Tensor | None = None) -> Tensor:
    """Inverse of :func:`dct2`; with ``half`` the size (..., 1, 1) of the largest coefficient may be given."""
    rows = dct_matrix(coefficients.shape[-2], like=coefficients)
    columns = dct_matrix(coefficients.shape[-1], like=coefficients)
    return _rotate(coefficients, rows.mT, columns.mT, True, half, size)
