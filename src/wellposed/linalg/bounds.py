r"""What Always Skip Attention (Propositions 4.1 and 4.2, eq. 24) says kappa stays below.

With the singular values :math:`\sigma_{\max}, \sigma_{\min}` of the tokens X (N, D), weights that act from
the right, and :math:`C = \kappa(W_Q) \kappa(W_K) \kappa(W_V)`:

.. math::
    \kappa(X W_Q W_K^T X^T X W_V) &\le C (\sigma_{\max} / \sigma_{\min})^3 && \text{(4.1)} \\
    \kappa(X M + X) &\le \frac{C \sigma_{\max}^3 + \sigma_{\max}}{\sigma_{\min}^3 + \sigma_{\min}},
        \quad M = W_Q W_K^T X^T X W_V && \text{(4.2)} \\
    \kappa(X W_1 W_2) &\le \kappa(W_1) \kappa(W_2) \kappa(X) && \text{(feed-forward)} \\
    \kappa(W_{CD} X) &\le \kappa(W_{CD}) \kappa(X) && \text{(24)}

Where are these theorems, and where rules of thumb? Kappa of an m x n matrix is over its min(m, n) singular
values. Then :math:`\kappa(AB) \le \kappa(A) \kappa(B)`, the step behind all four, is certain for A (m, p) and
B (p, n) where the sizes go one way: m >= p >= n or m <= p <= n. With p above both, the wide A may vanish on
what B gives, and AB may even be zero; with p below both, AB never has full rank.

- 4.1 is exact for N >= D and square weights: X^T X is then square, and its kappa is kappa(X)^2. For N < D
  (ViT-B: 197 < 768) the product X (W_Q W_K^T) X^T goes N, D, N: the weights can turn the row space of X out
  of itself. A positive definite W_Q W_K^T cannot, others can. The weights of one head (D, D/H) make
  (X W_K)^T (X W_V) go D/H, N, D/H: there it is never certain.
- 4.2 needs more. Its step (17) takes sigma_min(M + I) >= sigma_min(M) + 1, which holds for a symmetric
  positive semidefinite M; an M with an eigenvalue near -1 makes M + I singular. It also puts C sigma_max^2
  for sigma_max(M), so the smallest singular values of the three weights may have a product of at most 1.
  With both and N >= D it is exact. W = I reaches it for any N: X M + X has the singular values s^3 + s.
- The feed-forward bound is exact for square W_1 and W_2, and for W_2 = W_1^T with a hidden width of D or
  more. In general W_1 W_2 goes D, 4D, D, and may lose rank.
- (24) is exact where all channels share one kernel: the convolution is then T X with one square T. In a true
  depthwise convolution each channel has its own T, and channels that differed can come out alike.

>>> x = torch.diag(torch.tensor([4.0, 2.0], dtype=torch.float64))
>>> float(bound_attention(torch.tensor(1.0), x[0, 0], x[1, 1]))  # W = I: the singular values of x^3
8.0
>>> float(bound_attention_with_skip(torch.tensor(1.0), x[0, 0], x[1, 1]))  # (64 + 4) / (8 + 2)
6.8
"""

# Shapes: everything broadcasts; C, s_max, s_min and kappas have one value a matrix.

import math
import statistics
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.linalg.spectrum import KAPPA_LIMIT, ConditionNumber, condition_number, singular_values
from wellposed.records import VERDICTS

SLACK = 1e-3
"""A bound counts as violated where kappa exceeds it by more than this part."""

PRODUCT_FLOOR = 1e4 * torch.finfo(torch.float64).eps
"""Relative to the norms of a product's factors: a smaller singular value has lost its digits to rounding."""

DENSE_LIMIT = 2e10
"""Channels times N^3 up to which a convolution's singular values are those of its dense matrices."""

_CHUNK = 2**25  # entries of dense matrices at a time: 256 MiB


class Extremes(NamedTuple):
    """Largest and smallest singular value; the smallest is 0 where the matrix has no full rank."""

    largest: Tensor
    smallest: Tensor

    @property
    def kappa(self) -> Tensor:
        return torch.where(self.smallest == 0, math.inf, self.largest / self.smallest)


def extremes(x: Tensor) -> Extremes:
    """Of each matrix of x (..., N, D). Beyond the limit of ``condition_number`` it has no full rank."""
    values = singular_values(x)
    beyond = condition_number(x, singular_values=values).at_least
    return Extremes(values[..., 0], torch.where(beyond, 0, values[..., -1]))


def bound_attention(
    C: Tensor, s_max: Tensor, s_min: Tensor, *, keys: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Proposition 4.1.

    Args:
        C: kappa(W_Q) kappa(W_K) kappa(W_V).
        s_max, s_min: singular values of the tokens; s_min = 0 gives infinity.
        keys: the same of the tokens that keys and values are made of, where these are others (PVT).
    """
    k_max, k_min = keys or (s_max, s_min)
    return C * (s_max / s_min) * (k_max / k_min) ** 2


def bound_attention_with_skip(
    C: Tensor, s_max: Tensor, s_min: Tensor, *, keys: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Proposition 4.2: kappa(X) times the bound of kappa(M + I). See :func:`bound_attention`."""
    k_max, k_min = keys or (s_max, s_min)
    return (s_max / s_min) * (C * k_max**2 + 1) / (k_min**2 + 1)


def bound_ffn(kappa_first: Tensor, kappa_last: Tensor, kappa_tokens: Tensor) -> Tensor:
    """kappa(W_1) kappa(W_2) kappa(X)."""
    return kappa_first * kappa_last * kappa_tokens


def bound_depthwise(kappa_convolution: Tensor, kappa_tokens: Tensor) -> Tensor:
    """kappa(W_CD) kappa(X), eq. 24."""
    return kappa_convolution * kappa_tokens


def product_condition_number(product: Tensor, norm: Tensor) -> ConditionNumber:
    """Kappa of a product (..., N, D) formed in float64; ``norm`` is the product of its factors' norms.

    ``condition_number`` stops at 3e7, where float32 tokens end. A product of three X has kappa(X)^3, so this
    one goes on as long as the rounding of the product itself lets it.
    """
    values = singular_values(product.cpu()).to(product.device)
    floor = PRODUCT_FLOOR * norm
    # A product that vanishes altogether has no largest value either.
    largest, smallest = torch.maximum(values[..., 0], floor), torch.maximum(values[..., -1], floor)
    return ConditionNumber(largest / smallest, values[..., -1] < floor)


class Comparison(NamedTuple):
    """How many kappas have each of the :data:`VERDICTS`, and bound / kappa: its median and smallest."""

    counts: tuple[int, ...]
    margin: float | None
    smallest: float | None

    def __str__(self) -> str:
        total = sum(self.counts)
        counted = zip(VERDICTS, self.counts, strict=True)
        said = [f"{verdict} for {count} of {total}" for verdict, count in counted if count]
        if self.counts[1]:
            said.append("infinite where tokens or weights have no full rank")
        if self.margin is not None:
            said.append(f"margin x{self.margin:.3g}, smallest x{self.smallest:.3g}")
        return ", ".join(said)


def compare(measured: ConditionNumber, bound: Tensor) -> Comparison:
    """Kappas beside bounds of the same shape.

    >>> kappa = torch.tensor([2.0, 8.0, 2.0, 2.0])
    >>> at_least = torch.tensor([False, False, True, False])
    >>> print(compare(ConditionNumber(kappa, at_least), torch.tensor([4.0, 4.0, 4.0, math.inf])))
    holds for 1 of 4, holds trivially for 1 of 4, violated for 1 of 4, cannot tell for 1 of 4,
    infinite where tokens or weights have no full rank, margin x1.25, smallest x0.5
    """
    kappa, at_least = measured
    told = kappa.isfinite() & ~bound.isnan()
    trivially = told & bound.isinf()
    violated = told & (kappa > bound * (1 + SLACK))
    cannot_tell = ~told | (at_least & ~trivially & ~violated)
    holds = ~(trivially | violated | cannot_tell)
    counts = tuple(int(mask.sum()) for mask in (holds, trivially, violated, cannot_tell))
    margins = (bound / kappa)[holds | violated].tolist()
    typical, smallest = (statistics.median(margins), min(margins)) if margins else (None, None)
    return Comparison(counts, typical, smallest)


def depthwise_extremes(
    kernels: Tensor, grid: tuple[int, int], *, dilation: tuple[int, int] = (1, 1), dense: bool | None = None
) -> tuple[Extremes, str]:
    """Largest and smallest singular value of a zero-padded depthwise convolution, and how they were made.

    The convolution keeps the size of the image ("same"), and is one linear map of all channels' pixels.

    Args:
        kernels: (C, kh, kw), one a channel.
        grid: height and width of the image.
        dense: True for exact values; False for those of the circular convolution, quick at any size, whose
            smallest one can be far larger; None decides by :data:`DENSE_LIMIT`.
    """
    channels, pixels = len(kernels), grid[0] * grid[1]
    kernels = kernels.detach().double()
    if dense or (dense is None and channels * pixels**3 <= DENSE_LIMIT):
        step = max(1, _CHUNK // pixels**2)
        values = torch.cat([_dense_values(part, grid, dilation) for part in torch.split(kernels, step)])
        return _of_all(values), "dense matrix of each channel"
    return _of_all(_symbol(kernels, grid, dilation).abs()), "FFT symbol of each channel, circular border"


def _of_all(values: Tensor) -> Extremes:
    largest, smallest = values.max(), values.min()
    return Extremes(largest, torch.where(largest < KAPPA_LIMIT * smallest, smallest, 0))


def _dense_values(kernels: Tensor, grid: tuple[int, int], dilation: tuple[int, int]) -> Tensor:
    height, width = grid
    pixels = height * width
    basis = torch.eye(pixels, dtype=kernels.dtype, device=kernels.device).reshape(pixels, 1, height, width)
    out = torch.nn.functional.conv2d(basis, kernels[:, None], padding="same", dilation=dilation)
    T = out.permute(1, 2, 3, 0).reshape(len(kernels), pixels, pixels)
    # T depends on differences of positions alone, so upside down it is symmetric: its singular values are the
    # eigenvalues' magnitudes, at a fraction of the cost of an SVD.
    eigenvalues: Tensor = torch.linalg.eigvalsh(T.flip(-2))
    return eigenvalues.abs()


def _symbol(kernels: Tensor, grid: tuple[int, int], dilation: tuple[int, int]) -> Tensor:
    rows, columns = (
        torch.arange(size, device=kernels.device) * step % length
        for size, step, length in zip(kernels.shape[-2:], dilation, grid, strict=True)
    )
    image = kernels.new_zeros(len(kernels), grid[0] * grid[1])
    # Added, not set: a kernel larger than the grid wraps around it.
    places = (rows[:, None] * grid[1] + columns).flatten()
    image.index_add_(1, places, kernels.flatten(1))
    symbol: Tensor = torch.fft.fft2(image.reshape(-1, *grid))
    return symbol
