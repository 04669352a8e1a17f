"""Where Context Broadcasting goes in: after attention, or at the front, middle or end of the MLP.

Next to it the other way to the mean of all tokens: a uniform head in place of a learned one, in every block.
"""

from typing import Any

from studies import compare
from studies.recipes import vit
from studies.report import accuracy_report
from studies.study import Records, Report, Scale, Study, Variant
from wellposed.stats import Claim

NONE, END, AFTER_ATTENTION = "none", "MLP, end", "attention, end"
UNIFORM = "uniform head"
PLACES = {
    AFTER_ATTENTION: "attention.end",
    "MLP, front": "mlp.start",
    "MLP, middle": "mlp.middle",
    END: "mlp.end",
}


def variants(scale: Scale, data: str) -> list[Variant]:
    model = {"model": "vit_small_patch16_224"} if scale == "paper" else {}
    fields = {label: {"edits": [f"broadcast_context where={place}"]} for label, place in PLACES.items()}
    edits: dict[str, dict[str, Any]] = {NONE: {}, **fields, UNIFORM: {"edits": ["uniform_heads"]}}
    return [Variant(label, vit(scale, data, **model, **edit)) for label, edit in edits.items()]


def claims(records: Records) -> list[Claim]:
    found = []
    for data in records.datasets:
        differs = compare.pooling(records, data)
        for name, other in (
            ("CB at the end of the MLP raises accuracy", NONE),
            ("CB belongs into the MLP rather than after attention", AFTER_ATTENTION),
        ):
            found.append(compare.accuracy_claim(records, data, name, END, other, "higher", differs=differs))
    return found


def report(records: Records) -> Report:
    notes = [
        f"{UNIFORM}: the first head of every block takes the mean of the values, without broadcasting; no "
        "claim is about it."
    ]
    return accuracy_report(records, claims(records), baseline=NONE, notes=notes)


STUDY = Study(
    title="Context Broadcasting after attention, or at the front, middle or end of the MLP; a uniform head",
    paper="CB, ablation",
    claim="CB belongs into the MLP, at its end, rather than into attention.",
    variants=variants,
    report=report,
    decides="DeiT-S and its recipe, 300 epochs of ImageNet-1k: `python -m studies cb-position --scale paper "
    "--data IMAGENET_DIR --launch 'torchrun --nproc-per-node 8'`.",
)
