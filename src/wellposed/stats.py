r"""What runs show: intervals, tests and verdicts on claims, by rules that are fixed before the runs.

Two variants are compared seed by seed where the runs of one seed share their initialisation, their order of
the data and its augmentation. Of the differences d_1, ..., d_n the mean has a t-interval of 95%,

    mean(d) +- t_{n-1} s(d) / sqrt(n),

which covers the true mean in 95% of all studies for every n >= 2, if the differences are about normal. One
run decides nothing. That two variants are *alike* is a claim too, and needs a margin: it holds if both
"the difference is not above -margin" and "it is not below +margin" are refuted (two one-sided tests). A
difference that no test finds is undecided, not absent. Over all claims of a study, Holm's correction keeps
the chance of any false verdict below 5%.

Values that are only known to be *at least* something, such as condition numbers beyond the precision of
float32, have no mean. Their median is exact or itself a lower bound, and :func:`median` says which.

>>> without, grayed = {0: 50.1, 1: 51.0, 2: 49.6, 3: 50.3}, {0: 52.0, 1: 53.1, 2: 51.2, 3: 52.5}
>>> print(paired(grayed, without))
+1.95 [+1.53, +2.37], n = 4
>>> gain = Claim("graying helps", "spectral 0.7 - none, points", "higher", paired(grayed, without))
>>> same = Claim("norms are kept", "points", "same", paired({0: 1.0, 1: 1.4}, {0: 1.1, 1: 1.2}), margin=0.2)
>>> [claim.verdict.value for claim in judged([gain, same])]
['supported', 'undecided']
"""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.05
"""Chance of a false verdict, over all claims of one study."""

Direction = Literal["higher", "lower", "same"]
Comparison = Literal["paired", "unpaired", "paired median", "slope"]


class Verdict(StrEnum):
    """What the runs say about a claim."""

    SUPPORTED = "supported"
    CONTRADICTED = "contradicted"
    UNDECIDED = "undecided"
    NOT_TESTED = "not tested as published"


@dataclass(frozen=True)
class Spread:
    """Mean and sample deviation of n values; no deviation of one."""

    mean: float
    deviation: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.deviation is None else f" ± {self.deviation:.2f}")


def spread(values: Iterable[float | None]) -> Spread | None:
    """Of the values that are there; None of none.

    >>> print(spread([1.0, 2.0, None]))
    1.50 ± 0.71
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class Estimate:
    """A difference, with what is known about it.

    Args:
        mean: of the differences; the median where ``comparison`` is ``"paired median"``.
        n: pairs of runs; of unpaired runs, those of the smaller side; of a slope, points.
        low, high: the interval of 95%; infinite where n or the spread is too small to give one.
        comparison: how the runs were compared.
        p: of "the difference is zero", two-sided; None where nothing can be tested.
        error: standard error of the mean; None of a median, and where the runs do not show it.
        freedom: degrees of freedom of the t-distribution that goes with ``error``.
        at_least: the median is a lower bound, because too many of the differences are.
    """

    mean: float
    n: int
    low: float = -math.inf
    high: float = math.inf
    comparison: Comparison = "paired"
    p: float | None = None
    error: float | None = None
    freedom: float | None = None
    at_least: bool = False

    def covers(self, value: float) -> bool:
        """Whether a value, such as the paper's, lies in the interval."""
        return self.low <= value <= self.high

    @property
    def is_decided(self) -> bool:
        """Whether zero lies outside of the interval; one pair of runs has none."""
        return self.p is not None and not self.covers(0.0)

    @property
    def direction(self) -> Literal["higher", "lower", "undecided"]:
        """Of the first side, as far as it is decided."""
        if not self.is_decided:
            return "undecided"
        return "higher" if self.mean > 0 else "lower"

    def p_above(self, value: float) -> float:
        """One-sided, of "the true mean is at most ``value``": small if it is above."""
        return self._tail(value - self.mean)

    def p_below(self, value: float) -> float:
        """One-sided, of "the true mean is at least ``value``": small if it is below."""
        return self._tail(self.mean - value)

    def _tail(self, distance: float) -> float:
        if self.error is None or self.freedom is None:
            return 1.0
        from scipy import special  # here, since it takes a while

        return float(special.stdtr(self.freedom, distance / self.error))

    def p_within(self, margin: float) -> float:
        """Of "the true mean is ``margin`` or more away from zero", by two one-sided tests."""
        _require_margin(margin)
        return max(self.p_above(-margin), self.p_below(margin))

    def p_beyond(self, margin: float) -> float:
        """Of "the true mean is at most ``margin`` away from zero"; two-sided."""
        _require_margin(margin)
        return min(1.0, 2 * min(self.p_above(margin), self.p_below(-margin)))

    def __str__(self) -> str:
        at_least = "at least " if self.at_least else ""
        kind = "" if self.comparison == "paired" else f", {self.comparison}"
        interval = "" if self.p is None else f" [{_signed(self.low)}, {_signed(self.high)}]"
        return f"{at_least}{_signed(self.mean)}{interval}, n = {self.n}{kind}"


def paired(first: Mapping[Hashable, float], second: Mapping[Hashable, float]) -> Estimate:
    """Of ``first - second`` where runs of one key are a pair: same seed, data and order of the data.

    Runs without a partner do not count. If all differences are equal there is no interval: accuracy comes
    in steps, and equal steps do not show the spread.

    >>> print(paired({0: 3.0}, {0: 1.0}))
    +2.00, n = 1
    """
    return one_sample(_differences(first, second))


def one_sample(differences: Sequence[float]) -> Estimate:
    """Of differences that are there already.

    >>> print(one_sample([1.0, 2.0, 3.0]))
    +2.00 [-0.48, +4.48], n = 3
    """
    values = _finite(differences)
    mean, n = float(values.mean()), len(values)
    if n < 2 or _are_equal(values):
        return Estimate(mean, n)
    return _student(mean, n, "paired", float(values.std(ddof=1)) / math.sqrt(n), n - 1)


def unpaired(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Of ``mean(first) - mean(second)`` of independent runs, with Welch's t: the spreads may differ.

    >>> print(unpaired([3.0, 4.0, 5.0], [1.0, 1.5, 2.0]))
    +2.50 [+0.42, +4.58], n = 3, unpaired
    """
    a, b = _finite(first), _finite(second)
    mean, n = float(a.mean() - b.mean()), min(len(a), len(b))
    if n < 2 or (_are_equal(a) and _are_equal(b)):
        return Estimate(mean, n, comparison="unpaired")
    squares = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    freedom = sum(squares) ** 2 / (squares[0] ** 2 / (len(a) - 1) + squares[1] ** 2 / (len(b) - 1))
    return _student(mean, n, "unpaired", math.sqrt(sum(squares)), float(freedom))


def slope(x: Sequence[float], y: Sequence[float], *, means: int = 1) -> Estimate:
    """How much y rises where x rises by one, by least squares.

    Args:
        x, y: one of each a point.
        means: how many means were subtracted from the points before: 1 where they come as they are (theirs
            is subtracted here), the number of groups where each group's own mean was.

    >>> print(slope([0.0, 1.0, 2.0, 3.0], [0.0, 1.1, 1.9, 3.2]))
    +1.04 [+0.76, +1.32], n = 4, slope
    """
    if len(x) != len(y):
        raise ValueError(f"expected one y for each x, got {len(x)} and {len(y)}.")
    across, up = (values - values.mean() for values in (_finite(x), _finite(y)))
    if _are_equal(across):
        raise ValueError("expected an x that varies, all are equal; a slope needs two different ones.")
    spread_of_x = float(across @ across)
    found, n, freedom = float(across @ up) / spread_of_x, len(x), len(x) - means - 1
    left = float(((up - found * across) ** 2).sum())
    if freedom < 1 or left <= 1e-24 * float(up @ up):
        return Estimate(found, n, comparison="slope")
    return _student(found, n, "slope", math.sqrt(left / freedom / spread_of_x), freedom)


def _student(mean: float, n: int, comparison: Comparison, error: float, freedom: float) -> Estimate:
    """With the interval and p of a t-distribution."""
    from scipy import special

    half = float(special.stdtrit(freedom, 1 - LEVEL / 2)) * error
    p = 2 * float(special.stdtr(freedom, -abs(mean) / error))
    return Estimate(mean, n, mean - half, mean + half, comparison, p, error, freedom)


@dataclass(frozen=True)
class Median:
    """Of values of which some are lower bounds.

    Args:
        value: the median of what is known.
        at_least: the true median may be higher.
        n, bounds: values, and how many of them are lower bounds only.
    """

    value: float
    at_least: bool
    n: int
    bounds: int

    def __str__(self) -> str:
        return ("at least " if self.at_least else "") + f"{self.value:.4g}"


def median(values: Sequence[float], at_least: Sequence[bool] | None = None) -> Median:
    """The median of values; ``at_least`` marks those that are lower bounds only.

    It is exact if every bound lies above it: wherever the true values are, they stay above it.

    >>> print(median([1.0, 2.0, 9.0], [False, False, True]))
    2
    >>> print(median([1.0, 2.0, 9.0], [True, False, False]))
    at least 2
    """
    known = _finite(values)
    is_bound = _flags(known, at_least)
    middle = np.sort(known)[len(known) // 2]
    return Median(
        float(np.median(known)), bool((is_bound & (known <= middle)).any()), len(known), int(is_bound.sum())
    )


def paired_median(
    first: Mapping[Hashable, float],
    second: Mapping[Hashable, float],
    at_least: Mapping[Hashable, bool] | None = None,
) -> Estimate:
    """Of ``first - second``, where differences may be lower bounds: their median, with the sign test.

    Args:
        first, second: values by key.
        at_least: keys whose difference is a lower bound (of ``first``; a bound of ``second`` would make
            the difference an upper bound, and has no place here).

    The interval comes from the order of the differences and covers at least 95%; where that would take more
    pairs, it is infinite. Its upper end is infinite too if a lower bound lies below it.

    >>> ask, give = {seed: 9.0 + seed for seed in range(8)}, {seed: 6.0 for seed in range(8)}
    >>> print(paired_median(ask, give, {seed: seed < 4 for seed in range(8)}))
    at least +6.50 [+3.00, inf], n = 8, paired median
    """
    differences = _finite(_differences(first, second))
    keys = sorted(first.keys() & second.keys(), key=repr)
    is_bound = _flags(differences, None if at_least is None else [at_least.get(key, False) for key in keys])
    middle = median(list(differences), list(is_bound))
    n = len(differences)
    if n < 2:
        return Estimate(middle.value, n, comparison="paired median", at_least=middle.at_least)
    from scipy import stats

    interval = stats.quantile_test(differences, q=0.0, p=0.5).confidence_interval(1 - LEVEL)
    low = -math.inf if math.isnan(interval.low) else float(interval.low)
    high = math.inf if math.isnan(interval.high) else float(interval.high)
    if (is_bound & (differences <= high)).any():
        high = math.inf
    # A bound at or below zero has no known sign: the p is the largest one over all that it may have.
    positive = int((differences > 0).sum())
    negative = int(((differences < 0) & ~is_bound).sum())
    p = max(float(stats.binomtest(k, n).pvalue) for k in range(positive, n - negative + 1))
    return Estimate(middle.value, n, low, high, "paired median", p, at_least=middle.at_least)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted so that the chance of any false rejection stays below the level, in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


@dataclass(frozen=True)
class Claim:
    """One sentence that runs can support or contradict. Everything but the estimate is fixed beforehand.

    Args:
        name: the sentence: ``"CB raises accuracy"``.
        contrast: what is compared, and in which unit: ``"CB - none, class token, points"``.
        says: the difference is ``higher`` or ``lower`` than zero, or the ``same`` within the margin.
        estimate: of the difference; None where nothing was measured.
        margin: with ``same``: a difference below it counts as none.
        paper: the paper's own difference, for the reader; no part of the criterion.
        differs: in what the runs differ from what was published, if that keeps them from testing the
            claim: ``"mean pooling, no class token"``. The verdict is then "not tested as published".
        adjusted: Holm's p over the claims of the study; :func:`judged` fills it in.
    """

    name: str
    contrast: str
    says: Direction
    estimate: Estimate | None
    margin: float | None = None
    paper: float | None = None
    differs: str = ""
    adjusted: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.says not in ("higher", "lower", "same"):
            raise ValueError(f"says must be higher, lower or same, got {self.says!r}.")
        if self.says == "same":
            if self.margin is None:
                raise ValueError(
                    f"the claim {self.name!r} says same and has no margin; "
                    "give the difference that counts as none."
                )
            _require_margin(self.margin)
        elif self.margin is not None:
            raise ValueError(f"only a claim that says same has a margin, {self.name!r} says {self.says}.")

    @property
    def is_tested(self) -> bool:
        return not self.differs and self.p is not None

    @property
    def p(self) -> float | None:
        """The smaller one of the two ways to decide the claim; None where nothing can be tested."""
        sides = self._sides()
        return None if sides is None else min(sides)

    def _sides(self) -> tuple[float, float] | None:
        """The p of what would support the claim, and of what would contradict it."""
        found = self.estimate
        if found is None or found.p is None:
            return None
        if self.says == "same":
            assert self.margin is not None
            return found.p_within(self.margin), found.p_beyond(self.margin)
        is_along = (found.mean > 0) == (self.says == "higher") and found.mean != 0
        return (found.p, 1.0) if is_along else (1.0, found.p)

    @property
    def verdict(self) -> Verdict:
        """By the adjusted p, so of claims that :func:`judged` gave back."""
        if self.differs:
            return Verdict.NOT_TESTED
        sides = self._sides()
        if sides is None or self.adjusted is None or self.adjusted >= LEVEL:
            return Verdict.UNDECIDED
        return Verdict.SUPPORTED if sides[0] <= sides[1] else Verdict.CONTRADICTED


def judged(claims: Sequence[Claim]) -> list[Claim]:
    """The claims of one study with Holm's correction over those that could be tested."""
    adjusted = iter(holm([claim.p for claim in claims if claim.is_tested and claim.p is not None]))
    return [replace(claim, adjusted=next(adjusted) if claim.is_tested else None) for claim in claims]


def _differences(first: Mapping[Hashable, float], second: Mapping[Hashable, float]) -> list[float]:
    keys = sorted(first.keys() & second.keys(), key=repr)
    if not keys:
        raise ValueError(
            f"expected pairs of runs, got no key that both sides have ({len(first)} and {len(second)} runs); "
            "use unpaired() for independent runs."
        )
    return [first[key] - second[key] for key in keys]


def _finite(values: Sequence[float]) -> NDArray[np.float64]:
    known = np.asarray(list(values), dtype=np.float64)
    if not len(known):
        raise ValueError("expected at least one value, got none.")
    if not np.isfinite(known).all():
        raise ValueError(
            f"expected finite values, got {list(values)}; a run that broke has no accuracy: count it apart."
        )
    return known


def _flags(known: NDArray[np.float64], at_least: Sequence[bool] | None) -> NDArray[np.bool_]:
    if at_least is None:
        return np.zeros(len(known), dtype=bool)
    if len(at_least) != len(known):
        raise ValueError(f"expected one flag a value, got {len(at_least)} flags for {len(known)} values.")
    return np.asarray(at_least, dtype=bool)


def _are_equal(values: NDArray[np.float64]) -> bool:
    return bool(np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())))


def _require_margin(margin: float) -> None:
    if not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"a margin must be positive and finite, got {margin}.")


def _signed(value: float) -> str:
    """Two digits after the point, more where they would be zeros.

    >>> _signed(0.004), _signed(-1.5), _signed(0.0), _signed(float("inf"))
    ('+0.004', '-1.50', '0.00', 'inf')
    """
    if math.isinf(value) or value == 0:
        return "0.00" if value == 0 else ("inf" if value > 0 else "-inf")
    return f"{value:+.2g}" if abs(value) < 0.1 else f"{value:+.2f}"
