"""How dense trained attention is, and where the softmax is steep (CB, analysis).

The Jacobian of a softmax row p is J = diag(p) - p p^T. Its nuclear norm, the trace 1 - |p|^2, is largest
where p is uniform over all n keys. Its Frobenius norm is about 1 / sqrt(n) there, and largest, 1 / 2, where
two keys share the row. So whether dense attention is the steepest hangs on the norm; the study tells both.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.density.softmax_rows import NORMS, attention_rows
from wellposed.study.compare import Claim, difference, spread, verdict
from wellposed.study.figures import Canvas
from wellposed.study.measured.entropy_per_head import IMAGES, entropy_per_head
from wellposed.study.measured.settings import plain_vit
from wellposed.study.plan import Cell, RunRecord, Scale, Study, StudyRecords, StudyReport
from wellposed.train.runs import open_run

LABEL = "plain"
DENSE = 0.5
"""Entropy over log n above which attention counts as dense: it weighs more than sqrt(n) keys."""

_LEAST = 0.05  # where one seed leaves no deviation
_WORDS = {"trace": "nuclear norm (trace)", "frobenius": "Frobenius norm"}


def cells(scale: Scale) -> list[Cell]:
    return [Cell(LABEL)]


def density_of_run(run: Path, study: Path | None = None) -> list[dict[str, Any]]:
    """Entropy per head at the start and at the end, and single rows of attention at the end."""
    trained = open_run(run, IMAGES)
    last = trained.moment("last")
    told = {
        "weights": last.weights,
        "update": last.update,
        "epoch": last.epoch,
        "images": len(trained.images),
    }
    rows = [told | row for row in attention_rows(trained.model(last), trained.images)]
    return entropy_per_head(run, study) + rows


def report(records: StudyRecords) -> StudyReport:
    claims = [claim for data in records.datasets for claim in _claims(records, data)]
    decided, reason = verdict(claims)
    return StudyReport(
        tables={"table": [row for data in records.datasets for row in _table(records, data)]},
        draw=lambda path: _draw(records, path),
        verdict=decided,
        reason=reason,
        notes=(
            *_start_notes(records),
            "How the norms go with entropy is a property of the softmax, not of training: random scores give "
            "nearly the same curve.",
        ),
    )


def _claims(records: StudyRecords, data: str) -> Iterator[Claim]:
    runs = records.of(LABEL, data)
    entropies = {run.seed: _mean(_entropies(run, "last").values()) for run in runs}
    known = {seed: value for seed, value in entropies.items() if value is not None}
    yield Claim(
        records.on(data, f"mean entropy over log n, minus {DENSE:g}"),
        "higher",
        difference(known, dict.fromkeys(known, DENSE), least=_LEAST),
    )
    for norm, words in _WORDS.items():
        together = {
            run.seed: row["value"]
            for run in runs
            for row in _rows(run, "softmax correlation")
            if row["norm"] == norm and row["value"] is not None
        }
        yield Claim(
            records.on(data, f"rank correlation of entropy and the softmax Jacobian's {words}"),
            "higher",
            difference(together, dict.fromkeys(together, 0.0), least=_LEAST),
        )


def _start_notes(records: StudyRecords) -> Iterator[str]:
    """Density may be what training left of the start, rather than what it made."""
    for data in records.datasets:
        runs = records.of(LABEL, data)
        start, end = (
            _mean(v for run in runs for v in _entropies(run, w).values()) for w in ("initial", "last")
        )
        if start is not None and end is not None:
            yield f"{data}: the mean entropy over log n goes from {start:.3f} at the start to {end:.3f}."


def _table(records: StudyRecords, data: str) -> Iterator[dict[str, Any]]:
    runs = records.of(LABEL, data)
    blocks = sorted({block for run in runs for block, _ in _entropies(run, "last")})
    for block in blocks:
        start, end = (
            spread(_mean(v for (b, _), v in _entropies(run, weights).items() if b == block) for run in runs)
            for weights in ("initial", "last")
        )
        heads = [v for run in runs for (b, _), v in _entropies(run, "last").items() if b == block]
        line: dict[str, Any] = {"data": data, "block": block, "seeds": len(runs)}
        line["entropy, start"] = _round(start.mean if start else None)
        line["entropy"] = _round(end.mean if end else None)
        line["deviation"] = _round(end.deviation if end else None)
        line |= {"lowest head": _round(min(heads)), "highest head": _round(max(heads))}
        for norm in NORMS:
            measure = f"softmax jacobian {norm}"
            values = [
                row["value"]
                for run in runs
                for row in _rows(run, measure)
                if row["weights"] == "last" and row.get("block") == block and row.get("head") is None
            ]
            line[f"softmax Jacobian, {norm}"] = _round(_mean(values))
        yield line


def _entropies(run: RunRecord, weights: str) -> dict[tuple[int, int], float]:
    """By block and head."""
    return {
        (row["block"], row["head"]): row["value"]
        for row in _rows(run, "entropy")
        if row["weights"] == weights and row.get("head") is not None and row["value"] is not None
    }


def _rows(run: RunRecord, measure: str) -> list[Mapping[str, Any]]:
    return [row for row in run.measured if row["measure"] == measure]


def _draw(records: StudyRecords, path: Path) -> None:
    canvas = Canvas(1 + len(NORMS), len(records.datasets))
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
    for weights, color, label in (("initial", "0.6", "start"), ("last", "C0", "trained")):
        points = [point for run in runs for point in _entropies(run, weights).items()]
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


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


STUDY = Study(
    name="density",
    title="entropy of trained attention per head, and the softmax Jacobian against density",
    paper="Scratching Visual Transformer's Back with Uniform Attention, analysis",
    claim="Attention maps of trained ViTs are dense, although the softmax gradient is steepest there.",
    cells=cells,
    base=plain_vit,
    after=density_of_run,
    report=report,
    on_cpu=True,
)
