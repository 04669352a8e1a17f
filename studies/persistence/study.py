"""Whether the gain of graying lasts: the same model trained for one and for four times as long."""

from functools import partial

from studies import compare, figures
from studies.compare import accuracies
from studies.graying_controls.study import CONDITION, DCT, EDITS, NONE, SPECTRAL
from studies.measures import conditioning_and_validation
from studies.recipes import BRIEF, brief_vit
from studies.report import accuracy_report
from studies.study import Records, Report, Scale, Study, Variant
from wellposed.stats import Claim

LABELS = (NONE, SPECTRAL, DCT, CONDITION)
TIMES = (1, 4)
PAPER_EPOCHS = 75


def label(name: str, times: int) -> str:
    return f"{name}, {times} x"


def variants(scale: Scale, data: str) -> list[Variant]:
    made = []
    for times in TIMES:
        for name in LABELS:
            epochs = times * (PAPER_EPOCHS if scale == "paper" else BRIEF["epochs"])
            fields = EDITS[name] | {"epochs": epochs, "eval_every": epochs // times}
            made.append(Variant(label(name, times), brief_vit(scale, data, **fields)))
    return made


def gain(records: Records, data: str, name: str, times: int) -> dict[int, float]:
    """Points above none by seed."""
    sides = [accuracies(records.of(label(each, times), data)) for each in (name, NONE)]
    return {seed: sides[0][seed] - sides[1][seed] for seed in sides[0].keys() & sides[1].keys()}


def claims(records: Records) -> list[Claim]:
    found = []
    for data in records.datasets:
        for name in LABELS[1:]:
            longest, shortest = (gain(records, data, name, times) for times in (TIMES[-1], TIMES[0]))
            claim = compare.accuracy_claim(
                records,
                data,
                f"{name} still raises accuracy after {TIMES[-1]} times the training",
                label(name, TIMES[-1]),
                label(NONE, TIMES[-1]),
                "higher",
            )
            contrast = f"gain after {TIMES[-1]} x - gain after 1 x, {name}, {data}, {compare.ACCURACY}"
            shrinks = compare.difference(longest, shortest)
            found += [claim, Claim(f"the gain of {name} shrinks", contrast, "lower", shrinks)]
    return found


def report(records: Records) -> Report:
    rows = compare.accuracy_table(records)
    for row in rows:
        runs = records.of(row["variant"], row["data"])
        none = label(NONE, int(row["variant"].split(" ")[-2]))
        change = compare.difference(accuracies(runs), accuracies(records.of(none, row["data"])))
        row |= compare.in_columns(None if row["variant"] == none else change)
        row |= compare.kappa_ends(runs)
    draw = partial(figures.draw_differences, rows, "variant")
    return accuracy_report(records, claims(records), tables={"table": rows}, draw=draw)


STUDY = Study(
    title="Whether the gain of graying lasts over four times the training",
    paper="beyond (ASA trains for 300 epochs)",
    claim="The paper's gains are there after 300 epochs of ImageNet-1k.",
    variants=variants,
    report=report,
    seeds=tuple(range(4)),
    after=conditioning_and_validation,
    decides="`python -m studies persistence --scale paper --data IMAGENET_DIR`: 75 and 300 epochs.",
)
