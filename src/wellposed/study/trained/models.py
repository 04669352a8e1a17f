"""The main table of "Always Skip Attention": DCT graying on five families of models."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from wellposed.study import compare, figures
from wellposed.study.plan import Cell, Scale, Study, StudyRecords, StudyReport, data_name
from wellposed.study.trained.bases import POOLED, TINY, vit
from wellposed.study.trained.reports import accuracy_report, draw_means
from wellposed.train.recipe import Recipe

DCT = {"graying": "dct", "eps": 0.95}
PAPER_MODELS: dict[str, dict[str, Any]] = {
    "ViT-S": {"model": "vit_small_patch16_224"},
    "ViT-B": {"model": "vit_base_patch16_224"},
    "Swin-S": {"model": "swin_small_patch4_window7_224"},
    "CaiT-S": {"model": "cait_s24_224"},
    "PVTv2-b3": {"model": "pvt_v2_b3"},
}
_SWIN = {"patch_size": 2, "window_size": 4, "embed_dim": 48, "depths": [2, 2, 4], "num_heads": [2, 4, 8]}
SMALL_MODELS: dict[str, dict[str, Any]] = {
    "ViT, 192 wide": {"model": TINY, "model_options": POOLED},
    "ViT, 384 wide": {"model": "vit_small_patch16_224", "model_options": {**POOLED, "depth": 8}},
    # Its patches have 2 pixels whatever the image: one of 64 pixels would be four times the work.
    "Swin, small": {"model": "swin_tiny_patch4_window7_224", "model_options": _SWIN, "image_size": 32},
    "CaiT, small": {"model": "cait_xxs24_224", "model_options": {"depth": 10}},
    "PVTv2-b0": {"model": "pvt_v2_b0", "image_size": 64},
}
"""The same families so small that images of 32 pixels train them in minutes."""
BRIEF = {"epochs": 8}
"""Ten runs a seed, and most of these models take longer than ViT-Tiny."""

PAPER = {
    "ViT-S": (80.2, 80.4),
    "ViT-B": (81.0, 81.3),
    "Swin-S": (81.3, 81.6),
    "CaiT-S": (82.6, 82.7),
    "PVTv2-b3": (82.9, 83.0),
}
TOGETHER = "all sets"


def grayed(name: str) -> str:
    return f"{name} + DCT"


def cells(scale: Scale) -> list[Cell]:
    made = []
    for name, fields in (PAPER_MODELS if scale == "paper" else SMALL_MODELS).items():
        made += [Cell(name, fields), Cell(grayed(name), {**fields, **DCT})]
    return made


def base(scale: Scale, data: str) -> Recipe:
    if data_name(data) == "digits":
        # Images of 8 pixels are too few tokens for models with stages.
        return vit("small", data, image_size=32, model_options={}, epochs=10)
    # Options of the other ViTs, such as the pooling, are not those of all models.
    return vit(scale, data, model_options={}, **BRIEF if scale == "small" else {})


def report(records: StudyRecords) -> StudyReport:
    names = [label for label in records.labels if grayed(label) in records.labels]
    claims = [
        compare.accuracy_claim(records, data, grayed(name), name, "higher")
        for data in records.datasets
        for name in names
    ]
    paper = None
    if records.scale == "paper":
        paper = {
            label: value
            for name, both in PAPER.items()
            for label, value in zip((name, grayed(name)), both, strict=True)
        }
    gains = {data: gains_on(records, names, [data]) for data in records.datasets}
    if len(gains) > 1:
        gains[TOGETHER] = gains_on(records, names, records.datasets)
    rows = [
        {"data": data, "model": name, **gain.as_gain(), "is_difference": gain.is_one}
        for data, found in gains.items()
        for name, gain in found.items()
    ]
    made = accuracy_report(records, claims, paper=paper, tables={"gains": rows})
    return dataclasses.replace(made, draw=partial(draw, records, paper or {}, gains))


def gains_on(
    records: StudyRecords, names: Sequence[str], datasets: Sequence[str]
) -> dict[str, compare.Difference]:
    """What graying adds to each model, over the seeds of these sets."""

    def by_run(label: str) -> dict[tuple[str, int], float]:
        return {
            (data, seed): value
            for data in datasets
            for seed, value in compare.accuracies(records.of(label, data)).items()
        }

    found = {name: compare.difference(by_run(grayed(name)), by_run(name)) for name in names}
    return {name: gain for name, gain in found.items() if gain is not None}


def draw(
    records: StudyRecords,
    paper: Mapping[str, float],
    gains: Mapping[str, Mapping[str, compare.Difference]],
    path: Path,
) -> None:
    """A row a data set: accuracies, and beside them what graying adds."""
    canvas = figures.Canvas(2, max(1, len(records.datasets)))
    for row, data in enumerate(records.datasets):
        mean, gain = canvas.plots[2 * row : 2 * row + 2]
        draw_means(mean, records, data, paper)
        added = {
            name: compare.Spread(found.mean, found.deviation, found.n) for name, found in gains[data].items()
        }
        figures.means(gain, added)
        gain.axhline(0.0, color="black", linewidth=1)
        gain.set(title=f"{data}: with DCT graying", ylabel="points")
    canvas.save(path)


STUDY = Study(
    name="models",
    title="DCT graying on ViT, Swin, CaiT and PVT v2",
    paper="ASA main table",
    claim="ImageNet-1k with DCT graying: ViT-S +0.2, ViT-B +0.3, Swin-S +0.3, CaiT-S +0.1, PVTv2-b3 +0.1.",
    cells=cells,
    base=base,
    report=report,
)
