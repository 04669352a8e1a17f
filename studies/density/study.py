"""How dense trained attention is, and where the softmax is steep (CB, analysis).

The Jacobian of a softmax row p is J = diag(p) - p p^T. Its nuclear norm, the trace 1 - |p|^2, is largest
where p is uniform over all n keys. Its Frobenius norm is about 1 / sqrt(n) there, and largest, 1 / 2, where
two keys share the row. So whether dense attention is the steepest depends on the norm; the study has both.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from studies import compare
from studies.density.softmax_rows import NORMS, attention_rows
from studies.figures import Canvas
from studies.measures import measured_row, moment_row
from studies.recipes import measured_vit
from studies.study import Records, Report, Scale, Study, Variant
from wellposed.probes import diagnose
from wellposed.stats import Claim
from wellposed.study_records import RunRecord
from wellposed.train import open_run

LABEL = "plain"
DENSE = 0.5
"""Entropy over log n above which attention counts as dense: it weighs more than sqrt(n) keys."""
IMAGES = 16

_MEASURES = ("entropy", "softmax jacobian trace", "softmax jacobian frobenius")
_WORDS = {"trace": "nuclear norm (trace)", "frobenius": "Frobenius norm"}


def variants(scale: Scale, data: str) -> list[Variant]:
    return [Variant(LABEL, measured_vit(scale, data))]


def density_of_run(folder: Path) -> list[dict[str, Any]]:
    """Density per block and head before and after training, and single rows of attention after it."""
    run = open_run(folder, IMAGES)
    last = run.moment("last")
    rows = []
    for moment in (run.moment("initial"), last):
        found = diagnose(
            run.model(moment), run.images, what="density", attention_images=len(run.images), progress=False
        )
        rows += [measured_row(record, moment) for measure in _MEASURES for record in found.select(measure)]
    where = {**moment_row(last), "images": len(run.images)}
    return rows + [where | row for row in attention_rows(run.model(last), run.images)]


def claims(records: Records) -> list[Claim]:
    found = []
    for data in records.datasets:
        runs = records.of(LABEL, data)
        entropy = {run.seed: compare.entropies(run) for run in runs}
        means = {seed: statistics.fmean(heads.values()) for seed, heads in entropy.items() if heads}
        apart = compare.difference(means, dict.fromkeys(means, DENSE))
        contrast = f"mean over the heads - {DENSE:g}, {data}, entropy over log n"
        found.append(Claim("trained attention is dense", contrast, "higher", apart))
        for norm, words in _WORDS.items():
            together = {
                run.seed: row["value"]
                for run in runs
                for row in _rows(run, "softmax correlation")
                if row["norm"] == norm and row["value"] is not None
            }
            name = f"denser rows have a steeper softmax by the {words}"
            contrast = f"rank correlation of entropy and norm, {data}"
            zero = dict.fromkeys(together, 0.0)
            found.append(Claim(name, contrast, "higher", compare.difference(together, zero)))
    return found


def report(records: Records) -> Report:
    return Report(
        tables={"table": [row for data in records.datasets for row in _table(records, data)]},
        claims=claims(records),
        draw=partial(_draw, records),
        notes=(
            *_notes(records),
            "How the norms go with entropy is a property of the softmax, not of training: random scores give "
            "nearly the same curve.",
        ),
    )


def _notes(records: Records) -> Iterator[str]:
    """Density may be what training left of the initialisation, rather than what it made."""
    for data in records.datasets:
        runs = records.of(LABEL, data)
        before, after = (
            _mean(value for run in runs for value in compare.entropies(run, weights).values())
            for weights in ("initial", "last")
        )
        if before is not None and after is not None:
            yield f"{data}: training takes the mean entropy over log n from {before:.3f} to {after:.3f}."


def _table(records: Records, data: str) -> Iterator[dict[str, Any]]:
    runs = records.of(LABEL, data)
    blocks = sorted({block for run in runs for block, _ in compare.entropies(run)})
    for block in blocks:

        def heads(run: RunRecord, weights: str = "last", block: int = block) -> list[float]:
            return [value for (at, _), value in compare.entropies(run, weights).items() if at == block]

        before, after = (
            compare.spread(_mean(heads(run, weights)) for run in runs) for weights in ("initial", "last")
        )
        of_all = [value for run in runs for value in heads(run)]
        line: dict[str, Any] = {"data": data, "block": block, "seeds": len(runs)}
        line["entropy, start"] = _round(before.mean if before else None)
        line["entropy"] = _round(after.mean if after else None)
        line["deviation"] = _round(after.deviation if after else None)
        line |= {"lowest head": _round(min(of_all)), "highest head": _round(max(of_all))}
        for norm in NORMS:
            values = [
                row["value"]
                for run in runs
                for row in _rows(run, f"softmax jacobian {norm}")
                if row["weights"] == "last" and row.get("block") == block and row.get("head") is None
            ]
            line[f"softmax Jacobian, {norm}"] = _round(_mean(values))
        yield line


def _rows(run: RunRecord, measure: str) -> list[Mapping[str, Any]]:
    return [row for row in run.measured if row["measure"] == measure]


def _draw(records: Records, path: Path) -> None:
    canvas = Canvas(1 + len(NORMS), max(1, len(records.datasets)))
    plots = iter(canvas.plots)
    for data in records.datasets:
        runs = records.of(LABEL, data)
        _draw_heads(next(plots), runs, data)
        for norm, words in _WORDS.items():
            plot = next(plots)
            _draw_rows(canvas, plot, runs, norm)
            plot.set_title(f"{data}: softmax Jacobian, {words}", fontsize=9)
            plot.set(xlabel="entropy / log n", xlim=(-0.02, 1.02))
    canvas.save(path)


def _draw_heads(plot: Any, runs: Sequence[RunRecord], data: str) -> None:
    for weights, color, label in (("initial", "0.6", "initial"), ("last", "C0", "trained")):
        points = [point for run in runs for point in compare.entropies(run, weights).items()]
        if not points:
            continue
        plot.scatter([b for (b, _), _ in points], [v for _, v in points], s=12, color=color, alpha=0.7)
        blocks = sorted({block for (block, _), _ in points})
        means = [statistics.fmean(v for (b, _), v in points if b == block) for block in blocks]
        plot.plot(blocks, means, color=color, label=f"{label}, mean over heads")
    plot.axhline(DENSE, color="0.3", linewidth=0.8, linestyle=":")
    plot.set_title(f"{data}: entropy of each head", fontsize=9)
    plot.set(xlabel="block", ylabel="entropy / log n", ylim=(0, 1.03))


def _draw_rows(canvas: Canvas, plot: Any, runs: Sequence[RunRecord], norm: str) -> None:
    """Single rows of the trained attention by block, and the curve of random scores."""
    rows = [row for run in runs for row in _rows(run, "softmax rows")]
    points = [
        (entropy, value, row["block"])
        for row in rows
        for entropy, value in zip(row["entropy"], row[norm], strict=True)
    ]
    if points:
        x, y, block = zip(*points, strict=True)
        drawn = plot.scatter(x, y, c=block, s=4, alpha=0.5, cmap="viridis", linewidths=0)
        ticks = sorted({row["block"] for row in rows})
        canvas.figure.colorbar(drawn, ax=plot, label="block", ticks=ticks[:: 1 + len(ticks) // 7])
    for row in _rows(runs[0], "softmax curve") if runs else []:
        words = f"random scores, {row['keys']} keys"
        plot.plot(row["entropy"], row[norm], color="black", linewidth=1, label=words)


def _mean(values: Iterable[float | None]) -> float | None:
    found = compare.spread(values)
    return None if found is None else found.mean


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


STUDY = Study(
    title="entropy of trained attention per head, and the softmax Jacobian against density",
    paper="CB, analysis",
    claim="Attention maps of trained ViTs are dense, although the softmax gradient is steepest there.",
    variants=variants,
    report=report,
    after=density_of_run,
    on_cpu=True,
    decides="The paper's own trained models: attention of a ViT that has seen 300 epochs of ImageNet-1k "
    "(`python -m studies density --scale paper --data IMAGENET_DIR`), with several seeds.",
)
