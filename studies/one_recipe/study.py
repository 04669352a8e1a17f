"""What each skip is worth at one recipe for all, over initialisations and depths.

``skip-ablation`` gives each variant the best of its settings, which shrinks what a skip is worth. The paper's
figure surely has one recipe for its three rows. Here all rows share one: timm's, PyTorch's or Xavier's
initialisation, 3, 6 or 12 blocks, one learning rate.
"""

from functools import partial
from pathlib import Path
from typing import Any

from studies import compare, figures
from studies.measures import conditioning_and_density
from studies.recipes import brief_vit
from studies.report import accuracy_report
from studies.study import Records, Report, Scale, Study, Variant
from wellposed.stats import Claim

ROWS = {"all skips": None, "no FFN skip": "ffn", "no attention skip": "attention"}
INITIALISATIONS = ("timm", "torch", "xavier")
DEPTHS = (3, 6, 12)
LEARNING_RATE = 1e-3


def label(init: str, depth: int, row: str) -> str:
    return f"{init}, {depth} blocks, {row}"


def variants(scale: Scale, data: str) -> list[Variant]:
    made = []
    for depth in DEPTHS:
        for init in INITIALISATIONS:
            for row, removed in ROWS.items():
                edits = [f"remove_skips which={removed}"] if removed else []
                fields: dict[str, Any] = {"init": init, "edits": edits, "lr": LEARNING_RATE}
                fields["model_options"] = {"depth": depth}
                recipe = brief_vit(scale, data, **fields | ({"drop_path": 0.0} if scale == "paper" else {}))
                made.append(Variant(label(init, depth, row), recipe))
    return made


def claims(records: Records) -> list[Claim]:
    """The paper's order and its sizes, at each recipe."""
    found = []
    all_skips, no_ffn, no_attention = ROWS
    for data in records.datasets:
        for init in INITIALISATIONS:
            for depth in DEPTHS:
                names = [label(init, depth, row) for row in (all_skips, no_ffn, no_attention)]
                where = f"{init}, {depth} blocks"
                for name, pair, paper in (
                    (f"attention's skip is worth more than the FFN's: {where}", (2, 1), -20.0),
                    (f"a ViT loses without attention's skips: {where}", (2, 0), -22.0),
                    (f"a ViT loses without the FFN's skips: {where}", (1, 0), -2.0),
                ):
                    first, second = (names[each] for each in pair)
                    claim = compare.accuracy_claim(records, data, name, first, second, "lower", paper=paper)
                    found.append(claim)
    return found


def table(records: Records) -> list[dict[str, Any]]:
    """A row an initialisation, depth and data set: the three accuracies."""
    rows = []
    for data in records.datasets:
        for init in INITIALISATIONS:
            for depth in DEPTHS:
                row: dict[str, Any] = {"data": data, "initialisation": init, "blocks": depth}
                for name in ROWS:
                    runs = records.of(label(init, depth, name), data)
                    found = compare.spread(compare.accuracies(runs).values())
                    row |= {name: found and round(found.mean, 2), "n": found.n if found else 0}
                rows.append(row)
    return rows


def draw(records: Records, path: Path) -> None:
    """A row a data set, a plot an initialisation: accuracy over the depth, a line for each row."""
    canvas = figures.Canvas(len(INITIALISATIONS), max(1, len(records.datasets)))
    places = ((data, init) for data in records.datasets for init in INITIALISATIONS)
    for plot, (data, init) in zip(canvas.plots, places, strict=False):
        lines = {
            row: {
                depth: compare.spread(compare.accuracies(records.of(label(init, depth, row), data)).values())
                for depth in DEPTHS
            }
            for row in ROWS
        }
        figures.over_steps(plot, lines)
        plot.set(title=f"{data}: {init}'s initialisation", xlabel="blocks", ylabel="accuracy, percent")
    canvas.save(path)


def report(records: Records) -> Report:
    tables = {"rows": table(records)}
    return accuracy_report(records, claims(records), tables=tables, draw=partial(draw, records))


STUDY = Study(
    title="What each skip is worth at one recipe for all three rows, by initialisation and depth",
    paper="ASA Fig. 1",
    claim="CIFAR-10, one recipe: 92 with all skips, 90 without the FFN's, 70 without attention's.",
    variants=variants,
    report=report,
    seeds=(0, 1, 2),
    after=conditioning_and_density,
    decides="The paper's own initialisation and learning rate, which it does not state, for 300 epochs.",
)
