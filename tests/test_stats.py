"""Intervals, tests and verdicts: against scipy, and by their error rates on simulated studies."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from wellposed.stats import (
    Claim,
    Estimate,
    Verdict,
    holm,
    judged,
    median,
    one_sample,
    paired,
    paired_median,
    slope,
    unpaired,
)

STUDIES = 2000


def by_seed(values):
    return dict(enumerate(values))


def within_three_errors(share: float, rate: float, studies: int = STUDIES) -> bool:
    """Whether a simulated share is what the rate predicts."""
    return abs(share - rate) <= 3 * math.sqrt(rate * (1 - rate) / studies)


@pytest.mark.parametrize("n", [3, 5, 8, 10])
def test_a_study_without_an_effect_finds_one_in_five_percent(n):
    rng = np.random.default_rng(n)
    found = covered = 0
    for _ in range(STUDIES):
        shared = rng.normal(50, 3, n)  # What a seed does to both sides
        estimate = paired(
            by_seed(shared + rng.normal(0, 0.7, n) + 1.0), by_seed(shared + rng.normal(0, 0.7, n))
        )
        covered += estimate.covers(1.0)
        null = one_sample([value - 1.0 for value in rng.normal(1.0, 1.0, n)])
        [claim] = judged([Claim("gain", "points", "higher", null)])
        found += claim.verdict is not Verdict.UNDECIDED
    assert within_three_errors(found / STUDIES, 0.05)
    assert within_three_errors(covered / STUDIES, 0.95)


@pytest.mark.parametrize("n", [3, 5, 8, 10])
def test_twelve_claims_without_an_effect_rarely_give_a_verdict(n):
    rng = np.random.default_rng(n)
    alone = together = 0
    studies = STUDIES // 5
    for _ in range(studies):
        claims = [Claim(str(i), "points", "higher", one_sample(rng.normal(0, 1, n))) for i in range(12)]
        alone += any(claim.p < 0.05 for claim in claims)
        together += any(claim.verdict is not Verdict.UNDECIDED for claim in judged(claims))
    assert alone / studies > 0.35  # Without the correction: 1 - 0.95^12 = 0.46
    assert together / studies <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)


def test_holm_keeps_the_rate_where_some_claims_hold():
    rng = np.random.default_rng(0)
    wrong = 0
    studies = STUDIES // 5
    for _ in range(studies):
        claims = [
            Claim(str(i), "points", "higher", one_sample(rng.normal(3.0 if i < 6 else 0.0, 1, 8)))
            for i in range(12)
        ]
        wrong += any(claim.verdict is not Verdict.UNDECIDED for claim in judged(claims)[6:])
    assert wrong / studies <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)


@pytest.mark.parametrize("n", [3, 5, 8, 10])
def test_sameness_is_claimed_wrongly_in_at_most_five_percent(n):
    """With the true difference at the margin, the worst case; at n = 3 it is hardly ever claimed at all."""
    rng = np.random.default_rng(n)
    same = sum(
        judged([Claim("same", "points", "same", one_sample(rng.normal(0.5, 0.3, n)), 0.5)])[0].verdict
        is Verdict.SUPPORTED
        for _ in range(STUDIES)
    )
    assert same / STUDIES <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / STUDIES)


def test_sameness_is_found_where_it_holds_and_refuted_where_it_does_not():
    rng = np.random.default_rng(1)

    def verdicts(true: float) -> list[Verdict]:
        return [
            judged([Claim("same", "points", "same", one_sample(rng.normal(true, 0.3, 10)), 0.5)])[0].verdict
            for _ in range(200)
        ]

    assert verdicts(0.0).count(Verdict.SUPPORTED) > 190
    assert verdicts(1.5).count(Verdict.CONTRADICTED) > 190


def test_a_large_noise_is_no_sameness():
    """Without a difference, and with an interval wider than the margin, nothing is decided."""
    wide = one_sample([0.6, -0.5, 0.1, -0.3, 0.2])
    [claim] = judged([Claim("within 0.2 points", "points", "same", wide, 0.2)])
    assert claim.verdict is Verdict.UNDECIDED


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12).filter(lambda v: np.ptp(v) > 1e-6))
def test_one_sample_equals_scipy(values):
    found, test = one_sample(values), scipy_stats.ttest_1samp(values, 0.0)
    assert found.p == pytest.approx(test.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert found.p_above(1.0) == pytest.approx(
        scipy_stats.ttest_1samp(values, 1.0, alternative="greater").pvalue
    )
    assert found.p_below(1.0) == pytest.approx(
        scipy_stats.ttest_1samp(values, 1.0, alternative="less").pvalue
    )


def test_unpaired_equals_scipys_welch():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 1, 5), rng.normal(0, 3, 9)
    found, test = unpaired(a, b), scipy_stats.ttest_ind(a, b, equal_var=False)
    assert found.p == pytest.approx(test.pvalue)
    # Through the estimate's own error and degrees of freedom, by which margins are tested:
    assert 2 * min(found.p_above(0.0), found.p_below(0.0)) == pytest.approx(test.pvalue)
    assert found.n == 5


def test_pairs_are_matched_by_their_key():
    first, second = {0: 5.0, 1: 7.0, 2: 9.0}, {2: 8.0, 1: 5.0, 3: 1.0}
    assert paired(first, second).mean == pytest.approx(1.5)
    assert paired(first, second).n == 2
    with pytest.raises(ValueError, match="use unpaired"):
        paired({0: 1.0}, {1: 1.0})


@pytest.mark.parametrize(
    "estimate",
    [
        one_sample([40.0]),
        one_sample([0.25, 0.25, 0.25]),
        unpaired([5.0], [1.0, 2.0, 3.0]),
        paired_median({0: 9.0}, {0: 1.0}),
    ],
    ids=["one run", "equal steps", "one run against three", "one median"],
)
def test_what_shows_no_spread_decides_nothing(estimate):
    claims = [
        Claim("up", "points", "higher", estimate),
        Claim("alike", "points", "same", estimate, 1000.0),
    ]
    assert {claim.verdict for claim in judged(claims)} == {Verdict.UNDECIDED}
    assert (estimate.low, estimate.high) == (-math.inf, math.inf)


def test_the_directions_of_a_claim():
    up = one_sample([1.0, 1.1, 0.9, 1.2])
    claims = [
        Claim("more", "points", "higher", up),
        Claim("less", "points", "lower", up),
        Claim("nothing measured", "points", "lower", None),
        Claim("another head", "points", "higher", up, differs="mean pooling, no class token"),
    ]
    assert [claim.verdict for claim in judged(claims)] == [
        Verdict.SUPPORTED,
        Verdict.CONTRADICTED,
        Verdict.UNDECIDED,
        Verdict.NOT_TESTED,
    ]
    assert judged(claims)[3].adjusted is None
    assert judged(claims)[0].adjusted == pytest.approx(2 * up.p)  # Two claims could be tested


def test_claims_are_decided_only_together():
    assert Claim("more", "points", "higher", one_sample([1.0, 1.1, 0.9, 1.2])).verdict is Verdict.UNDECIDED, (
        "without Holm's correction no p stands for a verdict"
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_holm_by_its_definition(p_values):
    """A claim is rejected at a level exactly if Holm's step-down procedure rejects it."""
    adjusted = holm(p_values)
    for level in (0.01, 0.05, 0.2):
        rejected = set()
        for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
            if (len(p_values) - rank) * p_values[index] >= level:
                break
            rejected.add(index)
        assert {i for i, p in enumerate(adjusted) if p < level} == rejected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.booleans(), st.floats(0, 20)), min_size=1, max_size=9))
def test_a_median_of_bounds_is_one_of_what_they_bound(values):
    """``value`` is never above the true median, and equals it where it is not marked."""
    seen = [value for value, _, _ in values]
    flags = [is_bound for _, is_bound, _ in values]
    true = [value + more * is_bound for value, is_bound, more in values]
    found = median(seen, flags)
    assert found.value <= np.median(true)
    if not found.at_least:
        assert found.value == np.median(true)


def test_bounds_have_a_sign_only_above_zero():
    first = {seed: value for seed, value in enumerate([1.0, 2, 3, 4, 5, 6, 7, 8])}
    zero = dict.fromkeys(first, 0.0)
    everywhere = dict.fromkeys(first, True)
    up = paired_median(first, zero, everywhere)
    assert up.at_least
    assert up.p == pytest.approx(2 / 2**8)
    assert (up.low, up.high) == (1.0, math.inf)
    down = paired_median(zero, first, everywhere)
    assert down.p == 1.0, "differences of at least -1 may all be positive"


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_what_is_no_number_is_refused(values):
    with pytest.raises(ValueError, match="expected"):
        one_sample(values)


@pytest.mark.parametrize(
    ("says", "margin", "message"),
    [("same", None, "no margin"), ("same", -1.0, "positive"), ("higher", 0.5, "only"), ("up", None, "says")],
)
def test_a_claim_without_its_criterion_is_refused(says, margin, message):
    with pytest.raises(ValueError, match=message):
        Claim("c", "points", says, Estimate(0.0, 3), margin)


def test_a_slope_is_that_of_least_squares():
    draws = np.random.default_rng(0)
    x = draws.normal(size=12)
    y = 0.4 * x + draws.normal(size=12)
    found, peer = slope(list(x), list(y)), scipy_stats.linregress(x, y)
    assert (found.mean, found.p, found.error) == pytest.approx((peer.slope, peer.pvalue, peer.stderr))
    assert found.freedom == 10
    # Points of groups, less the means of their groups, have as many degrees of freedom less.
    groups = [part - part.mean() for part in np.split(x, 3)], [part - part.mean() for part in np.split(y, 3)]
    grouped = slope(*(list(np.concatenate(side)) for side in groups), means=3)
    design = np.column_stack([x, *(np.repeat(np.eye(3)[i], 4) for i in range(3))])
    fitted, left, *_ = np.linalg.lstsq(design, y, rcond=None)
    error = math.sqrt(float(left[0]) / 8 * np.linalg.inv(design.T @ design)[0, 0])
    assert (grouped.mean, grouped.error, grouped.freedom) == pytest.approx((fitted[0], error, 8))


def test_a_slope_needs_an_x_that_varies():
    with pytest.raises(ValueError, match="two different"):
        slope([1.0, 1.0], [0.0, 2.0])
    assert slope([0.0, 1.0], [0.0, 2.0]).p is None, "two points show no spread"
