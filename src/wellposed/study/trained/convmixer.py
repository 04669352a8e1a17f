"""Supplement B, Fig. 6 of "Always Skip Attention": a ConvMixer does not need its skips."""

from typing import Any

from wellposed.study import compare
from wellposed.study.plan import Cell, Scale, Study, StudyRecords, StudyReport, data_name, grid
from wellposed.study.trained.bases import COMMON, UNWATCHED, small_images
from wellposed.study.trained.reports import accuracy_report
from wellposed.train.recipe import Recipe

WITH, WITHOUT = "with skips", "without skips"
WITHIN = 0.2

MODEL = "convmixer_256_8"
DIGITS: dict[str, Any] = {"dim": 48, "depth": 4, "kernel_size": 3}


def cells(scale: Scale) -> list[Cell]:
    return grid([Cell(WITH), Cell(WITHOUT, {"remove_skips": "mixer"})], lr=(3e-3, 1e-3))


def base(scale: Scale, data: str) -> Recipe:
    values: dict[str, Any] = COMMON | UNWATCHED | small_images(data) | {"data": data, "model": MODEL}
    # Compiled whole, its batch norms become one kernel with what is around them: half of the time.
    values["compile_blocks"] = False
    if data_name(data) == "digits":
        small = {"batch_size": 64, "mixup": 0.0, "cutmix": 0.0, "erase": 0.0, "precision": "fp32"}
        return Recipe(**values | small | {"epochs": 15, "warmup_epochs": 1.5, "model_options": DIGITS})
    # Its patches have 2 pixels whatever the image: one of 32 pixels is the work of four for ViT-Tiny.
    small = {"image_size": 32, "epochs": 8}
    return Recipe(**values | ({"epochs": 200, "limit": None} if scale == "paper" else small))


def trial(scale: Scale, data: str) -> dict[str, Any]:
    return {"epochs": 5}


def report(records: StudyRecords) -> StudyReport:
    claims = [
        compare.accuracy_claim(records, data, WITHOUT, WITH, "same", WITHIN) for data in records.datasets
    ]
    return accuracy_report(records, claims, baseline=WITH)


STUDY = Study(
    name="convmixer",
    title="ConvMixer-Tiny with and without skips; give --data three times",
    paper="ASA Supplement B, Fig. 6",
    claim="On three data sets a ConvMixer-Tiny without skips is within 0.2 points of one with them.",
    cells=cells,
    base=base,
    report=report,
    trial=trial,
    chooses_once=True,
)
