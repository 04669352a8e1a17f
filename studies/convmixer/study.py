"""Supplement B, Fig. 6 of "Always Skip Attention": a ConvMixer does not need its skips."""

from typing import Any

from studies import compare
from studies.recipes import COMMON, UNWATCHED, small_images
from studies.report import accuracy_report
from studies.study import Records, Report, Scale, Study, Variant, data_name
from wellposed.train import Recipe

WITH, WITHOUT = "with skips", "without skips"
EDITS: dict[str, dict[str, Any]] = {WITH: {}, WITHOUT: {"edits": ["remove_skips which=mixer"]}}
MARGIN = 0.2
"""Points: the paper's three data sets differ by no more."""
LR = {"lr": 3e-3}
"""The better one of 3e-3 and 1e-3 for both, by five epochs of each with seed 0, on the digits and on
Tiny-ImageNet-50 (the trials in ``grid.csv``)."""

MODEL = "convmixer_256_8"
DIGITS: dict[str, Any] = {
    "batch_size": 64,
    "mixup": 0.0,
    "cutmix": 0.0,
    "erase": 0.0,
    "precision": "fp32",
    "epochs": 15,
    "warmup_epochs": 1.5,
    "model_options": {"dim": 48, "depth": 4, "kernel_size": 3},
}


def variants(scale: Scale, data: str) -> list[Variant]:
    # Compiled whole, its batch norms become one kernel with what is around them: half of the time.
    values = {"data": data, "model": MODEL, "compile_blocks": False, **LR}
    if data_name(data) == "digits":
        values |= DIGITS
    elif scale == "paper":
        values |= {"epochs": 200, "limit": None}
    else:
        # Its patches have 2 pixels whatever the image: one of 32 pixels is the work of four for ViT-Tiny.
        values |= {"image_size": 32, "epochs": 8}
    base = COMMON | UNWATCHED | small_images(data) | values
    return [Variant(label, Recipe.from_mapping(base | edit), chosen=LR) for label, edit in EDITS.items()]


def report(records: Records) -> Report:
    name = "a ConvMixer is as accurate without its skips"
    claims = [
        compare.accuracy_claim(
            records,
            data,
            name,
            WITHOUT,
            WITH,
            "same",
            margin=MARGIN,
            without=compare.choosers(records, data),
        )
        for data in records.datasets
    ]
    return accuracy_report(records, claims, baseline=WITH, unseen=True)


STUDY = Study(
    title="ConvMixer-Tiny with and without skips",
    paper="ASA Supplement B, Fig. 6",
    claim="On three data sets a ConvMixer-Tiny without skips is within 0.2 points of one with them.",
    variants=variants,
    report=report,
    decides="200 epochs of all images of CIFAR-10, CIFAR-100 and Tiny-ImageNet, and so many seeds that the "
    "interval is narrower than 0.4 points: `python -m studies convmixer --scale paper --data cifar10:DIR "
    "--seeds 0-9`.",
)
