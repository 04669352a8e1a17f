"""Whether it is conditioning that helps: graying against controls that change something else.

The tokens are 16 patches of 8 x 8 x 3 pixels, so that kappa of what enters the first block can move.

- ``energy``: the embedded tokens of each image times one number, which gives them the Frobenius norm that
  graying gives them. Their spectrum keeps its shape and kappa its value.
- ``ZCA pixels``: images whitened once for the whole set (:mod:`studies.subset`); nothing is done to tokens.
- ``not rescaled``: the paper's literal (s / s_max)^eps, with another scale than graying as it is here.
- ``none`` at three learning rates, the best of them by the validation images. The others have the middle one.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from studies import compare, figures
from studies.measures import conditioning_and_validation
from studies.recipes import brief_vit
from studies.report import accuracy_report
from studies.study import Records, Report, Scale, Study, Variant
from studies.subset import zca_file
from wellposed.stats import Claim, Median

NONE, SPECTRAL, ENERGY, ZCA = "none", "spectral 0.7", "energy of spectral 0.7", "ZCA pixels"
UNSCALED, DCT, CONDITION = "spectral 0.7, not rescaled", "DCT 0.95", "condition"
EDITS: dict[str, dict[str, Any]] = {
    NONE: {},
    SPECTRAL: {"edits": ["gray_tokens eps=0.7"]},
    ENERGY: {"edits": ({"edit": "gray_tokens", "method": "energy", "eps": 0.7},)},
    UNSCALED: {"edits": ({"edit": "gray_tokens", "method": "spectral", "eps": 0.7, "rescale": False},)},
    DCT: {"edits": ["gray_tokens method=dct eps=0.95"]},
    CONDITION: {"edits": ["gray_tokens method=condition"]},
}
RATES = {"none, learning rate 1e-3": 1e-3, "none, learning rate 4e-3": 4e-3}
TUNED = "none, best learning rate"
MARGIN = 0.5
"""Points of accuracy below which two settings count as alike."""


def variants(scale: Scale, data: str) -> list[Variant]:
    made = [Variant(label, brief_vit(scale, data, **fields)) for label, fields in EDITS.items()]
    made += [Variant(label, brief_vit(scale, data, lr=lr)) for label, lr in RATES.items()]
    kind, _, path = data.partition(":")
    if kind == "packed":
        file = zca_file(Path(path))
        made.insert(3, Variant(ZCA, brief_vit(scale, f"packed:{file}")))
    return made


def tuned(records: Records, data: str) -> str | None:
    """The label of ``none`` with the highest validation accuracy, mean over the seeds."""
    return compare.best_by_validation(records, data, [NONE, *RATES])


def kappas(records: Records, data: str, label: str) -> Mapping[int, Median]:
    """Ln kappa of what enters the first block, by seed."""
    found = {run.seed: compare.log_kappa(run, "input", 0) for run in records.of(label, data)}
    return {seed: each for seed, each in found.items() if each is not None}


def claims(records: Records) -> list[Claim]:
    found = []
    for data in records.datasets:
        papers = {SPECTRAL: 0.4, DCT: 0.3, CONDITION: 1.0}
        for label in (SPECTRAL, DCT, CONDITION):
            name = f"{label} raises accuracy"
            paper = papers[label]
            found.append(compare.accuracy_claim(records, data, name, label, NONE, "higher", paper=paper))
        best = tuned(records, data)
        if best is not None:
            name = f"spectral 0.7 beats none at its best learning rate ({best})"
            found.append(compare.accuracy_claim(records, data, name, SPECTRAL, best, "higher"))
        for name, label in (
            ("the gain is of the spectrum, not of the norms", ENERGY),
            ("graying tokens beats whitening pixels", ZCA),
        ):
            found.append(compare.accuracy_claim(records, data, name, SPECTRAL, label, "higher"))
        name = "rescaling makes no difference"
        found.append(compare.accuracy_claim(records, data, name, SPECTRAL, UNSCALED, "same", margin=MARGIN))
        for label in (SPECTRAL, DCT, CONDITION):
            sides = (kappas(records, data, each) for each in (label, NONE))
            contrast = f"{label} - none, {data}, ln kappa into block 0"
            change = compare.kappa_difference(*sides)
            found.append(Claim(f"{label} lowers kappa of what enters", contrast, "lower", change))
    return found


def report(records: Records) -> Report:
    rows = compare.accuracy_table(records, NONE)
    for row in rows:
        runs = records.of(row["variant"], row["data"])
        row |= compare.kappa_ends(runs)
        found = compare.spread(compare.validation(runs).values())
        row["validation"] = found and round(found.mean, 3)
    notes = [
        f"{data}: by validation the best of none is {tuned(records, data)}." for data in records.datasets
    ]
    draw = partial(figures.draw_differences, rows, "variant")
    return accuracy_report(records, claims(records), tables={"table": rows}, notes=notes, draw=draw)


STUDY = Study(
    title="Token Graying against controls: equal norms, whitened pixels, a tuned learning rate",
    paper="beyond (ASA, Tables of accuracy; Conditioned embedded tokens)",
    claim="Graying raises accuracy because it conditions the tokens.",
    variants=variants,
    report=report,
    seeds=tuple(range(8)),
    after=conditioning_and_validation,
    decides="ViT-B with DeiT's recipe, 300 epochs of ImageNet-1k, with the same controls and several seeds.",
)
