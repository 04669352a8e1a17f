r"""The singular values of the Jacobian of one sub-block, at the tokens of an image.

.. math::
    J = \frac{\partial f(x)}{\partial x}, \qquad J \in R^{ND \times ND}

A small one is made whole. The attention of a ViT-B has a Jacobian of 151,296 x 151,296, 92 GB: there only
products with vectors are computed, and from them both ends of the spectrum by
:mod:`wellposed.linalg.lanczos`, and on demand the distribution of the rest.

A pre-norm branch without its skip has singular values of exactly zero: LayerNorm forgets the mean and the
length of every token. Its smallest value is then "at most" what the arithmetic can tell from zero.

>>> import timm, torch
>>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
>>> spectrum = jacobian_spectrum(model, torch.randn(1, 3, 32, 32), skip=True)
>>> spectrum.method, len(spectrum.singular_values), spectrum.kappa.status
('dense', 960, 'ok')
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from wellposed.linalg.lanczos import (
    ROUNDING,
    Estimates,
    OnStep,
    Product,
    SpectralDensity,
    extreme_singular_values,
    spectral_density,
)
from wellposed.linalg.precision import without_autocast
from wellposed.nn.functional import Method as GrayMethod
from wellposed.probes.images import first_images
from wellposed.probes.observe import plain
from wellposed.probes.subblock import SubBlock, sub_block
from wellposed.records import Record, Status, dtype_name
from wellposed.surgery.gray import gray_tokens

Method = Literal["auto", "dense", "matrix-free"]

_CURVE = 200
_ROWS_AT_ONCE = 64


class Bounded(NamedTuple):
    """A value with its error bar, or a bound of it."""

    value: float | None
    low: float | None
    high: float | None
    status: Status


@dataclass(frozen=True, kw_only=True)
class JacobianSpectrum:
    """What is known of the singular values of a sub-block's Jacobian.

    Args:
        block, module, part, skip: which sub-block; see :class:`~wellposed.probes.subblock.SubBlock`.
        size: rows and columns of the Jacobian.
        method: ``"dense"`` or ``"matrix-free"``.
        dtype: in which the Jacobian or its products were computed.
        steps: of the Golub-Kahan process; 0 where dense.
        largest, smallest: both ends, descending, with error bars.
        rounding: what ``dtype`` cannot tell from zero.
        singular_values: all of them, descending, float64; None where matrix-free.
        density: their distribution, where it was asked for.
    """

    block: int
    module: str
    part: str
    skip: bool | None
    size: int
    method: Method
    dtype: torch.dtype
    steps: int
    largest: Estimates
    smallest: Estimates
    rounding: float
    singular_values: Tensor | None
    density: SpectralDensity | None

    @property
    def sigma_max(self) -> Bounded:
        value, low, high, is_known = (column[0].item() for column in self.largest)
        # A Ritz value is never above the largest, so what has not converged is a bound.
        is_known = is_known or high == 0
        return Bounded(value, low, high, "ok") if is_known else Bounded(low, low, None, "at least")

    @property
    def sigma_min(self) -> Bounded:
        value, low, high, is_known = (column[-1].item() for column in self.smallest)
        is_known = is_known or high == 0
        return Bounded(value, low, high, "ok") if is_known else Bounded(high, None, high, "at most")

    @property
    def kappa(self) -> Bounded:
        """sigma_max / sigma_min, at least that where one of them is a bound; none of a zero Jacobian."""
        top, bottom = self.sigma_max, self.sigma_min
        if not top.value or not bottom.value:
            return Bounded(None, None, None, "not measured")
        low = (top.low or 0) / (bottom.high or bottom.value)
        if top.high is None or not bottom.low:
            return Bounded(low, low, None, "at least")
        return Bounded(top.value / bottom.value, low, top.high / bottom.low, "ok")

    def curve(self, count: int = _CURVE) -> Tensor:
        """At most ``count`` values that stand for the spectrum, descending; none without a distribution."""
        if self.singular_values is not None:
            total = len(self.singular_values)
            picked = torch.linspace(0, total - 1, min(count, total), dtype=torch.float64).round().long()
            return self.singular_values[picked]
        return torch.empty(0, dtype=torch.float64) if self.density is None else self.density.quantiles(count)

    def relative(self, count: int = _CURVE) -> Tensor:
        """:meth:`curve` over the largest value, to compare shapes."""
        values = self.curve(count)
        return values / values[:1].clamp(min=torch.finfo(torch.float64).tiny)

    def records(self) -> list[Record]:
        """The largest and the smallest singular value, and kappa with the curve."""
        top, bottom = self._why_at_least(), self._why_at_most()
        both = "; ".join(note for note in (top, bottom) if note)
        is_zero = self.sigma_max.value == 0
        return [
            self._record("jacobian sigma max", self.sigma_max, top),
            self._record("jacobian sigma min", self.sigma_min, bottom),
            self._record(
                "jacobian kappa", self.kappa, "the Jacobian is zero" if is_zero else both, self.curve()
            ),
        ]

    def _why_at_least(self) -> str:
        is_known = self.sigma_max.status == "ok"
        return "" if is_known else f"the largest has not converged in {self.steps} steps"

    def _why_at_most(self) -> str:
        if self.sigma_min.status == "ok":
            return ""
        if self.smallest.values[-1] <= self.rounding:
            return f"the smallest is zero as far as {dtype_name(self.dtype)} can tell"
        if self.method == "dense":
            return f"the smallest is too close to the rounding of {dtype_name(self.dtype)}"
        return f"the smallest has not converged in {self.steps} steps"

    def _record(self, measure: str, bounded: Bounded, note: str, curve: Tensor | None = None) -> Record:
        value, low, high, status = bounded
        tolerance = None
        if value and low is not None and high is not None:
            tolerance = max(high - value, value - low) / value
        return Record(
            measure=measure,
            value=value,
            block=self.block,
            module=self.module,
            position=self.part + ("+skip" if self.skip else ""),
            low=low,
            high=high,
            images=1,
            status=status,
            note=note,
            estimator=self._estimator(),
            dtype=dtype_name(self.dtype),
            tolerance=tolerance,
            curve=() if curve is None else tuple(curve.tolist()),
        )

    def _estimator(self) -> str:
        if self.method == "dense":
            return "dense Jacobian, singular values in float64"
        curve = f"; curve by Lanczos quadrature, {len(self.density.nodes)} probes" if self.density else ""
        return f"Golub-Kahan-Lanczos, {self.steps} steps{curve}"


def jacobian_spectrum(
    model: nn.Module,
    images: object,
    *,
    block: int = 0,
    part: str = "attention",
    skip: bool = False,
    method: Method = "auto",
    k: int = 5,
    tolerance: float = 1e-2,
    max_steps: int = 300,
    density: bool = False,
    density_probes: int = 4,
    density_steps: int = 40,
    dtype: torch.dtype | None = None,
    dense_limit: int = 2048,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> JacobianSpectrum:
    """The spectrum of the Jacobian of one sub-block, at the first image.

    Args:
        images: whatever :func:`~wellposed.probes.images.image_batches` takes.
        block, part, skip: see :func:`~wellposed.probes.subblock.sub_block`.
        method: ``"auto"`` is dense up to ``dense_limit`` rows, and matrix-free beyond.
        k: how many values at each end.
        tolerance: the relative error up to which a value counts as known, else it is a bound.
        max_steps: of the matrix-free method, which stops before where all 2 k values are known; each costs
            a product with the Jacobian and one with its transpose.
        density: the distribution of the singular values too, of the matrix-free method; from
            ``density_probes`` random vectors with ``density_steps`` steps each.
        dtype: to compute in, float32 or float64. None is float64 for a dense one and for a model in
            float64, else float32.
        seed: of the random vectors, which leave the global generators alone.
        on_step: called with the number of steps done and the most there will be.
    """
    model = plain(model)
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}.")
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"dtype must be float32 or float64, got {dtype}; a spectrum needs their digits.")
    if k < 1 or not tolerance > 0:
        raise ValueError(f"k and tolerance must be positive, got {k} and {tolerance}; 5 and 0.01 are usual.")
    image = first_images(images, model, 1)
    cut = sub_block(model, image, block, part, skip=skip, dtype=dtype)
    size = cut.input.numel()
    is_dense = method == "dense" or (method == "auto" and size <= dense_limit)
    if dtype is None:
        dtype = _default_dtype(cut.input, is_dense)
        if cut.input.dtype != dtype:
            cut = sub_block(model, image, block, part, skip=skip, dtype=dtype)
    with _exactly(cut.input):
        if is_dense:
            return _dense(cut, k, tolerance)
        apply, apply_adjoint = products(cut)
        shared: dict[str, Any] = {
            "dtype": dtype,
            "device": cut.input.device,
            "seed": seed,
            "on_step": on_step,
        }
        found = extreme_singular_values(
            apply, apply_adjoint, size, k=k, tolerance=tolerance, max_steps=max_steps, **shared
        )
        if density:
            shared |= {"probes": density_probes, "steps": density_steps, "known": [found.bidiagonal]}
            spread = spectral_density(apply, apply_adjoint, size, **shared)
    return _spectrum(
        cut,
        method="matrix-free",
        steps=found.steps,
        largest=found.largest,
        smallest=found.smallest,
        rounding=found.rounding,
        singular_values=None,
        density=spread if density else None,
    )


def _default_dtype(x: Tensor, is_dense: bool) -> torch.dtype:
    # Float64 costs little where the Jacobian is small; MPS has none.
    is_wide = x.dtype == torch.float64 or (is_dense and x.device.type != "mps")
    return torch.float64 if is_wide else torch.float32


@contextlib.contextmanager
def _exactly(x: Tensor) -> Iterator[None]:
    """Inside, derivatives on x's device are computed with all digits of their dtype."""
    backends: Any = torch.backends
    # Convolutions on a GPU round to TF32 unless told otherwise.
    settings = [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv]
    before = [setting.fp32_precision for setting in settings]
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(x):
        try:
            for setting in settings:
                setting.fp32_precision = "ieee"
            yield
        finally:
            for setting, value in zip(settings, before, strict=True):
                setting.fp32_precision = value


def products(cut: SubBlock) -> tuple[Product, Product]:
    """J v and J^T u on flat vectors; the forward pass is done once for all of them.

    J v is the adjoint of u -> J^T u, which is linear, so its derivative at zero serves everywhere. That
    takes no forward mode, costs a third of it, and works for every operation with a second derivative.
    """
    output, pull = _pullback(cut.function, cut.input)
    _, push = _pullback(pull, torch.zeros_like(output))

    def apply(v: Tensor) -> Tensor:
        return push(v.reshape(cut.input.shape)).detach().reshape(-1)

    def apply_adjoint(u: Tensor) -> Tensor:
        return pull(u.reshape(output.shape)).detach().reshape(-1)

    return apply, apply_adjoint


def dense_jacobian(cut: SubBlock) -> Tensor:
    """J as a matrix, output by input."""
    output, pull = _pullback(cut.function, cut.input)
    units = torch.eye(output.numel(), dtype=output.dtype, device=output.device)
    rows = [
        torch.func.vmap(pull)(some.reshape(-1, *output.shape)).detach().reshape(len(some), -1)
        for some in torch.split(units, _ROWS_AT_ONCE)
    ]
    return torch.cat(rows)


def _pullback(function: Product, x: Tensor) -> tuple[Tensor, Product]:
    """function(x), and u -> J^T u there."""
    output, pull, *_ = torch.func.vjp(function, x)
    return output, lambda u: pull(u)[0]


def _dense(cut: SubBlock, k: int, tolerance: float) -> JacobianSpectrum:
    matrix = dense_jacobian(cut)
    s = torch.linalg.svdvals(matrix.cpu().double())
    rounding = ROUNDING * torch.finfo(matrix.dtype).eps * s[0].item()
    every = Estimates(s, (s - rounding).clamp(min=0), s + rounding, (s > 0) & (rounding <= tolerance * s))
    return _spectrum(
        cut,
        method="dense",
        steps=0,
        largest=Estimates(*(column[:k] for column in every)),
        smallest=Estimates(*(column[-k:] for column in every)),
        rounding=rounding,
        singular_values=s,
        density=None,
    )


def _spectrum(cut: SubBlock, **found: Any) -> JacobianSpectrum:
    return JacobianSpectrum(
        block=cut.block,
        module=cut.name,
        part=cut.part,
        skip=cut.skip,
        size=cut.input.numel(),
        dtype=cut.input.dtype,
        **found,
    )


def graying_sweep(
    model: nn.Module,
    images: object,
    eps: Sequence[float] = (1.0, 0.9, 0.7, 0.5),
    *,
    gray_method: GrayMethod = "svd",
    where: Literal["embedding", "blocks"] = "embedding",
    block: int = 0,
    **options: Any,
) -> dict[float, JacobianSpectrum]:
    """The spectrum of one sub-block's Jacobian under Token Graying of several strengths.

    Figures 7 and 8 of Always Skip Attention. Each eps grays the tokens in a copy of the model and looks at
    the same sub-block there, with the weights as they are; :meth:`JacobianSpectrum.relative` compares the
    shapes.

    Args:
        eps: strengths in (0, 1]; 1 is the model as it is.
        gray_method: ``"svd"`` (Figure 7), ``"dct"`` (Figure 8) or ``"spectral"``.
        where: the patch embedding's output, or ``"blocks"`` for the input of ``block``. The first leaves
            the class token alone, which is short in many models: LayerNorm's slope there may set the
            largest value, and then the first block changes little.
        options: of :func:`jacobian_spectrum`.
    """
    if where not in ("embedding", "blocks"):
        raise ValueError(f"where must be embedding or blocks, got {where!r}.")
    if not eps:
        raise ValueError(
            "eps must name at least one strength, got none; (1.0, 0.9, 0.7, 0.5) is the default."
        )
    model = plain(model)
    image = first_images(images, model, 1)
    spectra = {}
    for strength in eps:
        grayed = copy.deepcopy(model)
        gray_tokens(grayed, strength, gray_method, where, blocks=block if where == "blocks" else None)
        spectra[float(strength)] = jacobian_spectrum(grayed, image, block=block, **options)
    return spectra
