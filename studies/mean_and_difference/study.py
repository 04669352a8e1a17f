"""What the gain of Context Broadcasting is made of: an MLP's output m + d becomes a m + b d.

m is the mean over the tokens, d what differs from it. CB is a = 1, b = 1/2. It could help because it halves
d, because the ratio a/b is 2 (the mean counts for more), or because the branch is smaller altogether. A grid
of both factors tells these apart. With mean pooling CB in the last block cannot change the logits, so each
head has its own grid.
"""

import statistics
from functools import partial
from typing import Any

from studies import compare, figures
from studies.compare import accuracies
from studies.measures import conditioning_and_validation
from studies.recipes import HEADS, brief_vit
from studies.report import accuracy_report
from studies.study import Records, Report, Scale, Study, Variant
from wellposed.stats import Claim

MEANS, DIFFERENCES = (0.5, 1.0, 2.0), (1.0, 0.5)
MARGIN = 0.5
"""Points of accuracy below which two settings count as alike."""


def label(head: str, mean: float, difference: float) -> str:
    """Of a variant.

    >>> label("class token", 1, 0.5)
    'class token, 1 m + 0.5 d'
    """
    return f"{head}, {mean:g} m + {difference:g} d"


def edits(mean: float, difference: float) -> dict[str, Any]:
    """None and CB as the other studies have them, so that they are the same runs."""
    if (mean, difference) == (1, 1):
        return {}
    if (mean, difference) == (1, 0.5):
        return {"edits": ["broadcast_context"]}
    return {"edits": ({"edit": "broadcast_context", "mean": mean, "difference": difference},)}


def variants(scale: Scale, data: str) -> list[Variant]:
    return [
        Variant(label(head, mean, difference), brief_vit(scale, data, head=head, **edits(mean, difference)))
        for head in HEADS
        for mean in MEANS
        for difference in DIFFERENCES
    ]


def over_means(records: Records, data: str, head: str, difference: float) -> dict[int, float]:
    """By seed, the mean accuracy over the factors of the mean."""
    sides = [accuracies(records.of(label(head, mean, difference), data)) for mean in MEANS]
    seeds = set.intersection(*(set(side) for side in sides))
    return {seed: statistics.fmean(side[seed] for side in sides) for seed in seeds}


def claims(records: Records) -> list[Claim]:
    found = []
    for data in records.datasets:
        for head in HEADS:
            plain, halved = (over_means(records, data, head, each) for each in (1.0, 0.5))
            contrast = f"b = 1/2 against 1, mean over a, {head}, {data}, {compare.ACCURACY}"
            change = compare.difference(halved, plain)
            found.append(Claim("halving what differs raises accuracy", contrast, "higher", change))
            none, cb, more, half = (label(head, *pair) for pair in ((1, 1), (1, 0.5), (2, 1), (0.5, 0.5)))
            name = "doubling the mean raises accuracy"
            found.append(compare.accuracy_claim(records, data, name, more, none, "higher"))
            name = "halving the whole output does as much as CB"
            found.append(compare.accuracy_claim(records, data, name, half, cb, "same", margin=MARGIN))
    return found


def report(records: Records) -> Report:
    rows = compare.accuracy_table(records)
    for row in rows:
        runs = records.of(row["variant"], row["data"])
        none = label(row["variant"].rpartition(", ")[0], 1, 1)
        change = compare.difference(accuracies(runs), accuracies(records.of(none, row["data"])))
        row |= compare.in_columns(None if row["variant"] == none else change)
        entropy = compare.spread(compare.mean_entropy(runs).values())
        row["entropy"] = entropy and round(entropy.mean, 4)
    draw = partial(figures.draw_differences, rows, "variant")
    return accuracy_report(records, claims(records), tables={"table": rows}, draw=draw)


STUDY = Study(
    title="Context Broadcasting as two factors, of the mean and of what differs from it",
    paper="beyond",
    claim="An MLP's output m + d becomes a m + b d; CB is m + d/2. Which factor makes its gain?",
    variants=variants,
    report=report,
    seeds=tuple(range(8)),
    after=conditioning_and_validation,
    decides="The same grid with DeiT-S and 300 epochs of ImageNet-1k.",
)
