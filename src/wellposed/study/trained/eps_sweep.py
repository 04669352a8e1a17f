"""The ablation of "Always Skip Attention" over eps: accuracy, kappa in and out.

The paper's table is of the SVD; ``spectral`` is the same map without one.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from wellposed.study import compare, figures
from wellposed.study.plan import Cell, RunRecord, Scale, Study, StudyRecords, StudyReport
from wellposed.study.trained.after import conditioning_and_density
from wellposed.study.trained.bases import vit
from wellposed.train.recipe import Recipe

NONE = "no graying"
EPS = {"spectral": (0.9, 0.7, 0.5), "dct": (0.95, 0.8)}
PAPER_EPS = {"spectral": (0.9, 0.7, 0.6, 0.5), "dct": (0.98, 0.95, 0.9)}
PLACES = ("embedding", "pixels")
PAPER = {
    NONE: (81.0, 6.72, 6.74),
    "spectral 0.9": (81.2, 6.64, 6.66),
    "spectral 0.7": (81.4, 6.15, 6.17),
    "spectral 0.6": (81.4, 5.73, 5.71),
    "spectral 0.5": (81.0, 5.29, 5.25),
}
"""Accuracy, ln kappa in and out of ViT-B on ImageNet-1k; where it was grayed is not said."""


def cells(scale: Scale) -> list[Cell]:
    made = [Cell(NONE)]
    for method, values in (PAPER_EPS if scale == "paper" else EPS).items():
        for place in PLACES:
            for eps in values:
                fields = {"graying": method, "eps": eps, "gray_where": place}
                made.append(Cell(f"{method} {eps:g}, {place}", fields))
    return made


def base(scale: Scale, data: str) -> Recipe:
    return vit(scale, data)


def ends(runs: Iterable[RunRecord]) -> tuple[compare.Spread | None, compare.Spread | None]:
    """Over the seeds: ln kappa of the first block's input, and of what the last block returns."""
    first, last = [], []
    for run in runs:
        kappas = {
            (row["block"], row["position"]): math.log(row["value"])
            for row in run.measured
            if row.get("measure") == "kappa" and row.get("value")
        }
        if kappas:
            first.append(kappas.get((0, "input")))
            last.append(kappas.get((max(block for block, _ in kappas), "ffn.sum")))
    return compare.spread(first), compare.spread(last)


def table(records: StudyRecords) -> list[dict[str, Any]]:
    rows = compare.accuracy_table(records, NONE)
    for row in rows:
        kappas = ends(records.of(row["variant"], row["data"]))
        for name, found in zip(("ln_kappa_in", "ln_kappa_out"), kappas, strict=True):
            row[name] = None if found is None else round(found.mean, 3)
        if records.scale == "paper":
            said = PAPER.get(row["variant"].partition(",")[0], (None, None, None))
            row |= dict(zip(("paper", "paper_ln_kappa_in", "paper_ln_kappa_out"), said, strict=True))
    return rows


def progress(records: StudyRecords) -> list[dict[str, Any]]:
    """What each graying gains at every test: one that only made the start faster would lose it again."""

    def tests(label: str, data: str) -> dict[int, dict[int, float]]:
        found: dict[int, dict[int, float]] = {}
        for run in records.of(label, data):
            for line in run.curve:
                if isinstance(line.get("accuracy"), (int, float)):
                    found.setdefault(line["epoch"], {})[run.seed] = 100.0 * line["accuracy"]
        return found

    rows = []
    for data in records.datasets:
        plain = tests(NONE, data)
        for label in records.labels:
            for epoch, by_seed in sorted(tests(label, data).items() if label != NONE else ()):
                gain = compare.difference(by_seed, plain.get(epoch, {}))
                if gain is not None:
                    rows.append({"data": data, "variant": label, "epoch": epoch, **gain.as_gain()})
    return rows


def claims(records: StudyRecords) -> list[compare.Claim]:
    """Graying helps in the middle, and lowers kappa the more the lower eps is."""
    found = []
    for data in records.datasets:
        for place in PLACES:
            graying = f"spectral 0.7, {place}"
            found.append(compare.accuracy_claim(records, data, graying, NONE, "higher"))
            into = [
                {run.seed: value.mean for run in records.of(label, data) if (value := ends([run])[0])}
                for label in (graying, NONE)
            ]
            apart = compare.difference(into[0], into[1], least=0.1)
            what = records.on(data, f"ln kappa in, {graying} less {NONE}")
            found.append(compare.Claim(what, "lower", apart))
    return found


def report(records: StudyRecords) -> StudyReport:
    verdict, reason = compare.verdict(claims(records))
    rows = table(records)
    notes = [
        "kappa in is of the tokens that the first block gets, kappa out of those that the last returns; "
        "the paper does not say where it looks."
    ]
    tables = {"table": rows, "progress": progress(records), "grid": compare.grid_table(records)}
    return StudyReport(tables, partial(draw, records, rows), verdict, reason, notes)


def draw(records: StudyRecords, rows: Sequence[dict[str, Any]], path: Path) -> None:
    canvas = figures.Canvas(3, len(records.datasets))
    titles = {"accuracy": "accuracy", "ln_kappa_in": "ln kappa in", "ln_kappa_out": "ln kappa out"}
    for index, data in enumerate(records.datasets):
        for plot, (column, title) in zip(canvas.plots[3 * index :], titles.items(), strict=False):
            lines: dict[str, dict[float, compare.Spread | None]] = {}
            for row in rows:
                if row["data"] != data or row[column] is None:
                    continue
                deviation = row["deviation"] if column == "accuracy" else None
                if row["variant"] == NONE:
                    plot.axhline(row[column], color="grey", linestyle="dashed", label=NONE)
                    continue
                named, _, place = row["variant"].partition(", ")
                method, eps = named.split(" ")
                point = compare.Spread(row[column], deviation, row["n"])
                lines.setdefault(f"{method}, {place}", {})[float(eps)] = point
            figures.over_steps(plot, lines)
            plot.set(title=f"{data}: {title}", xlabel="eps")
    canvas.save(path)


STUDY = Study(
    name="eps-sweep",
    title="spectral and DCT graying over eps, of pixels and of embeddings",
    paper="ASA ablation of eps",
    claim="ViT-B, ImageNet-1k: 81.0 without graying, 81.4 with eps 0.7 or 0.6, 81.0 with 0.5; "
    "ln kappa in falls from 6.72 to 6.15, 5.73 and 5.29.",
    cells=cells,
    base=base,
    report=report,
    after=conditioning_and_density,
)
