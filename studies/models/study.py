"""The main table of "Always Skip Attention": DCT graying on five families of models."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from studies import compare, figures
from studies.recipes import POOLED, TINY, vit
from studies.report import accuracy_report
from studies.study import Records, Report, Scale, Study, Variant, data_name
from wellposed.stats import Estimate

DCT: dict[str, Any] = {"edits": ["gray_tokens method=dct eps=0.95"]}
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


def variants(scale: Scale, data: str) -> list[Variant]:
    # Options of the other ViTs, such as the pooling, are not those of all models.
    base: dict[str, Any] = {"model_options": {}, **(BRIEF if scale == "small" else {})}
    if data_name(data) == "digits":
        # Images of 8 pixels are too few tokens for models with stages.
        scale, base = "small", {"model_options": {}, "image_size": 32, "epochs": 10}
    made = []
    for name, model in (PAPER_MODELS if scale == "paper" else SMALL_MODELS).items():
        fields = base | model
        made += [
            Variant(name, vit(scale, data, **fields)),
            Variant(grayed(name), vit(scale, data, **fields | DCT)),
        ]
    return made


def report(records: Records) -> Report:
    names = [label for label in records.labels if grayed(label) in records.labels]
    claims, paper = [], None
    if records.scale == "paper":
        paper = {
            label: value
            for name, both in PAPER.items()
            for label, value in zip((name, grayed(name)), both, strict=True)
        }
    for data in records.datasets:
        for name in names:
            said = f"DCT graying raises the accuracy of {name}"
            size = None if paper is None else round(paper[grayed(name)] - paper[name], 3)
            claims.append(
                compare.accuracy_claim(records, data, said, grayed(name), name, "higher", paper=size)
            )
    gains = {data: gains_on(records, names, [data]) for data in records.datasets}
    if len(gains) > 1:
        gains[TOGETHER] = gains_on(records, names, records.datasets)
    rows = [
        {"data": data, "model": name, **compare.in_columns(gain)}
        for data, found in gains.items()
        for name, gain in found.items()
    ]
    made = accuracy_report(records, claims, paper=paper, tables={"gains": rows})
    return dataclasses.replace(made, draw=partial(draw, records, paper or {}, gains))


def gains_on(records: Records, names: Sequence[str], datasets: Sequence[str]) -> dict[str, Estimate]:
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
    records: Records,
    paper: Mapping[str, float],
    gains: Mapping[str, Mapping[str, Estimate]],
    path: Path,
) -> None:
    """A row a data set: accuracies, and next to them what graying adds, with its interval."""
    canvas = figures.Canvas(2, max(1, len(records.datasets)))
    for row, data in enumerate(records.datasets):
        mean, gain = canvas.plots[2 * row : 2 * row + 2]
        figures.draw_means(mean, records, data, paper)
        halves = {
            name: compare.Spread(found.mean, None if found.p is None else found.high - found.mean, found.n)
            for name, found in gains[data].items()
        }
        figures.means(gain, halves)
        gain.axhline(0.0, color="black", linewidth=1)
        gain.set(title=f"{data}: with DCT graying, 95%", ylabel="points")
    canvas.save(path)


STUDY = Study(
    title="DCT graying on ViT, Swin, CaiT and PVT v2",
    paper="ASA main table",
    claim="ImageNet-1k with DCT graying: ViT-S +0.2, ViT-B +0.3, Swin-S +0.3, CaiT-S +0.1, PVTv2-b3 +0.1.",
    variants=variants,
    report=report,
    decides="The paper's models, 300 epochs of ImageNet-1k, with several seeds: `python -m studies models "
    "--scale paper --data IMAGENET_DIR --launch 'torchrun --nproc-per-node 8'`.",
)
