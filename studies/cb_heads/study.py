"""Context Broadcasting with a class token, as its paper has it, and with mean pooling.

CB maps an MLP's output m + d to m + d/2. With mean pooling that cannot change the logits in the last block,
while a class token gets the mean by a new path there. ``context-broadcasting`` had mean-pooled models of
natural images; here both heads have the same recipe and seeds.
"""

from functools import partial
from pathlib import Path
from typing import Any

from studies import compare, figures
from studies.compare import accuracies
from studies.context_broadcasting.study import CB, CB_S, EDITS, NONE, entropy_table
from studies.measures import everything
from studies.recipes import HEADS, brief_vit
from studies.study import Records, Report, Scale, Study, Variant
from wellposed.stats import Claim

TOKEN, POOL = HEADS


def label(head: str, edit: str) -> str:
    return f"{head}, {edit}"


def variants(scale: Scale, data: str) -> list[Variant]:
    return [
        Variant(label(head, edit), brief_vit(scale, data, head=head, **fields))
        for head in HEADS
        for edit, fields in EDITS.items()
    ]


def gain(records: Records, data: str, head: str) -> dict[int, float]:
    """Points that CB adds, by seed."""
    sides = [accuracies(records.of(label(head, edit), data)) for edit in (CB, NONE)]
    return {seed: sides[0][seed] - sides[1][seed] for seed in sides[0].keys() & sides[1].keys()}


def claims(records: Records) -> list[Claim]:
    """The paper's, with a class token; and what pooling changes."""
    found = []
    for data in records.datasets:
        none, cb, cb_s = (label(TOKEN, edit) for edit in (NONE, CB, CB_S))
        for name, each in (("CB raises accuracy", cb), ("CB_S raises accuracy", cb_s)):
            found.append(compare.accuracy_claim(records, data, name, each, none, "higher"))
        sides = (compare.mean_entropy(records.of(each, data)) for each in (cb, none))
        contrast = f"{cb} - {none}, {data}, entropy over log n"
        change = compare.difference(*sides)
        found.append(Claim("CB makes attention sparser", contrast, "lower", change))
        none, cb = (label(POOL, edit) for edit in (NONE, CB))
        name = "CB raises accuracy with mean pooling"
        found.append(compare.accuracy_claim(records, data, name, cb, none, "higher", differs=compare.POOLED))
        both = (gain(records, data, head) for head in (TOKEN, POOL))
        contrast = f"gain with {TOKEN} - gain with {POOL}, {data}, {compare.ACCURACY}"
        change = compare.difference(*both)
        found.append(Claim("CB gains more with a class token", contrast, "higher", change))
        for group in compare.ROBUST:
            found.append(compare.robust_claim(records, data, group, label(TOKEN, CB), label(TOKEN, NONE)))
    return found


def report(records: Records) -> Report:
    rows = compare.accuracy_table(records)
    for row in rows:
        runs = records.of(row["variant"], row["data"])
        none = label(row["variant"].rpartition(", ")[0], NONE)
        change = compare.difference(accuracies(runs), accuracies(records.of(none, row["data"])))
        row |= compare.in_columns(None if row["variant"] == none else change)
        found = compare.spread(compare.mean_entropy(runs).values())
        row["entropy"] = found and round(found.mean, 4)
        row |= compare.robust_columns(runs)
    tables = {"table": rows, "entropy": entropy_table(records), "grid": compare.grid_table(records)}
    return Report(tables, claims(records), partial(draw, records))


def draw(records: Records, path: Path) -> None:
    """A row a data set: accuracy, and the entropy of attention block by block."""
    canvas = figures.Canvas(2, max(1, len(records.datasets)))
    for row, data in enumerate(records.datasets):
        mean, entropy = canvas.plots[2 * row : 2 * row + 2]
        figures.draw_means(mean, records, data)
        lines: dict[str, dict[float, Any]] = {}
        for each in records.labels:
            by_block = [compare.block_entropies(run) for run in records.of(each, data)]
            blocks = sorted({block for one in by_block for block in one})
            lines[each] = {block: compare.spread(one.get(block) for one in by_block) for block in blocks}
        figures.over_steps(entropy, lines)
        entropy.set(title=f"{data}: entropy of attention", xlabel="block", ylabel="of its maximum")
    canvas.save(path)


STUDY = Study(
    title="Context Broadcasting with a class token and with mean pooling",
    paper="CB, main table",
    claim="CB and CB_S are more accurate than none, attention's entropy falls, and the model is more robust.",
    variants=variants,
    report=report,
    seeds=tuple(range(8)),
    after=everything,
    decides="DeiT's models and recipe, 300 epochs of ImageNet-1k: `python -m studies context-broadcasting "
    "--scale paper --data IMAGENET_DIR --launch 'torchrun --nproc-per-node 8'`.",
)
