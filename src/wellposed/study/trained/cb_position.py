"""Where Context Broadcasting goes in: after attention, or at the front, middle or end of the MLP.

Beside it the other way to the mean of all tokens: a uniform head in place of a learned one, in every block.
"""

from wellposed.study import compare
from wellposed.study.plan import Cell, Scale, Study, StudyRecords, StudyReport
from wellposed.study.trained.bases import vit
from wellposed.study.trained.reports import accuracy_report
from wellposed.train.recipe import Recipe

NONE = "none"
UNIFORM = "uniform head"
PLACES = {
    "attention, end": "attention.end",
    "MLP, front": "mlp.start",
    "MLP, middle": "mlp.middle",
    "MLP, end": "mlp.end",
}


def cells(scale: Scale) -> list[Cell]:
    places = [Cell(label, {"broadcast": "cb", "broadcast_where": place}) for label, place in PLACES.items()]
    return [Cell(NONE), *places, Cell(UNIFORM, {"uniform_heads": 1})]


def base(scale: Scale, data: str) -> Recipe:
    if scale == "paper":
        return vit(scale, data, model="vit_small_patch16_224")
    return vit(scale, data)


def report(records: StudyRecords) -> StudyReport:
    claims = []
    for data in records.datasets:
        claims += [
            compare.accuracy_claim(records, data, "MLP, end", NONE, "higher"),
            compare.accuracy_claim(records, data, "MLP, end", "attention, end", "higher"),
        ]
    notes = [
        f"{UNIFORM}: the first head of every block takes the mean of the values, without broadcasting; it "
        "stands beside the positions and has no part in the verdict."
    ]
    return accuracy_report(records, claims, baseline=NONE, notes=notes)


STUDY = Study(
    name="cb-position",
    title="Context Broadcasting after attention, or at the front, middle or end of the MLP; a uniform head",
    paper="CB ablation",
    claim="CB belongs into the MLP, at its end, rather than into attention.",
    cells=cells,
    base=base,
    report=report,
)
