"""MAE pre-training with and without DCT graying, then fine-tuning, after "Always Skip Attention".

Graying the embedding would mix patches before the mask is drawn, so that hidden ones leak; it grays the input
of the first block, after the mask.
"""

from typing import Any

from studies import compare
from studies.recipes import vit
from studies.report import accuracy_report
from studies.study import Records, Report, Scale, Study, Variant

PLAIN, GRAYED, SCRATCH = "MAE, fine-tuned", "MAE + DCT, fine-tuned", "from scratch"
DCT: dict[str, Any] = {"edits": ["gray_tokens method=dct eps=0.95 where=blocks blocks=0"]}
UNLABELLED: dict[str, Any] = {
    "task": "mae",
    "mixup": 0.0,
    "cutmix": 0.0,
    "erase": 0.0,
    "drop_path": 0.0,
    "auto_augment": None,
}
PRETRAINING: dict[Scale, dict[str, Any]] = {
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
FINE_TUNING: dict[Scale, dict[str, Any]] = {"small": {}, "paper": {"epochs": 100, "lr": 2e-3}}
LAYER_DECAY: dict[Scale, float] = {"small": 0.75, "paper": 0.65}
PAPER = {PLAIN: 83.0, GRAYED: 83.2}


def variants(scale: Scale, data: str) -> list[Variant]:
    before = FINE_TUNING[scale] | UNLABELLED | PRETRAINING[scale]
    tuned = FINE_TUNING[scale] | {"layer_decay": LAYER_DECAY[scale]}
    return [
        Variant("MAE", vit(scale, data, **before), role="start"),
        Variant("MAE + DCT", vit(scale, data, **before | DCT), role="start"),
        Variant(SCRATCH, vit(scale, data, **FINE_TUNING[scale])),
        Variant(PLAIN, vit(scale, data, **tuned), start="MAE"),
        Variant(GRAYED, vit(scale, data, **tuned | DCT), start="MAE + DCT"),
    ]


def report(records: Records) -> Report:
    name = "DCT graying of a masked autoencoder raises its fine-tuned accuracy"
    paper = PAPER if records.scale == "paper" else None
    size = None if paper is None else round(PAPER[GRAYED] - PAPER[PLAIN], 3)
    claims = [
        compare.accuracy_claim(records, data, name, GRAYED, PLAIN, "higher", paper=size)
        for data in records.datasets
    ]
    losses = [
        {
            "data": run.data,
            "pretraining": run.label,
            "seed": run.seed,
            "state": run.state,
            "test_loss": run.loss,
        }
        for run in records.runs
        if run.role == "start"
    ]
    notes = ["The first block's input is grayed, in pre-training and in fine-tuning alike."]
    return accuracy_report(
        records, claims, baseline=PLAIN, paper=paper, tables={"pretraining": losses}, notes=notes
    )


STUDY = Study(
    title="MAE pre-training with and without graying, then fine-tuning",
    paper="ASA, MAE",
    claim="ViT-B, ImageNet-1k, MAE and fine-tuning: 83.0 without graying, 83.2 with DCT graying.",
    variants=variants,
    report=report,
    decides="ViT-B, 800 epochs of pre-training and 100 of fine-tuning on ImageNet-1k, with more than one "
    "seed: `python -m studies mae --scale paper --data IMAGENET_DIR --launch 'torchrun --nproc-per-node 8'`.",
)
