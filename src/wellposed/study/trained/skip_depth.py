"""Beyond Fig. 1: how what a ViT loses without skips hangs on its depth, on how many blocks lose them, and on
the initialisation.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from wellposed.study import compare, figures
from wellposed.study.plan import Cell, Scale, Study, StudyRecords, StudyReport, data_name, grid
from wellposed.study.trained.bases import vit
from wellposed.study.trained.skip_ablation import ALL, LONGER, NO_ATTENTION, NO_FFN, VARIANTS
from wellposed.train.recipe import Recipe

DEPTHS = (3, 6, 12, 24)
INITS = ("timm", "xavier")
LR = 5e-4
BRIEF = {"epochs": 6}
"""Of 32 runs, half with 12 blocks and more: whether a model learns shows early."""
FEWER = (3, 6)
"""Of the 12 blocks of the usual depth, the first so many lose their skip; all 12 are in the other part."""


def label_of(variant: str, depth: int, init: str, blocks: int | None = None) -> str:
    part = "" if blocks is None else f" in {blocks} blocks"
    return f"{variant}{part}, depth {depth}, {init}"


def cells(scale: Scale) -> list[Cell]:
    made = []
    for init in INITS:
        for depth in DEPTHS:
            for variant, fields in VARIANTS.items():
                values = {**fields, "init": init, "model_options": {"depth": depth}}
                made.append(Cell(label_of(variant, depth, init), values))
        for blocks in FEWER:
            for variant in (NO_FFN, NO_ATTENTION):
                some = {"skip_blocks": f"0-{blocks - 1}", "init": init, "model_options": {"depth": 12}}
                made.append(Cell(label_of(variant, 12, init, blocks), {**VARIANTS[variant], **some}))
    return grid(made, lr=(1e-3, 3e-4)) if scale == "paper" else made


def base(scale: Scale, data: str) -> Recipe:
    if scale == "paper":
        return vit("small", data, **LONGER)
    # Between the paper scale's two rates.
    return vit(scale, data, lr=LR, **{} if data_name(data) == "digits" else BRIEF)


def depth_table(records: StudyRecords) -> list[dict[str, Any]]:
    """What each variant loses beside all skips at the same depth and initialisation."""
    rows = []
    for data in records.datasets:
        for init in INITS:
            for depth in DEPTHS:
                whole = compare.accuracies(records.of(label_of(ALL, depth, init), data))
                for variant in (NO_FFN, NO_ATTENTION):
                    for blocks in (*(FEWER if depth == 12 else ()), None):
                        runs = records.of(label_of(variant, depth, init, blocks), data)
                        lost = compare.difference(compare.accuracies(runs), whole)
                        where = {"data": data, "variant": variant, "init": init, "depth": depth}
                        where["blocks_without"] = blocks or depth
                        numbers: dict[str, Any] = {
                            "difference": None,
                            "deviation": None,
                            "is_difference": None,
                        }
                        if lost is not None:
                            numbers = {
                                "difference": round(lost.mean, 3),
                                "deviation": lost.deviation and round(lost.deviation, 3),
                                "is_difference": lost.is_one,
                            }
                        rows.append({**where, **numbers})
    return rows


def claims(records: StudyRecords) -> list[compare.Claim]:
    """Told as questions: does depth make it worse, and does the initialisation matter?"""
    found = []
    for data in records.datasets:
        for init in INITS:
            deep, shallow = (label_of(NO_ATTENTION, depth, init) for depth in (DEPTHS[-1], DEPTHS[0]))
            found.append(compare.accuracy_claim(records, data, deep, shallow, "lower"))
        drawn = [label_of(NO_ATTENTION, 12, init) for init in ("xavier", "timm")]
        found.append(compare.accuracy_claim(records, data, drawn[0], drawn[1], "higher"))
    return found


def report(records: StudyRecords) -> StudyReport:
    verdict, reason = compare.verdict(claims(records))
    tables = {
        "table": depth_table(records),
        "accuracy": compare.accuracy_table(records),
        "grid": compare.grid_table(records),
    }
    notes = [
        "The verdict is on the question, as no paper answers it.",
        "At the small scale all have one learning rate; at the paper scale each cell has the better of two.",
    ]
    return StudyReport(tables, partial(draw, records, tables["table"]), verdict, reason, notes)


def draw(records: StudyRecords, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy over the depth, and the loss over the number of blocks without skips."""
    canvas = figures.Canvas(2, len(records.datasets))
    for index, data in enumerate(records.datasets):
        left, right = canvas.plots[2 * index : 2 * index + 2]
        lines: dict[str, dict[float, compare.Spread | None]] = {}
        for init in INITS:
            for variant in VARIANTS:
                points: dict[float, compare.Spread | None] = {
                    depth: compare.spread(
                        compare.accuracies(records.of(label_of(variant, depth, init), data)).values()
                    )
                    for depth in DEPTHS
                }
                lines[f"{variant}, {init}"] = points
        figures.over_steps(left, lines)
        left.set(title=f"{data}: accuracy by depth", xlabel="blocks", ylabel="percent", xticks=DEPTHS)
        lost: dict[str, dict[float, compare.Spread | None]] = {}
        for row in rows:
            if row["data"] == data and row["depth"] == 12 and row["difference"] is not None:
                point = compare.Spread(row["difference"], row["deviation"], 1)
                lost.setdefault(f"{row['variant']}, {row['init']}", {})[row["blocks_without"]] = point
        figures.over_steps(right, lost)
        right.set(title="12 blocks: points lost", xlabel="blocks without the skip", ylabel="points")
    canvas.save(path)


STUDY = Study(
    name="skip-depth",
    title="skips by depth, by the number of blocks without them, by initialisation",
    paper="beyond",
    claim="Question: is a deeper ViT hurt more without attention's skips, and does Xavier's start help?",
    cells=cells,
    base=base,
    report=report,
    seeds=(0,),
)
