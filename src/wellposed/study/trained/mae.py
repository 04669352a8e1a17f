"""MAE pre-training with and without DCT graying, then fine-tuning, after "Always Skip Attention".

Graying the embedding would mix patches before the mask is drawn, so that hidden ones leak; it grays the input
of the first block, after the mask.
"""

from typing import Any

from wellposed.study import compare
from wellposed.study.plan import Cell, Scale, Study, StudyRecords, StudyReport
from wellposed.study.trained.bases import vit
from wellposed.study.trained.reports import accuracy_report
from wellposed.train.recipe import Recipe

PLAIN, GRAYED, SCRATCH = "MAE, fine-tuned", "MAE + DCT, fine-tuned", "from scratch"
DCT = {"graying": "dct", "eps": 0.95, "gray_where": "blocks", "gray_blocks": "0"}
UNLABELLED: dict[str, Any] = {
    "task": "mae",
    "mixup": 0.0,
    "cutmix": 0.0,
    "erase": 0.0,
    "drop_path": 0.0,
    "auto_augment": None,
    "layer_decay": None,
}
PRETRAINING: dict[str, dict[str, Any]] = {
    "small": {"epochs": 50},
    "paper": {
        "epochs": 800,
        "batch_size": 4096,
        "lr": 2.4e-3,
        "warmup_epochs": 40,
        "crop_scale": 0.2,
        "decoder_width": 512,
        "decoder_depth": 8,
    },
}
PAPER = {PLAIN: 83.0, GRAYED: 83.2}


def cells(scale: Scale) -> list[Cell]:
    before = {**UNLABELLED, **PRETRAINING[scale]}
    return [
        Cell("MAE", before, reported=False),
        Cell("MAE + DCT", {**before, **DCT}, reported=False),
        Cell(SCRATCH, {"layer_decay": None}),
        Cell(PLAIN, {}, starts_from="MAE"),
        Cell(GRAYED, DCT, starts_from="MAE + DCT"),
    ]


def base(scale: Scale, data: str) -> Recipe:
    """The fine-tuning; the pre-training changes it."""
    if scale == "paper":
        return vit(scale, data, epochs=100, lr=2e-3, layer_decay=0.65)
    return vit(scale, data, layer_decay=0.75)


def report(records: StudyRecords) -> StudyReport:
    claims = [compare.accuracy_claim(records, data, GRAYED, PLAIN, "higher") for data in records.datasets]
    losses = [
        {
            "data": run.data,
            "pretraining": run.label,
            "seed": run.seed,
            "state": run.state,
            "test_loss": (run.result.get("test") or {}).get("loss"),
        }
        for run in records.runs
        if not run.reported
    ]
    paper = PAPER if records.scale == "paper" else None
    notes = ["The first block's input is grayed, in pre-training and in fine-tuning alike."]
    return accuracy_report(
        records, claims, baseline=PLAIN, paper=paper, tables={"pretraining": losses}, notes=notes
    )


STUDY = Study(
    name="mae",
    title="MAE pre-training with and without graying, then fine-tuning",
    paper="ASA, MAE",
    claim="ViT-B, ImageNet-1k, MAE and fine-tuning: 83.0 without graying, 83.2 with DCT graying.",
    cells=cells,
    base=base,
    report=report,
)
