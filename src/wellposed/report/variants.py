"""Variants next to each other: one row each, and what the edits changed, with 95% intervals.

Runs of one seed are a pair. A lower bound of kappa enters no mean: medians say whether they are bounds too.
"""

import math
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from wellposed.calls import with_edits
from wellposed.records import Record, short
from wellposed.report.charts import (
    Budget,
    Chart,
    Section,
    Spec,
    channel,
    columns,
    finite,
    known,
    layer,
    nominal,
    tips,
)
from wellposed.report.heat_maps import sorted_positions
from wellposed.report.material import COLLAPSED, SEED_FIELDS, Material, Subject, mark
from wellposed.stats import Estimate, Median, median, paired, paired_median, spread, unpaired

TITLE = "Accuracy by variant"
MOST_ROWS = 24
Place = tuple[int, str]
"""Block and position."""


def accuracy(subject: Subject) -> float | None:
    """Of the last test, in percent; the best one is chosen on the test images."""
    value = finite(subject.test.get("accuracy"))
    return None if value is None else 100.0 * value


def by_place(subjects: Sequence[Subject]) -> dict[Place, Median]:
    """Ln kappa, the median over the runs of a variant."""
    found: dict[Place, list[Record]] = {}
    for subject in subjects:
        for record in subject.kappas():
            found.setdefault(_place(record), []).append(record)
    return {place: median_log(records) for place, records in found.items()}


def _place(record: Record) -> Place:
    return record.block or 0, record.position


def median_log(records: Sequence[Record]) -> Median:
    """Of ln kappa."""
    return median([r.log or 0.0 for r in records], [r.status == "at least" for r in records])


def kappa_text(log: Median) -> str:
    """Kappa for people."""
    return ("≥\u00a0" if log.at_least else "") + short(math.exp(log.value))


class Worst(NamedTuple):
    """The worst place of a variant.

    Args:
        kappa: ln kappa there.
        places: of which each may be the worst: bounds have no order.
        bounds: at how many places kappa is a lower bound, ``of`` so many.
    """

    kappa: Median
    places: list[Place]
    bounds: int
    of: int

    def where(self, noun: str) -> str:
        """In words; ``noun`` is what one of several places is called."""
        if len(self.places) > 1:
            return f"one of {len(self.places)}{noun}, which are bounds"
        return f"block {self.places[0][0]}, {self.places[0][1]}"


def worst(subjects: Sequence[Subject]) -> Worst | None:
    """Of the medians over the runs of a variant; None where no kappa was measured."""
    places = by_place(subjects)
    if not places:
        return None
    largest = max(places, key=lambda place: places[place].value)
    bounds = [place for place, log in places.items() if log.at_least]
    tied = bounds if places[largest].at_least else [largest, *bounds]
    return Worst(places[largest], tied, len(bounds), len(places))


def mean_entropy(subject: Subject) -> float | None:
    """Over the blocks."""
    known = [r.value for r in subject.select("entropy") if r.head is None and r.value is not None]
    return statistics.fmean(known) if known else None


def leaving(subject: Subject) -> tuple[Place, Record] | None:
    """Kappa of the tokens that leave the last block; those that enter it where only these were measured."""
    found = {_place(record): record for record in subject.kappas()}
    last = max((block for block, _ in found), default=None)
    names = [position for block, position in found if block == last]
    ends = [name for name in sorted_positions(names) if name.endswith(".sum")] or names
    if last is None or not (ends[-1].endswith(".sum") or "input" in names):
        return None
    place = (last, ends[-1] if ends[-1].endswith(".sum") else "input")
    return place, found[place]


@dataclass(frozen=True)
class Change:
    """What became of a variant, against the one without edits.

    Args:
        name, baseline: of the two variants.
        accuracy: difference in points.
        entropy: difference of its mean over the blocks.
        ln_kappa: difference where the tokens leave the last block; None where the baseline has a lower bound.
        before, after: ln kappa there.
        differs: whether the recipes differ in more than the edits.
    """

    name: str
    baseline: str
    accuracy: Estimate | None
    entropy: Estimate | None
    ln_kappa: Estimate | None
    before: Median | None
    after: Median | None
    differs: bool


def changes(material: Material) -> list[Change]:
    """Of each edited variant that has a baseline: no edits, the same model and data, the nearest recipe."""
    counted = {name: own for name, own in material.variants().items() if own[0].counts}
    found = []
    for name, own in counted.items():
        like = [
            other
            for other, of in counted.items()
            if not of[0].edits and (of[0].key, of[0].kind) == (own[0].key, own[0].kind)
        ]
        if own[0].edits and like:
            apart = {other: _differing(own[0].recipe, counted[other][0].recipe) for other in like}
            baseline = min(like, key=apart.__getitem__)
            found.append(_change(name, own, baseline, counted[baseline], differs=apart[baseline] > 0))
    return found


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> int:
    """How many fields other than the edits."""
    a, b = with_edits(first), with_edits(second)
    return sum(a.get(key) != b.get(key) for key in a.keys() | b.keys() if key not in ("edits", *SEED_FIELDS))


def _change(
    name: str, edited: Sequence[Subject], baseline: str, plain: Sequence[Subject], *, differs: bool
) -> Change:
    ends = [[found for each in of if (found := leaving(each))] for of in (plain, edited)]
    places = {place for of in ends for place, _ in of}
    has_kappa = len(places) == 1 and all(ends)
    before, after = (median_log([r for _, r in of]) if has_kappa else None for of in ends)
    return Change(
        name,
        baseline,
        accuracy=difference(edited, plain, accuracy),
        entropy=difference(edited, plain, mean_entropy),
        ln_kappa=_kappa_difference(edited, plain) if has_kappa else None,
        before=before,
        after=after,
        differs=differs,
    )


def difference(
    first: Sequence[Subject], second: Sequence[Subject], measure: Callable[[Subject], float | None]
) -> Estimate | None:
    """Seed by seed; of runs that share no seeds, of the means. None where a side has no number."""
    a, b = (_by_seed(of, measure) for of in (first, second))
    if not a or not b:
        return None
    pairs = len(a.keys() & b.keys())
    if pairs > 1 or (pairs and min(len(a), len(b)) == 1):
        return paired(a, b)
    return unpaired(list(a.values()), list(b.values()))


def _by_seed(
    subjects: Sequence[Subject], measure: Callable[[Subject], float | None]
) -> dict[Hashable, float]:
    """What has no seed has no partner."""
    known = {each.name if each.seed is None else each.seed: measure(each) for each in subjects}
    return {key: value for key, value in known.items() if value is not None}


def _log_leaving(subject: Subject) -> float | None:
    found = leaving(subject)
    return None if found is None else found[1].log


def _kappa_difference(edited: Sequence[Subject], plain: Sequence[Subject]) -> Estimate | None:
    """Of ln kappa. No ratio is made of two bounds, and none that would be at most."""
    bounds = [
        {each.seed for each in of if (found := leaving(each)) and found[1].status == "at least"}
        for of in (edited, plain)
    ]
    if bounds[1]:
        return None
    if not bounds[0]:
        return difference(edited, plain, _log_leaving)
    a, b = (_by_seed(of, _log_leaving) for of in (edited, plain))
    return paired_median(a, b, {seed: True for seed in bounds[0]}) if a.keys() & b.keys() else None


_MEASURES: Mapping[str, tuple[str, Callable[[Subject], float | None]]] = {
    "accuracy": ("accuracy, %", accuracy),
    "loss": ("test loss", lambda subject: finite(subject.test.get("loss"))),
    "entropy": ("entropy, mean", mean_entropy),
    "images_per_second": ("images/s", lambda s: finite(s.summary.get("images_per_second"))),
}
_DIFFERENCE = {
    "lowest": "lowest run",
    "highest": "highest run",
    "difference": "difference, points",
    "low": "from",
    "high": "to",
    "verdict": "accuracy is",
    "baseline": "compared with",
}


def variants_section(material: Material, budget: Budget) -> Section:
    titles: dict[str, str] = {"name": "variant", "n": "n"}
    for key, (title, _) in _MEASURES.items():
        titles |= {key: title, f"{key}_deviation": "±"} | (_DIFFERENCE if key == "accuracy" else {})
    titles |= {"ln_kappa": "ln kappa, worst place", "bound": "of ln kappa", "place": "worst place"}
    titles |= {"state": "state", "edits": "edits"}
    by_name = {change.name: change for change in changes(material)}
    rows = [_row(name, own, by_name.get(name)) for name, own in material.variants().items()]
    kept = [key for key in titles if any(row.get(key) not in (None, "") for row in rows)]
    chart = Chart(
        columns=columns("; ".join(f"{key}={titles[key]}" for key in kept)),
        rows=tuple(tuple(row.get(key) for key in kept) for row in rows),
        spec=_spec([row["name"] for row in rows], has_changes="difference" in kept)
        if "accuracy" in kept and len(rows) > 1
        else None,
        describe="Accuracy of each variant as a point, with a line from its lowest to its highest run; next "
        "to it the difference from the variant without edits, with its interval of 95%. The table below has "
        "the same numbers.",
        most=("name", MOST_ROWS),
    )
    title = TITLE if chart.spec else "Table of the variants" if len(rows) > 1 else "Summary"
    return Section(id="runs", title=title, words=tuple(_words(material, kept, by_name)), chart=chart)


def _words(material: Material, kept: Sequence[str], found: Mapping[str, Change]) -> Iterator[str]:
    if "accuracy" in kept and len(material.variants()) > 1:
        yield (
            "Test accuracy after the last epoch: the point is the mean, the line goes from the lowest run to "
            "the highest."
        )
    if "difference" in kept:
        paired_up = all(
            each.accuracy is None or each.accuracy.comparison == "paired" for each in found.values()
        )
        how = "seed by seed, " if paired_up else ""
        yield (
            f"Differences are taken {how}with intervals of 95%. Where zero is inside, the difference is "
            "undecided; a single run decides nothing."
        )
    if left := len(material.unfinished):
        runs, have = ("1 run is", "it has a row") if left == 1 else (f"{left} runs are", "they have rows")
        yield f"{runs} not finished and counted in no mean; {have} with n = 0."


def _row(name: str, subjects: Sequence[Subject], change: Change | None) -> dict[str, Any]:
    counts = subjects[0].counts
    cells: dict[str, Any] = {"name": name, "n": len(subjects) if counts else 0}
    for key, (_, measure) in _MEASURES.items():
        found = spread(map(measure, subjects))
        cells[key] = None if found is None else found.mean
        cells[f"{key}_deviation"] = None if found is None else found.deviation
    values = [value for each in subjects if (value := accuracy(each)) is not None]
    cells |= {"lowest": min(values), "highest": max(values)} if len(values) > 1 else {}
    gain = change.accuracy if change else None
    if change and gain:
        cells |= {"difference": gain.mean, "low": finite(gain.low), "high": finite(gain.high)}
        cells |= {"verdict": gain.direction, "baseline": change.baseline}
    if bad := worst(subjects):
        cells |= {"ln_kappa": bad.kappa.value, "bound": "lower bound" if bad.kappa.at_least else ""}
        cells["place"] = bad.where("")
    collapsed = sum(mark(subject.summary) == COLLAPSED for subject in subjects)
    ended = f"{collapsed} of {len(subjects)} {COLLAPSED}" if collapsed else ""
    return cells | {
        "state": ended if counts else subjects[0].state,
        "edits": "; ".join(subjects[0].edits) or "none",
    }


def _spec(names: Sequence[str], *, has_changes: bool) -> dict[str, Any]:
    """Accuracy; next to it (below it on a phone), the differences."""
    whole = {
        "height": {"step": 30},
        "transform": [{"filter": known("accuracy")}],
        "encoding": {"y": nominal("name", sort=list(names))},
    }
    point = {"filled": True, "size": 80, "opacity": 1}
    ticks: Spec = {"axis": {"tickCount": 5}}
    x = channel("accuracy", "test accuracy, %", scale={"zero": False, "padding": 10}, **ticks)
    shown = tips("name", "n", "accuracy", "accuracy_deviation")
    ends = {"x": {**x, "field": "lowest"}, "x2": {"field": "highest"}}
    left = whole | {
        "layer": [
            layer("rule", ends, strokeWidth=2, style="mean"),
            layer("point", {"x": x, "tooltip": shown}, **point, style="mean"),
        ]
    }
    if not has_changes:
        return left
    x = channel("difference", "difference, points (95% interval)", scale={"padding": 10}, **ticks)
    words, shapes = ["lower", "undecided", "higher"], ["triangle-left", "circle", "triangle-right"]
    colour = {"scale": {"domain": words, "range": "verdict"}, "legend": {"symbolType": "circle"}}
    drawn = {"color": nominal("verdict", sort=words, **colour)}
    shape = nominal("verdict", sort=words, scale={"domain": words, "range": shapes}, legend=None)
    shown = tips("name", "difference", "low", "high", "verdict", "baseline")
    zero = {"x": {"datum": 0, **{key: x[key] for key in ("type", "title", "scale", "axis")}}, "y": None}
    interval = {"x": {**x, "field": "low"}, "x2": {"field": "high"}, **drawn}
    right = whole | {
        "layer": [
            layer("rule", zero, style="zero", strokeDash=[3, 3], tooltip=None),
            layer("rule", interval, known("low"), strokeWidth=2),
            layer("point", {"x": x, "shape": shape, "tooltip": shown, **drawn}, known("difference"), **point),
        ]
    }
    return {"hconcat": [left, right], "spacing": 24}
