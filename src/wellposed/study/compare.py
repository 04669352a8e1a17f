"""Means, deviations, and what may be called a difference.

A difference smaller than its deviation is none; of one seed, one smaller than a bar that the study sets.
Where both sides ran with the same seeds the deviation is that of the differences seed by seed: what the seeds
share, such as the images held out, then does not count. Deviations are of the sample, with n - 1.

>>> print(difference({0: 90.0, 1: 91.0, 2: 92.0}, {0: 89.0, 1: 90.5, 2: 90.0}))
+1.17 ± 0.76 (n = 3)
>>> difference({0: 90.0, 1: 91.0}, {0: 90.5, 1: 90.0}).is_one
False
"""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wellposed.stats import Spread as Spread
from wellposed.stats import spread as spread
from wellposed.study.plan import RunRecord, StudyRecords, Verdict

LEAST = 2.0
"""Points of accuracy that one run a side must differ by: with one seed there is no deviation to compare."""

_BETWEEN = "; "
_COUNTED = re.compile(r"(.*?\bclaims holds?(?:, \d+ of them only by (?:its|their) direction)?): ")

Says = Literal["higher", "lower", "same"]
Outcome = Literal[
    "holds",
    "holds, smaller",
    "holds, larger",
    "no difference",
    "contrary",
    "one seed cannot tell",
    "missing",
]
OTHER = 2.0
"""A difference this many times smaller or larger than the paper's is none of its size, though the direction
holds."""


@dataclass(frozen=True)
class Difference:
    """Of two means.

    Args:
        mean: first less second.
        deviation: of the difference; None with one seed.
        n: pairs of runs.
        least: what counts with one seed.
    """

    mean: float
    deviation: float | None
    n: int
    least: float = LEAST

    @property
    def is_one(self) -> bool:
        """Whether it is a difference at all."""
        bar = self.least if self.deviation is None else self.deviation
        return self.mean != 0 and abs(self.mean) >= bar

    def as_gain(self) -> dict[str, Any]:
        """Columns of a table."""
        deviation = None if self.deviation is None else round(self.deviation, 3)
        return {"gain": round(self.mean, 3), "deviation": deviation, "n": self.n}

    def __str__(self) -> str:
        deviation = "" if self.deviation is None else f" ± {_number(self.deviation)}"
        sign = "+" if self.mean > 0 else ""
        return f"{sign}{_number(self.mean)}{deviation} (n = {self.n})"


def difference(
    first: Mapping[Any, float], second: Mapping[Any, float], least: float = LEAST
) -> Difference | None:
    """Of values by seed, or by data and seed; None where there is nothing to compare."""
    shared = sorted(first.keys() & second.keys())
    if shared:
        found = spread(first[seed] - second[seed] for seed in shared)
        assert found is not None
        return Difference(found.mean, found.deviation, found.n, least)
    a, b = spread(first.values()), spread(second.values())
    if a is None or b is None:
        return None
    is_known = a.deviation is not None and b.deviation is not None
    deviation = math.hypot(a.deviation or 0.0, b.deviation or 0.0) if is_known else None
    return Difference(a.mean - b.mean, deviation, min(a.n, b.n), least)


def _number(value: float) -> str:
    """Two digits after the point, and more where these would be zeros.

    >>> _number(-2.345), _number(0.00123), _number(0.0)
    ('-2.35', '0.0012', '0.00')
    """
    return f"{value:.2g}" if 0 < abs(value) < 0.1 else f"{value:.2f}"


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper that a difference can hold or break.

    Args:
        what: in words, such as ``"no FFN skip minus all skips"``.
        says: how the paper has the first beside the second.
        found: what was measured.
        within: for ``same``, the points within which the paper calls them so.
        paper: the paper's own difference, where the setting is near enough to hold its size against it.
    """

    what: str
    says: Says
    found: Difference | None
    within: float = 0.0
    paper: float | None = None

    @property
    def outcome(self) -> Outcome:
        if self.found is None:
            return "missing"
        if self.says == "same":
            if self.found.deviation is None:
                # Two single runs may end alike by chance.
                return "contrary" if self.found.is_one else "one seed cannot tell"
            is_other = self.found.is_one and abs(self.found.mean) > self.within
            return "contrary" if is_other else "holds"
        if not self.found.is_one:
            return "no difference"
        if (self.found.mean > 0) != (self.says == "higher"):
            return "contrary"
        if self.paper is not None and abs(self.found.mean) < abs(self.paper) / OTHER:
            return "holds, smaller"
        if self.paper is not None and abs(self.found.mean) > abs(self.paper) * OTHER:
            return "holds, larger"
        return "holds"

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.what}: not measured"
        told = {
            "holds": "holds",
            "holds, smaller": "the direction holds, but it is less than half of the paper's",
            "holds, larger": "the direction holds, but it is more than twice the paper's",
            "no difference": f"no difference, {self._why_none()}",
            "contrary": f"contrary, not {self.says}",
            "one seed cannot tell": "one seed cannot tell",
        }
        paper = "" if self.paper is None else f", the paper {self.paper:+g}"
        return f"{self.what}: {self.found}{paper}: {told[self.outcome]}"

    def _why_none(self) -> str:
        assert self.found is not None
        if self.found.deviation is None:
            return f"one seed tells none below {self.found.least:g}"
        return "smaller than its deviation"


def verdict(claims: Sequence[Claim]) -> tuple[Verdict, str]:
    """The verdict over the claims, and why.

    >>> verdict([Claim("a minus b", "higher", difference({0: 93.0}, {0: 90.0}))])
    ('reproduced', 'a minus b: +3.00 (n = 1): holds')
    >>> verdict([Claim(f"{name} minus b", "higher", difference({0: 9.0}, {0: 3.0})) for name in "ac"])[1]
    'all 2 claims hold: a minus b: +6.00 (n = 1): holds; c minus b: +6.00 (n = 1): holds'
    """
    if not claims:
        return "incomplete", "there is nothing to compare"
    outcomes = [claim.outcome for claim in claims]
    held = sum(outcome.startswith("holds") for outcome in outcomes)
    off = sum(outcome.startswith("holds,") for outcome in outcomes)
    decided: Verdict
    if "missing" in outcomes or "one seed cannot tell" in outcomes:
        decided = "incomplete"
    elif all(outcome == "holds" for outcome in outcomes):
        decided = "reproduced"
    elif all(outcome == "no difference" for outcome in outcomes):
        decided = "no difference"
    else:
        decided = "partly" if held else "not"
    counted = ""
    if len(claims) > 1:
        counts = {0: f"none of {len(claims)} claims holds", len(claims): f"all {len(claims)} claims hold"}
        counted = counts.get(held, f"{held} of {len(claims)} claims {'holds' if held == 1 else 'hold'}")
        counted += f", {off} of them only by {'its' if off == 1 else 'their'} direction: " if off else ": "
    return decided, counted + _BETWEEN.join(map(str, claims))


def one_by_one(reason: str) -> tuple[str, list[str]]:
    """What a reason says of its claims together, and each of them; none where it has no list of them.

    >>> one_by_one("1 of 2 claims holds: a minus b: +6.00 (n = 1): holds; c minus b: not measured")
    ('1 of 2 claims holds', ['a minus b: +6.00 (n = 1): holds', 'c minus b: not measured'])
    >>> one_by_one("a minus b: +3.00 (n = 1): holds")
    ('a minus b: +3.00 (n = 1): holds', [])
    """
    counted = _COUNTED.match(reason)
    if counted is None:
        return reason, []
    return counted[1], reason[counted.end() :].split(_BETWEEN)


def accuracies(runs: Iterable[RunRecord]) -> dict[int, float]:
    """By seed, of the runs that have one."""
    return {run.seed: run.accuracy for run in runs if run.accuracy is not None}


def accuracy_claim(
    records: StudyRecords,
    data: str,
    first: str,
    second: str,
    says: Says,
    within: float = 0.0,
    paper: float | None = None,
) -> Claim:
    """How one variant's accuracy stands to another's."""
    found = difference(accuracies(records.of(first, data)), accuracies(records.of(second, data)))
    return Claim(records.on(data, f"{first} minus {second}"), says, found, within, paper)


def accuracy_table(
    records: StudyRecords, baseline: str | None = None, paper: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """One row a data set and variant, with what was chosen for it and, if asked, what the paper has."""
    rows = []
    for data in records.datasets:
        for label in records.labels:
            runs = records.of(label, data)
            found = spread(accuracies(runs).values())
            chosen = "; ".join(f"{k}={v}" for k, v in (runs[0].chosen if runs else {}).items())
            row: dict[str, Any] = {"data": data, "variant": label, "chosen": chosen}
            row |= {"n": found.n if found else 0, "accuracy": found and round(found.mean, 3)}
            row["deviation"] = None if found is None or found.deviation is None else round(found.deviation, 3)
            if baseline is not None:
                change = difference(accuracies(runs), accuracies(records.of(baseline, data)))
                is_other = label != baseline and change is not None
                row["difference"] = round(change.mean, 3) if is_other and change else None
                row["difference_deviation"] = (
                    round(change.deviation, 3)
                    if is_other and change and change.deviation is not None
                    else None
                )
                row["is_difference"] = change.is_one if is_other and change else None
            if paper is not None:
                row["paper"] = paper.get(label)
            rows.append(row)
    return rows


def grid_table(records: StudyRecords) -> list[dict[str, Any]]:
    """Every run, trials too: the grid that the best came out of."""
    return [
        {
            "data": run.data,
            "variant": run.label,
            **run.chosen,
            "seed": run.seed,
            "trial": run.trial,
            "state": run.state,
            "accuracy": None if run.accuracy is None else round(run.accuracy, 3),
            "loss": (run.result.get("test") or {}).get("loss"),
            "stands_for_variant": run.best,
        }
        for run in records.runs
    ]


def log_kappas(runs: Iterable[RunRecord], position: str) -> dict[int, dict[int, float]]:
    """Natural logarithm of kappa by seed and block, at one position, of the last weights.

    The accuracy is of these too; records that do not say which weights they are of have no others.
    """
    return {
        run.seed: {
            row["block"]: math.log(row["value"])
            for row in run.measured
            if row.get("measure") == "kappa"
            and row.get("position") == position
            and row.get("weights", "last") == "last"
            and row.get("value")
        }
        for run in runs
        if run.measured
    }


def over_blocks(values: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """The mean over the blocks, by seed."""
    return {seed: statistics.fmean(blocks.values()) for seed, blocks in values.items() if blocks}
