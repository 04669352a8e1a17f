"""The main result of "Scratching Visual Transformer's Back": Context Broadcasting, plain and with scales.

CB adds the mean token at the end of each MLP; attention need then not make it, and becomes less dense.
"""

from functools import partial
from pathlib import Path
from typing import Any

from studies import compare, figures
from studies.measures import conditioning_and_density
from studies.recipes import vit
from studies.study import Records, Report, Scale, Study, Variant
from wellposed.stats import Claim

NONE, CB, CB_S = "none", "CB", "CB_S"
EDITS: dict[str, dict[str, Any]] = {
    NONE: {},
    CB: {"edits": ["broadcast_context"]},
    CB_S: {"edits": ["broadcast_context scaled=true"]},
}
SIZES = {"ViT-Ti": "vit_tiny_patch16_224", "ViT-S": "vit_small_patch16_224", "ViT-B": "vit_base_patch16_224"}


def variants(scale: Scale, data: str) -> list[Variant]:
    if scale == "small":
        return [Variant(label, vit(scale, data, **fields)) for label, fields in EDITS.items()]
    return [
        Variant(f"{size}, {label}", vit(scale, data, model=model, **fields))
        for size, model in SIZES.items()
        for label, fields in EDITS.items()
    ]


def claims(records: Records) -> list[Claim]:
    found = []
    for data in records.datasets:
        differs = compare.pooling(records, data)
        for size in dict.fromkeys(label.rpartition(", ")[0] for label in records.labels):
            none, cb, cb_s = (f"{size}, {edit}" if size else edit for edit in (NONE, CB, CB_S))
            for name, label in (("CB raises accuracy", cb), ("CB_S raises accuracy", cb_s)):
                found.append(
                    compare.accuracy_claim(records, data, name, label, none, "higher", differs=differs)
                )
            sides = (compare.mean_entropy(records.of(label, data)) for label in (cb, none))
            contrast = f"{cb} - {none}, {data}, entropy over log n"
            apart = compare.difference(*sides)
            found.append(Claim("CB makes attention sparser", contrast, "lower", apart, differs=differs))
    return found


def entropy_table(records: Records) -> list[dict[str, Any]]:
    """One row a variant, block and head."""
    rows = []
    for data in records.datasets:
        for label in records.labels:
            heads = [compare.entropies(run) for run in records.of(label, data)]
            for block, head in sorted({place for each in heads for place in each}):
                found = compare.spread(each.get((block, head)) for each in heads)
                if found is not None:
                    deviation = None if found.deviation is None else round(found.deviation, 5)
                    rows.append(
                        {
                            "data": data,
                            "variant": label,
                            "block": block,
                            "head": head,
                            "entropy": round(found.mean, 5),
                            "deviation": deviation,
                            "n": found.n,
                        }
                    )
    return rows


def report(records: Records) -> Report:
    rows = compare.accuracy_table(records, NONE if NONE in records.labels else None)
    for row in rows:
        found = compare.spread(compare.mean_entropy(records.of(row["variant"], row["data"])).values())
        row["entropy"] = None if found is None else round(found.mean, 4)
        row["entropy_deviation"] = found and found.deviation and round(found.deviation, 4)
    tables = {"table": rows, "entropy": entropy_table(records), "grid": compare.grid_table(records)}
    return Report(tables, claims(records), partial(draw, records))


def draw(records: Records, path: Path) -> None:
    """A row a data set: accuracy, and the entropy of attention block by block."""
    canvas = figures.Canvas(2, max(1, len(records.datasets)))
    for row, data in enumerate(records.datasets):
        mean, entropy = canvas.plots[2 * row : 2 * row + 2]
        figures.draw_means(mean, records, data)
        lines: dict[str, dict[float, compare.Spread | None]] = {}
        for label in records.labels:
            by_block = [compare.block_entropies(run) for run in records.of(label, data)]
            lines[label] = {
                block: compare.spread(each.get(block) for each in by_block)
                for block in sorted({block for each in by_block for block in each})
            }
        figures.over_steps(entropy, lines)
        entropy.set(title=f"{data}: entropy of attention", xlabel="block", ylabel="of its maximum")
    canvas.save(path)


STUDY = Study(
    title="Context Broadcasting, plain and scaled: accuracy, and entropy of each head",
    paper="CB, main table",
    claim="CB and CB_S are more accurate than none, and the entropy of the attention maps falls.",
    variants=variants,
    report=report,
    seeds=tuple(range(8)),
    after=conditioning_and_density,
    decides="DeiT's models and recipe, 300 epochs of ImageNet-1k: `python -m studies context-broadcasting "
    "--scale paper --data IMAGENET_DIR --launch 'torchrun --nproc-per-node 8'`.",
)
