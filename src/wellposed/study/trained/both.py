"""Beyond both papers: do Token Graying and Context Broadcasting add?"""

from typing import Any

from wellposed.study import compare
from wellposed.study.plan import Cell, Scale, Study, StudyRecords, StudyReport
from wellposed.study.trained.after import conditioning_and_density
from wellposed.study.trained.bases import vit
from wellposed.study.trained.reports import accuracy_report
from wellposed.train.recipe import Recipe

NONE, CB = "none", "CB"
GRAYINGS: dict[str, dict[str, Any]] = {
    "spectral": {"graying": "spectral", "eps": 0.7},
    "DCT": {"graying": "dct", "eps": 0.95},
}


def cells(scale: Scale) -> list[Cell]:
    broadcast = {"broadcast": "cb"}
    made = [Cell(NONE), Cell(CB, broadcast)]
    for name, fields in GRAYINGS.items():
        made += [Cell(name, fields), Cell(f"{name} + CB", {**fields, **broadcast})]
    return made


def base(scale: Scale, data: str) -> Recipe:
    return vit(scale, data)


def additions(records: StudyRecords) -> list[dict[str, Any]]:
    """The gain of both beside the sum of the gains of each."""
    rows = []
    for data in records.datasets:
        values = {label: compare.accuracies(records.of(label, data)) for label in records.labels}
        for name in GRAYINGS:
            row: dict[str, Any] = {"data": data, "graying": name}
            for column, label in (("gain", name), ("gain_cb", CB), ("gain_both", f"{name} + CB")):
                gain = compare.difference(values.get(label, {}), values.get(NONE, {}))
                row[column] = None if gain is None else round(gain.mean, 3)
            shared = set.intersection(
                *(set(values.get(each, {})) for each in (NONE, CB, name, f"{name} + CB"))
            )
            # By seed, what both give beyond the sum of each: 0 is adding up.
            beyond = compare.spread(
                values[f"{name} + CB"][seed] - values[name][seed] - values[CB][seed] + values[NONE][seed]
                for seed in sorted(shared)
            )
            row["beyond_sum"] = None if beyond is None else round(beyond.mean, 3)
            row["deviation"] = beyond and beyond.deviation and round(beyond.deviation, 3)
            rows.append(row)
    return rows


def report(records: StudyRecords) -> StudyReport:
    claims = [
        compare.accuracy_claim(records, data, f"{name} + CB", alone, "higher")
        for data in records.datasets
        for name in GRAYINGS
        for alone in (name, CB)
    ]
    notes = ["The verdict is on the question, as no paper answers it: both together above each alone."]
    return accuracy_report(
        records, claims, baseline=NONE, tables={"additions": additions(records)}, notes=notes
    )


STUDY = Study(
    name="both",
    title="graying, CB, and both together: do they add?",
    paper="beyond",
    claim="Question: is a ViT with graying and CB better than with either alone?",
    cells=cells,
    base=base,
    report=report,
    after=conditioning_and_density,
)
