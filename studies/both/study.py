"""Beyond both papers: do Token Graying and Context Broadcasting add?"""

from typing import Any

from studies import compare
from studies.measures import conditioning_and_density
from studies.recipes import vit
from studies.report import accuracy_report
from studies.study import Records, Report, Scale, Study, Variant
from wellposed.stats import Claim, one_sample

NONE, CB = "none", "CB"
GRAYINGS = {"spectral": "gray_tokens eps=0.7", "DCT": "gray_tokens method=dct eps=0.95"}
BROADCASTING = "broadcast_context"


def with_cb(name: str) -> str:
    return f"{name} + CB"


def variants(scale: Scale, data: str) -> list[Variant]:
    made = [Variant(NONE, vit(scale, data)), Variant(CB, vit(scale, data, edits=[BROADCASTING]))]
    for name, graying in GRAYINGS.items():
        made += [
            Variant(name, vit(scale, data, edits=[graying])),
            Variant(with_cb(name), vit(scale, data, edits=[graying, BROADCASTING])),
        ]
    return made


def additions(records: Records) -> list[dict[str, Any]]:
    """The gain of both compared with the sum of the gains of each."""
    rows = []
    for data in records.datasets:
        values = {label: compare.accuracies(records.of(label, data)) for label in records.labels}
        for name in GRAYINGS:
            row: dict[str, Any] = {"data": data, "graying": name}
            for column, label in (("gain", name), ("gain_cb", CB), ("gain_both", with_cb(name))):
                gain = compare.difference(values.get(label, {}), values.get(NONE, {}))
                row[column] = None if gain is None else round(gain.mean, 3)
            sides = [values.get(each, {}) for each in (with_cb(name), name, CB, NONE)]
            # By seed, what both give beyond the sum of each: 0 is adding up.
            beyond = [
                both - gray - cb + none
                for both, gray, cb, none in (
                    [side[seed] for side in sides] for seed in sorted(set.intersection(*map(set, sides)))
                )
            ]
            found = compare.in_columns(one_sample(beyond) if beyond else None)
            rows.append(row | {"beyond_sum": found.pop("difference"), **found})
    return rows


def claims(records: Records) -> list[Claim]:
    found = []
    for data in records.datasets:
        pooled = ", mean-pooled" if compare.pooling(records, data) else ""
        for name in GRAYINGS:
            for alone in (name, CB):
                said = f"{name} graying and CB beat {alone if alone == CB else 'graying'} alone{pooled}"
                found.append(compare.accuracy_claim(records, data, said, with_cb(name), alone, "higher"))
    return found


def report(records: Records) -> Report:
    notes = ["The claims are questions of ours: no paper has both together."]
    tables = {"additions": additions(records)}
    return accuracy_report(records, claims(records), baseline=NONE, tables=tables, notes=notes)


STUDY = Study(
    title="graying, CB, and both together: do they add?",
    paper="beyond",
    claim="Question: is a ViT with graying and CB better than with either alone?",
    variants=variants,
    report=report,
    after=conditioning_and_density,
    decides="Models with a class token, as the papers have, and more seeds: on all sets but the digits the "
    "models are mean-pooled, where CB in the last block changes nothing.",
)
