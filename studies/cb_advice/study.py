"""Whether ``diagnose`` can say beforehand that Context Broadcasting will help.

CB adds uniform attention, so it should gain more where attention is sparse. Nothing is trained here: the
records of the studies of CB give, by seed, the entropy of attention of the model without CB and the points
that CB adds to it. A setting is a data set, a head and a study; stages of training are the recipes' lengths.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from studies import compare
from studies.cb_heads.study import label
from studies.context_broadcasting.study import CB, NONE
from studies.figures import Canvas
from studies.recipes import HEADS
from studies.study import Records, Report, Scale, Study, Variant, folder_of
from wellposed import study_records
from wellposed.stats import Claim, Estimate, slope

PAIRS = {
    "context-broadcasting": {"own": (NONE, CB)},
    "cb-heads": {head: (label(head, NONE), label(head, CB)) for head in HEADS},
}
"""By study and head: the variants without and with CB."""


@dataclass(frozen=True)
class Gain:
    """Of one seed in one setting."""

    setting: str
    seed: int
    entropy: float
    points: float


def variants(scale: Scale, data: str) -> list[Variant]:
    """It trains nothing."""
    return []


def read_gains(scale: Scale, *_: Any) -> list[dict[str, Any]]:
    """From the records of the other studies."""
    return [asdict(each) for study in PAIRS for each in gains(study, scale)]


def gains(study: str, scale: Scale) -> Iterator[Gain]:
    folder = folder_of(study, scale)
    if not (folder / study_records.RECORDS).is_file():
        raise FileNotFoundError(
            f"expected the records of {study} in {folder}, there are none; run that study first."
        )
    records = Records(scale, study_records.read(folder).runs)
    for data in records.datasets:
        for head, (none, cb) in PAIRS[study].items():
            runs = records.of(none, data)
            entropy = compare.mean_entropy(runs)
            sides = [compare.accuracies(each) for each in (records.of(cb, data), runs)]
            for seed in sorted(entropy.keys() & sides[0].keys() & sides[1].keys()):
                setting = f"{study}, {data}" + ("" if head == "own" else f", {head}")
                yield Gain(setting, seed, entropy[seed], sides[0][seed] - sides[1][seed])


def by_setting(records: Records) -> Mapping[str, list[Gain]]:
    found: dict[str, list[Gain]] = {}
    for row in records.measured:
        found.setdefault(row["setting"], []).append(Gain(**row))
    return found


def over_settings(settings: Mapping[str, list[Gain]]) -> Estimate | None:
    """Points of gain for each unit of entropy, from the means of the settings."""
    if len(settings) < 3:
        return None
    means = [
        (statistics.fmean(each.entropy for each in rows), statistics.fmean(each.points for each in rows))
        for rows in settings.values()
    ]
    return slope(*map(list, zip(*means, strict=True)))


def within_settings(settings: Mapping[str, list[Gain]]) -> Estimate | None:
    """The same from the seeds of a setting, each less the mean of its setting."""
    entropy: list[float] = []
    points: list[float] = []
    several = [rows for rows in settings.values() if len(rows) > 1]
    for rows in several:
        middle = (
            statistics.fmean(each.entropy for each in rows),
            statistics.fmean(each.points for each in rows),
        )
        entropy += [each.entropy - middle[0] for each in rows]
        points += [each.points - middle[1] for each in rows]
    return slope(entropy, points, means=len(several)) if several else None


def report(records: Records) -> Report:
    settings = by_setting(records)
    table = [
        {
            "setting": setting,
            "n": len(rows),
            "entropy_without_cb": round(statistics.fmean(each.entropy for each in rows), 4),
            "points_of_cb": round(statistics.fmean(each.points for each in rows), 3),
        }
        for setting, rows in settings.items()
    ]
    contrast = "points that CB adds, for an entropy over log n higher by 1"
    claims = [
        Claim(f"CB gains more where attention is sparser: {name}", contrast, "lower", estimate)
        for name, estimate in (
            ("settings", over_settings(settings)),
            ("seeds of a setting", within_settings(settings)),
        )
    ]
    notes = ["Settings share data and differ in more than entropy; their slope is no cause."]
    return Report({"table": table, "seeds": list(records.measured)}, claims, partial(draw, settings), notes)


def draw(settings: Mapping[str, list[Gain]], path: Path) -> None:
    canvas = Canvas(1, width=6.4)
    for setting, rows in settings.items():
        found = [[each.entropy for each in rows], [each.points for each in rows]]
        canvas.plots[0].plot(*found, "o", ms=4, label=setting)
    canvas.plots[0].axhline(0, color="black", linewidth=0.8)
    canvas.plots[0].set(xlabel="entropy of attention over log n, without CB", ylabel="points that CB adds")
    canvas.save(path)


STUDY = Study(
    title="Whether the entropy of attention says beforehand that Context Broadcasting will help",
    paper="beyond (CB: attention wants to be dense)",
    claim="CB adds uniform attention that is missing, so it should gain more where attention is sparse.",
    variants=variants,
    report=report,
    once=read_gains,
    decides="The same over models trained on ImageNet-1k, with and without CB.",
)
