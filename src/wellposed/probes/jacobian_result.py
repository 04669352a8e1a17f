"""The spectrum of a Jacobian as a result: values with error bars, bounds where that is all, records."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from wellposed.linalg.lanczos import Ends, Estimates, SpectralDensity
from wellposed.records import Record, Status, dtype_name

Method = Literal["auto", "dense", "matrix-free"]

_CURVE = 200


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
        ends: ``"largest"`` where the smallest was not waited for.
        largest, smallest: both ends, descending, with error bars.
        rounding: below it ``dtype`` resolves nothing.
        singular_values: all of them, descending, float64; None where matrix-free.
        density: their distribution, where it was asked for.

    >>> import timm, torch
    >>> from wellposed.probes import jacobian_spectrum
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=16, embed_dim=12, depth=1)
    >>> found = jacobian_spectrum(model, torch.randn(1, 3, 32, 32), part="ffn", skip=True)
    >>> found.size, found.kappa.status, len(found.singular_values)
    (60, 'ok', 60)
    """

    block: int
    module: str
    part: str
    skip: bool | None
    size: int
    method: Method
    dtype: torch.dtype
    steps: int
    ends: Ends
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

    def __str__(self) -> str:
        top, bottom, kappa = self.records()
        return (
            f"Jacobian of {self.module} {kappa.position}, {self.size} x {self.size}: sigma max {top.text()}, "
            f"sigma min {bottom.text()}, kappa {kappa.text()} ({kappa.estimator}, {kappa.dtype})"
        )

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
        if self.ends == "largest":
            return "only the largest was asked for"
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
