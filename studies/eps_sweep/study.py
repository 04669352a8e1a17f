"""The ablation of "Always Skip Attention" over eps: accuracy, kappa in and out.

The paper's table is of the SVD; ``spectral`` is the same map without one.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from studies import compare, figures
from studies.measures import conditioning_and_density
from studies.recipes import vit
from studies.study import Records, Report, Scale, Study, Variant
from wellposed.stats import Claim, Median
from wellposed.study_records import RunRecord

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


def variants(scale: Scale, data: str) -> list[Variant]:
    made = [Variant(NONE, vit(scale, data))]
    for method, values in (PAPER_EPS if scale == "paper" else EPS).items():
        for place in PLACES:
            for eps in values:
                edit = {"edit": "gray_tokens", "method": method, "eps": eps, "where": place}
                made.append(Variant(f"{method} {eps:g}, {place}", vit(scale, data, edits=[edit])))
    return made


def ends(run: RunRecord) -> tuple[float | None, float | None]:
    """Ln kappa of the first block's input, and of what the last block returns."""
    kappas = {
        (row["block"], row["position"]): math.log(row["value"])
        for row in run.measured
        if row["measure"] == "kappa" and row["value"]
    }
    last = max((block for block, _ in kappas), default=0)
    return kappas.get((0, "input")), kappas.get((last, "ffn.sum"))


def table(records: Records) -> list[dict[str, Any]]:
    rows = compare.accuracy_table(records, NONE)
    for row in rows:
        found = [ends(run) for run in records.of(row["variant"], row["data"])]
        for index, name in enumerate(("ln_kappa_in", "ln_kappa_out")):
            mean = compare.spread(each[index] for each in found)
            row[name] = None if mean is None else round(mean.mean, 3)
        if records.scale == "paper":
            said = PAPER.get(row["variant"].partition(",")[0], (None, None, None))
            row |= dict(zip(("paper", "paper_ln_kappa_in", "paper_ln_kappa_out"), said, strict=True))
    return rows


def progress(records: Records) -> list[dict[str, Any]]:
    """What each graying gains at every test: one that only made the beginning faster would lose it again."""

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
                    where = {"data": data, "variant": label, "epoch": epoch}
                    rows.append({**where, **compare.in_columns(gain)})
    return rows


def rank_of_patches(records: Records, data: str) -> str:
    """Why graying cannot move kappa of what enters on a set; empty where it can.

    Patches of fewer pixels than there are tokens leave the smallest singular values to the position
    embedding, which is added after graying.
    """
    recipe = records.of(NONE, data)[0].recipe
    size, patch = recipe.get("image_size"), recipe.get("patch_size")
    if size is None or patch is None or 3 * patch**2 >= (size // patch) ** 2:
        return ""
    tokens, pixels = (size // patch) ** 2, 3 * patch**2
    return f"patches of {pixels} values for {tokens} tokens: the smallest are the position embedding's"


def kappas(records: Records, data: str, label: str, position: str) -> dict[int, Median]:
    """Ln kappa of what the first block gets (``input``) or the last returns (``ffn.sum``), by seed."""
    found: dict[int, Median] = {}
    for run in records.of(label, data):
        last = max((row["block"] for row in run.measured if "block" in row), default=0)
        each = compare.log_kappa(run, position, 0 if position == "input" else last)
        if each is not None:
            found[run.seed] = each
    return found


def claims(records: Records) -> list[Claim]:
    """Graying helps in the middle, and lowers kappa of what enters and of what leaves."""
    found = []
    for data in records.datasets:
        cannot = rank_of_patches(records, data)
        for place in PLACES:
            grayed = f"spectral 0.7, {place}"
            name = f"graying the {place} raises accuracy"
            found.append(compare.accuracy_claim(records, data, name, grayed, NONE, "higher"))
            for position, end, differs in (("input", "enters", cannot), ("ffn.sum", "leaves", "")):
                sides = (kappas(records, data, label, position) for label in (grayed, NONE))
                contrast = f"{grayed} - {NONE}, {data}, ln kappa of what {end}"
                name = f"graying the {place} lowers the kappa of what {end}"
                change = compare.kappa_difference(*sides)
                found.append(Claim(name, contrast, "lower", change, differs=differs))
    return found


def report(records: Records) -> Report:
    rows = table(records)
    notes = [
        "kappa in is of the tokens that the first block gets, kappa out of those that the last returns; "
        "the paper does not say where it looks."
    ]
    tables = {"table": rows, "progress": progress(records), "grid": compare.grid_table(records)}
    return Report(tables, claims(records), partial(draw, records, rows), notes)


def draw(records: Records, rows: Sequence[dict[str, Any]], path: Path) -> None:
    canvas = figures.Canvas(3, max(1, len(records.datasets)))
    titles = {"accuracy": "accuracy", "ln_kappa_in": "ln kappa in", "ln_kappa_out": "ln kappa out"}
    for index, data in enumerate(records.datasets):
        for plot, (column, title) in zip(canvas.plots[3 * index :], titles.items(), strict=False):
            lines: dict[str, dict[float, compare.Spread | None]] = {}
            for row in rows:
                if row["data"] != data or row[column] is None:
                    continue
                if row["variant"] == NONE:
                    plot.axhline(row[column], color="grey", linestyle="dashed", label=NONE)
                    continue
                named, _, place = row["variant"].partition(", ")
                method, eps = named.split(" ")
                deviation = row["deviation"] if column == "accuracy" else None
                point = compare.Spread(row[column], deviation, row["n"])
                lines.setdefault(f"{method}, {place}", {})[float(eps)] = point
            figures.over_steps(plot, lines)
            plot.set(title=f"{data}: {title}", xlabel="eps")
    canvas.save(path)


STUDY = Study(
    title="spectral and DCT graying over eps, of pixels and of embeddings",
    paper="ASA ablation of eps",
    claim="ViT-B, ImageNet-1k: 81.0 without graying, 81.4 with eps 0.7 or 0.6, 81.0 with 0.5; "
    "ln kappa in falls from 6.72 to 6.15, 5.73 and 5.29.",
    variants=variants,
    report=report,
    after=conditioning_and_density,
    decides="ViT-B and DeiT's recipe, 300 epochs of ImageNet-1k: `python -m studies eps-sweep --scale paper "
    "--data IMAGENET_DIR --launch 'torchrun --nproc-per-node 8'`.",
)
