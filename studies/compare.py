"""Accuracies, kappas and entropies of records by seed, as tables and as claims.

Differences are taken seed by seed, with intervals of 95% (:mod:`wellposed.stats`). Deviations are of the
sample, with n - 1; they describe runs and decide nothing.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from studies.study import Records
from wellposed.stats import Claim, Direction, Estimate, Median, median, paired, paired_median
from wellposed.stats import Spread as Spread
from wellposed.stats import spread as spread
from wellposed.study_records import RunRecord

ACCURACY = "points of accuracy"
ROBUST: dict[str, tuple[str, ...]] = {
    "corrupted": ("noise", "blur", "contrast", "jpeg"),
    "occluded": ("occlusion",),
    "attacked": ("fgsm",),
}
"""Kinds of :mod:`studies.robustness` in groups."""


def accuracies(runs: Iterable[RunRecord]) -> dict[int, float]:
    """By seed, of the runs that have one."""
    return {run.seed: run.accuracy for run in runs if run.accuracy is not None}


def difference(first: Mapping[Any, float], second: Mapping[Any, float]) -> Estimate | None:
    """``first - second`` by seed, or by data and seed; None where no pair is there."""
    return paired(first, second) if first.keys() & second.keys() else None


def accuracy_claim(
    records: Records,
    data: str,
    name: str,
    first: str,
    second: str,
    says: Direction,
    *,
    margin: float | None = None,
    paper: float | None = None,
    differs: str = "",
    without: Sequence[int] = (),
) -> Claim:
    """How one variant's accuracy compares with another's.

    Args:
        records: of the study.
        data: the set.
        name: what the paper says, in words.
        first, second: labels.
        says, margin, paper, differs: as of :class:`wellposed.stats.Claim`.
        without: seeds that chose a setting, by the accuracy that would be compared.
    """
    sides = [_unseen(accuracies(records.of(label, data)), without) for label in (first, second)]
    contrast = f"{first} - {second}, {data}, {ACCURACY}"
    return Claim(name, contrast, says, difference(*sides), margin, paper, differs)


def _unseen(values: Mapping[int, float], without: Sequence[int]) -> dict[int, float]:
    return {seed: value for seed, value in values.items() if seed not in without}


def choosers(records: Records, data: str) -> tuple[int, ...]:
    """Seeds whose trials on a set chose a setting: their results do not judge it, if there are others."""
    seeds = {run.seed for run in records.runs if run.role == "trial" and run.data == data}
    others = {run.seed for run in records.runs if run.role == "result" and run.data == data} - seeds
    return tuple(sorted(seeds)) if others else ()


def in_columns(found: Estimate | None, digits: int = 3) -> dict[str, Any]:
    """A difference as columns of a table; an end that is infinite is empty."""
    if found is None:
        return {"difference": None, "low": None, "high": None, "pairs": 0}
    ends = [round(end, digits) if math.isfinite(end) else None for end in (found.low, found.high)]
    return {"difference": round(found.mean, digits), "low": ends[0], "high": ends[1], "pairs": found.n}


def accuracy_table(
    records: Records,
    baseline: str | None = None,
    paper: Mapping[str, Any] | None = None,
    *,
    unseen: bool = False,
) -> list[dict[str, Any]]:
    """One row a data set and variant: mean, deviation, and the difference from the baseline.

    With ``unseen`` the seeds that chose a setting are in the mean and not in the difference.
    """
    rows = []
    for data in records.datasets:
        without = choosers(records, data) if unseen else ()
        for label in records.labels:
            runs = records.of(label, data)
            found = spread(accuracies(runs).values())
            chosen = "; ".join(f"{k}={v}" for k, v in (runs[0].chosen if runs else {}).items())
            row: dict[str, Any] = {"data": data, "variant": label, "chosen": chosen}
            row |= {"n": found.n if found else 0, "accuracy": found and round(found.mean, 3)}
            row["deviation"] = None if found is None or found.deviation is None else round(found.deviation, 3)
            if baseline is not None:
                sides = (_unseen(accuracies(each), without) for each in (runs, records.of(baseline, data)))
                row |= in_columns(None if label == baseline else difference(*sides))
            if paper is not None:
                row["paper"] = paper.get(label)
            rows.append(row)
    return rows


def grid_table(records: Records) -> list[dict[str, Any]]:
    """Every run, also those that settings were chosen by."""
    names = list(dict.fromkeys(name for run in records.runs for name in run.chosen))
    return [
        {
            "data": run.data,
            "variant": run.label,
            **{name: run.chosen.get(name) for name in names},
            "seed": run.seed,
            "role": run.role,
            "state": run.state,
            "accuracy": None if run.accuracy is None else round(run.accuracy, 3),
            "loss": run.loss,
        }
        for run in records.runs
    ]


def log_kappa(run: RunRecord, position: str, block: int | None = None) -> Median | None:
    """The median over the blocks of ln kappa at a position; of one block, that block's.

    Where float32 cannot tell kappa it is known to be at least a value, and so may be the median.
    """
    rows = [
        row
        for row in run.measured
        if row.get("measure") == "kappa"
        and row.get("position") == position
        and row.get("weights", "last") == "last"
        and row.get("value")
        and block in (None, row["block"])
    ]
    if not rows:
        return None
    bounds = [row.get("status", "ok") == "at least" for row in rows]
    return median([math.log(row["value"]) for row in rows], bounds)


def kappa_difference(first: Mapping[int, Median], second: Mapping[int, Median]) -> Estimate | None:
    """``first - second`` of medians of ln kappa by seed, as :func:`log_kappa` gives them.

    Where some of ``first`` are lower bounds, so are these differences, and their median is compared. A
    seed whose ``second`` is a lower bound says nothing: its difference may be anything.
    """
    seeds = [seed for seed in first.keys() & second.keys() if not second[seed].at_least]
    if not seeds:
        return None
    sides = [{seed: side[seed].value for seed in seeds} for side in (first, second)]
    if any(first[seed].at_least for seed in seeds):
        return paired_median(*sides, {seed: first[seed].at_least for seed in seeds})
    return paired(*sides)


def entropies(run: RunRecord, weights: str = "last") -> dict[tuple[int, int], float]:
    """Entropy of attention over log n, by block and head."""
    return {
        (row["block"], row["head"]): row["value"]
        for row in run.measured
        if row.get("measure") == "entropy"
        and row.get("weights", "last") == weights
        and row.get("head") is not None
        and row.get("value") is not None
    }


def block_entropies(run: RunRecord) -> dict[int, float]:
    """Entropy of attention over log n, by block."""
    return {
        row["block"]: row["value"]
        for row in run.measured
        if row.get("measure") == "entropy"
        and row.get("weights", "last") == "last"
        and row.get("head") is None
        and row.get("value") is not None
    }


def mean_entropy(runs: Iterable[RunRecord]) -> dict[int, float]:
    """Over the blocks, by seed."""
    found = {run.seed: block_entropies(run) for run in runs}
    return {seed: statistics.fmean(blocks.values()) for seed, blocks in found.items() if blocks}


POOLED = "mean-pooled, no class token"


def pooling(records: Records, data: str, label: str | None = None) -> str:
    """Why Context Broadcasting is not tested as published on a set; empty with a class token.

    In a mean-pooled model CB in the last block cannot change the logits: the head has the mean already. The
    papers' models have a class token.
    """
    is_pooled = any(
        run.recipe.get("model_options", {}).get("class_token") is False
        for run in records.runs
        if run.data == data and run.role == "result" and label in (None, run.label)
    )
    return POOLED if is_pooled else ""


def validation(runs: Iterable[RunRecord]) -> dict[int, float]:
    """Accuracy on the validation images in percent, by seed."""
    return {
        run.seed: 100.0 * row["value"]
        for run in runs
        for row in run.measured
        if row.get("measure") == "validation accuracy"
    }


def best_by_validation(records: Records, data: str, labels: Sequence[str]) -> str | None:
    """The variant with the highest mean accuracy on the validation images, over the seeds that all have.

    None where there are no validation images: nothing may be chosen then.
    """
    found = {label: validation(records.of(label, data)) for label in labels}
    seeds = set.intersection(*(set(values) for values in found.values())) if found else set()
    if not seeds:
        return None
    return max(labels, key=lambda label: statistics.fmean(found[label][seed] for seed in seeds))


def kappa_ends(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Columns with ln kappa of what enters the first block and leaves the last: medians over the seeds."""
    last = max((row["block"] for run in runs for row in run.measured if "block" in row), default=0)
    columns: dict[str, Any] = {}
    for name, position, block in (("ln_kappa_in", "input", 0), ("ln_kappa_out", "ffn.sum", last)):
        every = [log_kappa(run, position, block) for run in runs]
        known = [each for each in every if each is not None]
        found = median([each.value for each in known], [each.at_least for each in known]) if known else None
        columns[name] = found and round(found.value, 3)
        columns[f"{name}_at_least"] = found and found.at_least
    return columns


def rank_out(runs: Iterable[RunRecord]) -> dict[int, float]:
    """Effective rank of the tokens that leave the last block, by seed."""
    found = {
        run.seed: [
            (row["block"], row["value"])
            for row in run.measured
            if row.get("measure") == "effective rank" and row.get("position") == "ffn.sum"
        ]
        for run in runs
    }
    return {seed: max(blocks)[1] for seed, blocks in found.items() if blocks}


def under(run: RunRecord, kinds: Sequence[str]) -> float | None:
    """Mean accuracy in percent over kinds of corruption and their strengths."""
    found = [row["value"] for row in run.measured if row.get("under") in kinds]
    return 100.0 * statistics.fmean(found) if found else None


def robust_columns(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Mean accuracies under corruption, occlusion and attack."""
    columns = {}
    for name, kinds in ROBUST.items():
        found = spread(under(run, kinds) for run in runs)
        columns[name] = found and round(found.mean, 2)
    return columns


def robust_claim(records: Records, data: str, group: str, first: str, second: str) -> Claim:
    """That a variant keeps more of its accuracy: (accuracy under corruption - clean) is higher.

    Clean accuracy is of the same images, so a variant that is only more accurate is not called robust.
    """

    def lost(label: str) -> dict[int, float]:
        found = {
            run.seed: (under(run, ROBUST[group]), under(run, ("none",))) for run in records.of(label, data)
        }
        return {
            seed: each - clean
            for seed, (each, clean) in found.items()
            if each is not None and clean is not None
        }

    contrast = f"{first} - {second}, {data}, accuracy {group} less clean, points"
    name = f"it keeps more of its accuracy where images are {group}"
    return Claim(name, contrast, "higher", difference(lost(first), lost(second)))
