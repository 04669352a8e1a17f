"""Beyond Fig. 1: skips by depth, by the number of blocks that lose them, and by initialisation."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from studies import compare, figures
from studies.recipes import vit
from studies.skip_ablation.study import ALL, EDITS, LONGER, NO_ATTENTION, NO_FFN
from studies.study import Records, Report, Scale, Study, Variant, data_name
from wellposed.stats import Claim
from wellposed.train.recipe import combine

DEPTHS = (3, 6, 12, 24)
INITS = ("timm", "xavier")
LR = 5e-4
"""Of all at the small scale: between the two that ``skip-ablation`` tried."""
PAPER_LR = {
    (ALL, "timm"): 1e-3,
    (ALL, "xavier"): 1e-3,
    (NO_FFN, "timm"): 1e-4,
    (NO_FFN, "xavier"): 1e-4,
    (NO_ATTENTION, "timm"): 1e-4,
    (NO_ATTENTION, "xavier"): 3e-4,
}
"""The best of the trials of ``skip-ablation`` at the paper scale, which have 12 blocks; without the FFN's
skips and Xavier's initialisation the second best, as the best one broke in the long run."""
BRIEF = {"epochs": 6}
"""Of 32 runs, half with 12 blocks and more: whether a model learns shows early."""
FEWER = (3, 6)
"""Of the 12 blocks of the usual depth, the first so many lose their skip; all 12 are in the other part."""


def label_of(variant: str, depth: int, init: str, blocks: int | None = None) -> str:
    part = "" if blocks is None else f" in {blocks} blocks"
    return f"{variant}{part}, depth {depth}, {init}"


def variants(scale: Scale, data: str) -> list[Variant]:
    base = vit("small", data, **({} if data_name(data) == "digits" else BRIEF))
    if scale == "paper":
        base = vit("small", data, **LONGER)

    def of(name: str, depth: int, init: str, blocks: int | None = None) -> Variant:
        lr = PAPER_LR[name, init] if scale == "paper" else LR
        fields = {**EDITS[name], "init": init, "lr": lr, "model_options": {"depth": depth}}
        if blocks is not None:
            fields["edits"] = [f"{edit} blocks=0-{blocks - 1}" for edit in fields["edits"]]
        return Variant(label_of(name, depth, init, blocks), combine(base.to_mapping(), fields))

    made = []
    for init in INITS:
        made += [of(name, depth, init) for depth in DEPTHS for name in EDITS]
        made += [of(name, 12, init, blocks) for blocks in FEWER for name in (NO_FFN, NO_ATTENTION)]
    return made


def depth_table(records: Records) -> list[dict[str, Any]]:
    """What each variant loses compared with all skips at the same depth and initialisation."""
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
                        rows.append({**where, **compare.in_columns(lost)})
    return rows


def claims(records: Records) -> list[Claim]:
    """Questions: does depth make it worse, and does the initialisation matter?"""
    found = []
    for data in records.datasets:
        for init in INITS:
            deep, shallow = (label_of(NO_ATTENTION, depth, init) for depth in (DEPTHS[-1], DEPTHS[0]))
            name = f"without attention's skips a deeper ViT is less accurate, {init}"
            found.append(compare.accuracy_claim(records, data, name, deep, shallow, "lower"))
        xavier, timm = (label_of(NO_ATTENTION, 12, init) for init in ("xavier", "timm"))
        name = "without attention's skips Xavier's initialisation is the better one"
        found.append(compare.accuracy_claim(records, data, name, xavier, timm, "higher"))
    return found


def report(records: Records) -> Report:
    tables = {
        "table": depth_table(records),
        "accuracy": compare.accuracy_table(records),
        "grid": compare.grid_table(records),
    }
    notes = [
        "The claims are questions of ours: no paper answers them.",
        "At the small scale all have one learning rate.",
    ]
    return Report(tables, claims(records), partial(draw, records, tables["table"]), notes)


def draw(records: Records, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy over the depth, and the loss over the number of blocks without skips."""
    canvas = figures.Canvas(2, max(1, len(records.datasets)))
    for index, data in enumerate(records.datasets):
        left, right = canvas.plots[2 * index : 2 * index + 2]
        lines: dict[str, dict[float, compare.Spread | None]] = {}
        for init in INITS:
            for variant in EDITS:
                lines[f"{variant}, {init}"] = {
                    depth: compare.spread(
                        compare.accuracies(records.of(label_of(variant, depth, init), data)).values()
                    )
                    for depth in DEPTHS
                }
        figures.over_steps(left, lines)
        left.set(title=f"{data}: accuracy by depth", xlabel="blocks", ylabel="percent", xticks=DEPTHS)
        lost: dict[str, dict[float, compare.Spread | None]] = {}
        for row in rows:
            if row["data"] == data and row["depth"] == 12 and row["difference"] is not None:
                half = None if row["high"] is None else row["high"] - row["difference"]
                point = compare.Spread(row["difference"], half, row["pairs"])
                lost.setdefault(f"{row['variant']}, {row['init']}", {})[row["blocks_without"]] = point
        figures.over_steps(right, lost)
        right.set(title="12 blocks: points lost, 95%", xlabel="blocks without the skip", ylabel="points")
    canvas.save(path)


STUDY = Study(
    title="skips by depth, by the number of blocks without them, by initialisation",
    paper="beyond",
    claim="Question: is a deeper ViT hurt more without attention's skips, and does Xavier's initialisation "
    "help?",
    variants=variants,
    report=report,
    seeds=(0,),
    decides="The long recipe with several seeds: `python -m studies skip-depth --scale paper --data "
    "cifar10:DIR --seeds 0-4`.",
)
