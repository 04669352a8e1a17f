"""The papers' analyses on a trained DeiT-Ti, and which edits it takes without training.

    python -m studies pretrained --data packed:IMAGES.npz --set start_from=WEIGHTS.safetensors

The weights are timm's deit_tiny_patch16_224 (class token, ImageNet-1k), the images 224 pixels of its 1,000
classes. Kappa, entropy and bounds are measured on the trained weights and on random ones. Accuracy compares
the model with its edited self, image by image. An edited model is then trained to give the plain model's
outputs (no labels) on one half of the images and tested on the other half.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import kl_div

import wellposed as wp
from studies import compare
from studies.figures import Canvas, over_steps
from studies.study import Records, Report, Scale, Study, Variant
from studies.subset import decoded
from wellposed.records import VERDICTS, Record
from wellposed.stats import Claim, Estimate, median, one_sample, paired, paired_median, spread

MODEL = "deit_tiny_patch16_224"
TRAINED, RANDOM = "trained", "random"
DRAWS = 3
"""Random initialisations, and orders of the images in training."""
MEASURED, BOUNDED, BATCH = 32, 4, 50
DENSE = 0.5
"""Entropy over log n above which attention counts as dense, as in the study ``density``."""
POSITIONS = ("input", "attention.branch", "attention.sum", "ffn.branch", "ffn.sum")

Edit = Callable[[nn.Module], object]
MILD: dict[str, Edit] = {
    "spectral 0.95, embedding": partial(wp.gray_tokens, eps=0.95),
    "spectral 0.9, embedding": partial(wp.gray_tokens, eps=0.9),
    "spectral 0.9, pixels": partial(wp.gray_tokens, eps=0.9, where="pixels"),
    "DCT 0.95, embedding": partial(wp.gray_tokens, method="dct", eps=0.95),
    "DCT 0.95, pixels": partial(wp.gray_tokens, method="dct", eps=0.95, where="pixels"),
    "CB, last block": partial(wp.broadcast_context, blocks=-1),
    "CB_S from the identity": partial(wp.broadcast_context, scaled=True, init="identity"),
}
STRONG: dict[str, Edit] = {
    "spectral 0.7, embedding": partial(wp.gray_tokens, eps=0.7),
    "spectral 0.7, pixels": partial(wp.gray_tokens, eps=0.7, where="pixels"),
    "DCT 0.7, embedding": partial(wp.gray_tokens, method="dct", eps=0.7),
    "DCT 0.7, pixels": partial(wp.gray_tokens, method="dct", eps=0.7, where="pixels"),
    "CB, all blocks": wp.broadcast_context,
}
TUNED = ("spectral 0.7, embedding", "DCT 0.7, embedding", "CB, all blocks")
MARGIN, TUNED_MARGIN = 1.0, 2.0
"""Points of top-1 below which a model counts as unharmed, and as recovered."""
STEPS = (10, 20, 40)
TUNING: dict[str, float] = {"batch": 25, "lr": 1e-4}

Rows = list[dict[str, Any]]


def variants(scale: Scale, data: str) -> list[Variant]:
    """It trains no model from the beginning."""
    return []


def measure(scale: Scale, folder: Path, data: Sequence[str], changes: Mapping[str, Any]) -> Rows:
    """All that the tables need; about half an hour on one core."""
    weights = changes.get("start_from")
    if len(data) != 1 or not data[0].startswith("packed:") or not weights:
        raise ValueError(
            f"expected images and weights of {MODEL}, got data {list(data)} and start_from {weights!r}; "
            "say --data packed:IMAGES.npz --set start_from=WEIGHTS.safetensors."
        )
    images, labels = read_images(Path(data[0].removeprefix("packed:")))
    trained = timm.create_model(MODEL)
    trained.load_state_dict(load_file(str(weights)))
    trained.eval()
    rows = analysed(trained, images, TRAINED, 0)
    for draw in range(DRAWS):
        torch.manual_seed(draw)
        rows += analysed(timm.create_model(MODEL).eval(), images, RANDOM, draw)
    return rows + edited(trained, images, labels) + tuned(trained, images, labels)


def read_images(path: Path) -> tuple[Tensor, Tensor]:
    """The test images as the model takes them, and their labels."""
    with np.load(path) as source:
        pixels = torch.from_numpy(decoded(source, "test")).permute(0, 3, 1, 2).float() / 255
        labels = torch.from_numpy(source["test_labels"].astype(np.int64))
    about = timm.get_pretrained_cfg(MODEL)
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (about.mean, about.std))
    return (pixels - mean) / std, labels


def analysed(model: nn.Module, images: Tensor, weights: str, draw: int) -> Rows:
    """Kappa and entropy image by image, kappa and entropy of the blocks, and the bounds."""
    about = {"weights": weights, "draw": draw}
    found = wp.diagnose(
        model,
        images[:MEASURED],
        what=("conditioning", "density"),
        attention_images=MEASURED,
        progress=False,
    )
    rows: Rows = []
    for position in POSITIONS:
        records = found.select("kappa", position=position)
        rows += [about | row for row in _kappas(position, records)]
    entropies = [each for each in found.select("entropy") if each.head is None]
    samples = np.array([each.samples for each in entropies], dtype=float)
    rows.append(about | {"measure": "entropy of images", "values": samples.mean(0).tolist()})
    rows += [
        about | {"measure": "entropy", "block": each.block, "head": each.head, "value": each.value}
        for each in found.select("entropy")
    ]
    for each in wp.probes.bounds(model, images[:BOUNDED], images_limit=BOUNDED):
        if each.verdicts:
            where = {"measure": each.measure, "block": each.block, "head": each.head}
            margins = [value for value in each.margins if np.isfinite(value)]
            rows.append(about | where | {"verdicts": list(each.verdicts), "margins": margins})
    return rows


def _kappas(position: str, records: Sequence[Record]) -> Iterable[dict[str, Any]]:
    """Ln kappa: of each image the median over the blocks, and of each block the median over the images."""
    values = np.log(np.array([each.samples for each in records], dtype=float))
    bounds = np.zeros(values.shape, dtype=bool)
    for row, each in zip(bounds, records, strict=True):
        row[list(each.at_least)] = True
    of_images = [median(list(values[:, i]), list(bounds[:, i])) for i in range(values.shape[1])]
    yield {
        "measure": "ln kappa of images",
        "position": position,
        "values": [each.value for each in of_images],
        "at_least": [index for index, each in enumerate(of_images) if each.at_least],
    }
    for index, record in enumerate(records):
        found = median(list(values[index]), list(bounds[index]))
        value = {"value": found.value, "at_least": found.at_least}
        yield {"measure": "ln kappa", "position": position, "block": record.block, **value}


@torch.no_grad()
def missed(model: nn.Module, images: Tensor, labels: Tensor) -> list[int]:
    """Indices of the images whose top class is wrong."""
    top = torch.cat([model(piece).argmax(1) for piece in images.split(BATCH)])
    return torch.nonzero(top != labels).flatten().tolist()


def edited(model: nn.Module, images: Tensor, labels: Tensor) -> Rows:
    """What the model and each edited model get wrong, without training."""
    rows: Rows = [{"measure": "missed", "edit": "none", "values": missed(model, images, labels)}]
    for name, edit in (MILD | STRONG).items():
        edit(model)
        rows.append({"measure": "missed", "edit": name, "values": missed(model, images, labels)})
        wp.restore(model)
    for row in rows:
        row["images"] = len(images)
    return rows


def tuned(model: nn.Module, images: Tensor, labels: Tensor) -> Rows:
    """What edited models get wrong on the second half, after steps of training on the first half."""
    half = len(images) // 2
    with torch.no_grad():
        wanted = torch.cat([model(piece) for piece in images[:half].split(BATCH)]).log_softmax(1)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    rows: Rows = []
    for name in TUNED:
        for seed in range(DRAWS):
            STRONG[name](model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=TUNING["lr"])
            order = torch.Generator().manual_seed(seed)
            batches = iter(())
            for step in range(1, STEPS[-1] + 1):
                batch = next(batches, None)
                if batch is None:
                    batches = iter(torch.randperm(half, generator=order).split(int(TUNING["batch"])))
                    batch = next(batches)
                optimizer.zero_grad()
                got = model(images[batch]).log_softmax(1)
                kl_div(got, wanted[batch], log_target=True, reduction="batchmean").backward()
                optimizer.step()
                if step in STEPS:
                    values = missed(model, images[half:], labels[half:])
                    about = {"measure": "missed after training", "edit": name, "seed": seed, "step": step}
                    rows.append(about | {"values": values, "images": len(images) - half})
            wp.restore(model)
            model.load_state_dict(before)
    return rows


def points(row: Mapping[str, Any], first: int = 0) -> dict[int, float]:
    """100 for each image that is classified right, 0 for the others."""
    wrong = set(row["values"])
    return {index: 0.0 if index in wrong else 100.0 for index in range(first, row["images"])}


def kappa_of_images(rows: Rows, weights: str, position: str) -> tuple[dict[int, float], dict[int, bool]]:
    """Ln kappa by image, the median over the draws, and whether it is a lower bound."""
    found = [
        row
        for row in rows
        if (row.get("measure"), row.get("weights"), row.get("position"))
        == ("ln kappa of images", weights, position)
    ]
    values, bounds = {}, {}
    for image in range(min((len(row["values"]) for row in found), default=0)):
        middle = median([row["values"][image] for row in found], [image in row["at_least"] for row in found])
        values[image], bounds[image] = middle.value, middle.at_least
    return values, bounds


def kappa_difference(rows: Rows, weights: str, first: str, second: str) -> Estimate | None:
    """``first - second`` by image; images whose ``second`` is a lower bound say nothing."""
    (a, a_bounds), (b, b_bounds) = (kappa_of_images(rows, weights, each) for each in (first, second))
    known = [image for image in b if not b_bounds[image]]
    if not known:
        return None
    sides = {image: a[image] for image in known}, {image: b[image] for image in known}
    if any(a_bounds[image] for image in known):
        return paired_median(*sides, {image: a_bounds[image] for image in known})
    return paired(*sides)


def claims(rows: Rows) -> list[Claim]:
    found = []
    for weights in (TRAINED, RANDOM):
        for name, second in (
            ("attention's output is worse conditioned than the FFN's", "ffn.branch"),
            ("attention's output is worse conditioned than its sum with the skip", "attention.sum"),
        ):
            change = kappa_difference(rows, weights, "attention.branch", second)
            contrast = f"attention.branch - {second}, {weights} weights, ln kappa by image"
            found.append(Claim(f"{name}: {weights} weights", contrast, "higher", change))
    dense = [row for row in rows if row["measure"] == "entropy of images" and row["weights"] == TRAINED]
    entropy = one_sample([value - DENSE for row in dense for value in row["values"]]) if dense else None
    contrast = f"entropy over log n - {DENSE:g}, by image"
    found.append(Claim("trained attention is dense", contrast, "higher", entropy))
    return found + accuracy_claims(rows)


def accuracy_claims(rows: Rows) -> list[Claim]:
    """Mild edits leave the model as it was, strong ones do not, and brief training repairs it."""
    top = {row["edit"]: row for row in rows if row["measure"] == "missed"}
    if not top:
        return []
    plain, found = points(top["none"]), []
    for name, row in top.items():
        contrast = f"{name} - none, points of top-1 by image, without training"
        change = None if name == "none" else paired(points(row), plain)
        if name in MILD:
            found.append(Claim(f"a trained model takes {name}", contrast, "same", change, margin=MARGIN))
        elif name in STRONG:
            found.append(Claim(f"{name} costs accuracy without training", contrast, "lower", change))
    last = [row for row in rows if row["measure"] == "missed after training" and row["step"] == STEPS[-1]]
    for name in TUNED:
        change = over_seeds([row for row in last if row["edit"] == name], plain)
        contrast = f"{name} - none, points of top-1 by image, after {STEPS[-1]} steps"
        found.append(Claim(f"brief training repairs {name}", contrast, "same", change, margin=TUNED_MARGIN))
    return found


def over_seeds(rows: Rows, plain: Mapping[int, float]) -> Estimate | None:
    """Of the mean over the seeds minus the plain model's, on the images of the second half."""
    if not rows:
        return None
    sides = [points(row) for row in rows]
    half = len(plain) - rows[0]["images"]
    mean = {half + index: statistics.fmean(side[index] for side in sides) for index in sides[0]}
    return paired(mean, plain)


def position_table(rows: Rows) -> list[dict[str, Any]]:
    """A row a position: the median over images of ln kappa, trained and random."""
    made = []
    for position in POSITIONS:
        row: dict[str, Any] = {"position": position}
        for weights in (TRAINED, RANDOM):
            values, bounds = kappa_of_images(rows, weights, position)
            found = median(list(values.values()), list(bounds.values())) if values else None
            row[f"ln_kappa_{weights}"] = found and round(found.value, 2)
            row[f"{weights}_at_least"] = found and found.at_least
        made.append(row)
    return made


def edit_table(rows: Rows) -> list[dict[str, Any]]:
    """A row an edit: top-1 without training, and after steps of it."""
    top = {row["edit"]: row for row in rows if row["measure"] == "missed"}
    if not top:
        return []
    plain, made = points(top["none"]), []
    for name, each in top.items():
        own = points(each)
        row: dict[str, Any] = {"edit": name, "images": len(own)}
        row["top1"] = round(statistics.fmean(own.values()), 2)
        row |= compare.in_columns(None if name == "none" else paired(own, plain), 2)
        for step in STEPS:
            tuned_rows = [
                other
                for other in rows
                if other["measure"] == "missed after training"
                and (other["edit"], other["step"]) == (name, step)
            ]
            change = over_seeds(tuned_rows, plain)
            row[f"difference_after_{step}"] = change and round(change.mean, 2)
        made.append(row)
    return made


def bounds_table(rows: Rows) -> list[dict[str, Any]]:
    """How often each bound holds: whole blocks and single heads, trained and random."""
    counts: dict[tuple[str, str, str], list[Any]] = {}
    for row in rows:
        if "verdicts" in row:
            level = "block" if row["head"] is None else "head"
            counts.setdefault((row["weights"], row["measure"], level), []).append(row)
    made = []
    for (weights, name, level), found in counts.items():
        totals = np.sum([row["verdicts"] for row in found], axis=0)
        smallest = min((value for row in found for value in row["margins"]), default=None)
        line: dict[str, Any] = {"weights": weights, "bound": name, "of": level}
        line |= {verdict: int(total) for verdict, total in zip(VERDICTS, totals, strict=True)}
        made.append(line | {"smallest_margin": smallest and float(f"{smallest:.3g}")})
    return made


def head_table(rows: Rows) -> list[dict[str, Any]]:
    """Entropy over log n of each block, and of its heads, trained."""
    made = []
    found = [row for row in rows if row["measure"] == "entropy" and row["weights"] == TRAINED]
    for block in sorted({row["block"] for row in found}):
        of_block = {row["head"]: row["value"] for row in found if row["block"] == block}
        heads = [value for head, value in sorted(of_block.items(), key=str) if head is not None]
        row = {"block": block, "entropy": round(of_block[None], 3)}
        made.append(row | {"lowest_head": round(min(heads), 3), "highest_head": round(max(heads), 3)})
    return made


def report(records: Records) -> Report:
    rows = [dict(row) for row in records.measured]
    tables = {
        "table": position_table(rows),
        "edits": edit_table(rows),
        "bounds": bounds_table(rows),
        "heads": head_table(rows),
    }
    notes = [
        "The images may be of the model's own training set: accuracy compares it with its edited self only.",
        "Images are the sample of the intervals: they hold for this model, not for others.",
    ]
    return Report(tables, claims(rows), partial(draw, tables, rows), notes)


def draw(tables: Mapping[str, Sequence[Mapping[str, Any]]], rows: Rows, path: Path) -> None:
    """Kappa by block, entropy by block, top-1 without training, and how fast training repairs it."""
    canvas = Canvas(2, 2)
    kappa, entropy, top, repaired = canvas.plots
    for index, position in enumerate(("input", "attention.branch", "ffn.branch")):
        for weights, style in ((TRAINED, "-"), (RANDOM, ":")):
            line = [
                (row["block"], row["value"])
                for row in rows
                if row["measure"] == "ln kappa"
                and (row["position"], row["weights"], row["draw"]) == (position, weights, 0)
            ]
            label = f"{position}, {weights}"
            kappa.plot(*zip(*line, strict=True), style, color=f"C{index}", marker="o", ms=3, label=label)
    kappa.set(title="ln kappa (lower bounds near 16)", xlabel="block", ylabel="ln kappa")
    heads = tables["heads"]
    blocks = [row["block"] for row in heads]
    entropy.plot(blocks, [row["entropy"] for row in heads], marker="o", ms=3, label="mean of the heads")
    ends = ([row[name] for row in heads] for name in ("lowest_head", "highest_head"))
    entropy.fill_between(blocks, *ends, alpha=0.2, linewidth=0, label="lowest to highest head")
    entropy.set(title="entropy of attention, trained", xlabel="block", ylabel="of its maximum", ylim=(0, 1))
    edits = [row for row in tables["edits"] if row["edit"] != "none"]
    for place, row in enumerate(edits):
        known = None not in (row["low"], row["high"])
        error = [[row["difference"] - row["low"]], [row["high"] - row["difference"]]] if known else None
        top.errorbar([row["difference"]], [place], xerr=error, fmt="o", color="C0", capsize=2)
    top.axvline(0, color="black", linewidth=0.8)
    top.set_yticks(range(len(edits)), [row["edit"] for row in edits], fontsize=8)
    top.set(title="top-1 without training", xlabel="points, edited - plain [95%]")
    lines: dict[str, dict[float, Any]] = {}
    for row in edits:
        after = {step: row[f"difference_after_{step}"] for step in STEPS}
        if all(value is not None for value in after.values()):
            lines[row["edit"]] = {
                0: spread([row["difference"]]),
                **{step: spread([value]) for step, value in after.items()},
            }
    over_steps(repaired, lines)
    repaired.axhline(0, color="black", linewidth=0.8)
    repaired.set(title="top-1 after brief training", xlabel="steps of 25 images", ylabel="points - plain")
    canvas.save(path)


STUDY = Study(
    title="A trained DeiT-Ti: its conditioning, its attention, its bounds, and the edits it takes",
    paper="ASA section 3 and 4, CB analysis",
    claim="Kappa of attention's output is near e^6, of the FFN's near e^3; trained attention is dense.",
    variants=variants,
    report=report,
    once=measure,
    decides="Further trained models: the command takes any weights of deit_tiny_patch16_224.",
)
