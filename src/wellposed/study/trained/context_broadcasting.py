"""The main result of "Scratching Visual Transformer's Back": Context Broadcasting, plain and with scales.

CB adds the mean token at the end of each MLP; attention need then not make it, and becomes less dense.
"""

import statistics
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from wellposed.study import compare, figures
from wellposed.study.plan import Cell, RunRecord, Scale, Study, StudyRecords, StudyReport
from wellposed.study.trained.after import conditioning_and_density
from wellposed.study.trained.bases import vit
from wellposed.study.trained.reports import draw_means
from wellposed.train.recipe import Recipe

NONE, CB, CB_S = "none", "CB", "CB_S"
EDITS: dict[str, dict[str, Any]] = {NONE: {}, CB: {"broadcast": "cb"}, CB_S: {"broadcast": "cb_s"}}
SIZES = {"ViT-Ti": "vit_tiny_patch16_224", "ViT-S": "vit_small_patch16_224", "ViT-B": "vit_base_patch16_224"}


def cells(scale: Scale) -> list[Cell]:
    if scale == "small":
        return [Cell(label, fields) for label, fields in EDITS.items()]
    return [
        Cell(f"{size}, {label}", {"model": model, **fields})
        for size, model in SIZES.items()
        for label, fields in EDITS.items()
    ]


def base(scale: Scale, data: str) -> Recipe:
    return vit(scale, data)


def entropies(runs: Iterable[RunRecord], head: bool = False) -> dict[int, dict[tuple[int, int], float]]:
    """By seed, block and head (-1 for the mean over the heads): 1 is uniform attention."""
    return {
        run.seed: {
            (row["block"], row.get("head", -1)): row["value"]
            for row in run.measured
            if row.get("measure") == "entropy" and row.get("value") is not None and ("head" in row) == head
        }
        for run in runs
        if run.measured
    }


def entropy_table(records: StudyRecords) -> list[dict[str, Any]]:
    """One row a variant, block and head."""
    rows = []
    for data in records.datasets:
        for label in records.labels:
            by_seed = entropies(records.of(label, data), head=True)
            for block, head in sorted({place for places in by_seed.values() for place in places}):
                found = compare.spread(places.get((block, head)) for places in by_seed.values())
                if found is not None:
                    where = {"data": data, "variant": label, "block": block, "head": head}
                    deviation = None if found.deviation is None else round(found.deviation, 5)
                    rows.append(
                        {**where, "entropy": round(found.mean, 5), "deviation": deviation, "n": found.n}
                    )
    return rows


def mean_entropy(records: StudyRecords, label: str, data: str) -> dict[int, float]:
    """Over the blocks, by seed."""
    found = entropies(records.of(label, data))
    return {seed: statistics.fmean(places.values()) for seed, places in found.items() if places}


def prefixes(records: StudyRecords) -> list[str]:
    """Of the labels: one a size of model where there are several."""
    return list(dict.fromkeys(label.rpartition(", ")[0] for label in records.labels))


def claims(records: StudyRecords) -> list[compare.Claim]:
    found = []
    for data in records.datasets:
        for size in prefixes(records):
            none, cb, cb_s = (f"{size}, {edit}" if size else edit for edit in (NONE, CB, CB_S))
            found += [compare.accuracy_claim(records, data, each, none, "higher") for each in (cb, cb_s)]
            apart = compare.difference(
                mean_entropy(records, cb, data), mean_entropy(records, none, data), least=0.01
            )
            found.append(compare.Claim(records.on(data, f"entropy, {cb} less {none}"), "lower", apart))
    return found


def report(records: StudyRecords) -> StudyReport:
    verdict, reason = compare.verdict(claims(records))
    rows = compare.accuracy_table(records, NONE if NONE in records.labels else None)
    for row in rows:
        found = compare.spread(mean_entropy(records, row["variant"], row["data"]).values())
        row["entropy"] = None if found is None else round(found.mean, 4)
        row["entropy_deviation"] = found and found.deviation and round(found.deviation, 4)
    tables = {"table": rows, "entropy": entropy_table(records), "grid": compare.grid_table(records)}
    return StudyReport(tables, partial(draw, records), verdict, reason)


def draw(records: StudyRecords, path: Path) -> None:
    """A row a data set: accuracy, and the entropy of attention block by block."""
    canvas = figures.Canvas(2, max(1, len(records.datasets)))
    for row, data in enumerate(records.datasets):
        mean, entropy = canvas.plots[2 * row : 2 * row + 2]
        draw_means(mean, records, data)
        lines: dict[str, dict[float, compare.Spread | None]] = {}
        for label in records.labels:
            by_seed = entropies(records.of(label, data))
            blocks = sorted({block for places in by_seed.values() for block, _ in places})
            lines[label] = {
                block: compare.spread(places.get((block, -1)) for places in by_seed.values())
                for block in blocks
            }
        figures.over_steps(entropy, lines)
        entropy.set(title=f"{data}: entropy of attention", xlabel="block", ylabel="of its maximum")
    canvas.save(path)


STUDY = Study(
    name="context-broadcasting",
    title="Context Broadcasting, plain and scaled: accuracy, and entropy of each head",
    paper="CB main table",
    claim="CB and CB_S are more accurate than none, and the entropy of the attention maps falls.",
    cells=cells,
    base=base,
    report=report,
    after=conditioning_and_density,
)
