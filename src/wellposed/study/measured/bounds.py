"""Measured kappa beside Propositions 4.1, 4.2 and the FFN's bound, through training (ASA, section 4).

What each measure is, and where its bound is a theorem, says :mod:`wellposed.probes.bounds`.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wellposed import anatomy
from wellposed.linalg.bounds import VERDICTS
from wellposed.probes import bounds as bounds_of
from wellposed.records import Record
from wellposed.study.compact import thinned
from wellposed.study.compare import spread
from wellposed.study.figures import Canvas
from wellposed.study.measured.rows import measured_row
from wellposed.study.measured.settings import plain_vit_with_checkpoints
from wellposed.study.plan import Cell, Scale, Study, StudyRecords, StudyReport, Verdict
from wellposed.train.runs import Moment, TrainedRun, open_run

PICTURES: dict[str, dict[str, str]] = {
    "Prop. 4.1, attention without skip": {
        "kappa 4.1 linear": "linear attention",
        "kappa 4.1 softmax": "the model's attention",
    },
    "Prop. 4.2, attention with skip": {
        "kappa 4.2 linear": "linear attention",
        "kappa 4.2 softmax": "the model's attention",
    },
    "FFN": {"kappa ffn linear": "without its activation", "kappa ffn": "as the model has it"},
}
"""Plots side by side, and their lines: what the bound is a theorem for, and what stands in its place."""
MEASURES = tuple(measure for lines in PICTURES.values() for measure in lines)
IMAGES = 4
BLOCKS = 6
"""Of a deep model so many, evenly: two float64 SVDs a head and image take their time."""
MOMENTS = 6
"""Of training, at most; the start and the end among them."""
_KEPT = ("weights", "epoch", "measure", "block", "head", "log", "log_bound", "verdicts", "estimator", "dtype")

WHOLE = "all as one"
"""All heads of a block as one: what the propositions are about."""

Rows = Sequence[Mapping[str, Any]]


def cells(scale: Scale) -> list[Cell]:
    return [
        Cell("all skips"),
        Cell("no attention skip", {"remove_skips": "attention", "init": "xavier"}),
    ]


def bounds_of_run(run: Path, study: Path | None = None) -> list[dict[str, Any]]:
    """Kappa and bound of each measure and block, at the start, the checkpoints and the end of a run."""
    trained = open_run(run, IMAGES)
    moments = thinned(trained.through_training(), MOMENTS)
    return [row for moment in moments for row in _rows(trained, moment)]


def _rows(trained: TrainedRun, moment: Moment) -> Iterator[dict[str, Any]]:
    model = trained.model(moment)
    found = bounds_of(model, trained.images, images_limit=IMAGES, blocks=_some(len(anatomy.blocks(model))))
    heads: dict[tuple[str, int | None], list[Record]] = {}
    for record in found:
        if record.measure not in MEASURES:
            continue
        if record.head is None:
            row = measured_row(record, moment, log_bound=_log(record.bound), verdicts=list(record.verdicts))
            yield {name: row[name] for name in _KEPT if name in row}
        elif record.value is not None:
            heads.setdefault((record.measure, record.block), []).append(record)
    for (measure, block), records in heads.items():
        yield _of_heads(measure, block, records, moment)


def _of_heads(measure: str, block: int | None, records: list[Record], moment: Moment) -> dict[str, Any]:
    """The medians over the heads of a block: what their weights give alone, each a bound of its own."""
    known = [record.bound for record in records if record.bound is not None]
    counts = [sum(column) for column in zip(*(record.verdicts for record in records), strict=True)]
    return {
        "weights": moment.weights,
        "epoch": moment.epoch,
        "measure": measure,
        "block": block,
        "head": "each",
        "log": statistics.median(record.log for record in records if record.log is not None),
        "log_bound": _log(statistics.median(known)) if known else None,
        "verdicts": counts,
        "estimator": records[0].estimator,
        "dtype": records[0].dtype,
        "heads": len(records),
    }


def _some(count: int) -> list[int]:
    """Indices of at most :data:`BLOCKS` blocks, the first and the last among them.

    >>> _some(3), _some(12)
    ([0, 1, 2], [0, 2, 4, 7, 9, 11])
    """
    if count <= BLOCKS:
        return list(range(count))
    return sorted({round(i * (count - 1) / (BLOCKS - 1)) for i in range(BLOCKS)})


def report(records: StudyRecords) -> StudyReport:
    tables = {
        "table": [
            row
            for data in records.datasets
            for label in records.labels
            for row in _table(records, data, label)
        ]
    }
    decided, reason = _verdict(tables["table"])
    return StudyReport(
        tables=tables,
        draw=lambda path: _draw(records, path),
        verdict=decided,
        reason=reason,
        notes=(
            *_heads_notes(tables["table"]),
            "The linear forms are the propositions' own; for the model's attention and MLP they are rules of "
            "thumb, since softmax, biases and the activation are not in them.",
            "Where some cannot be told, ln kappa is a lower bound: the arithmetic ends there.",
            "A bound is infinite, and holds trivially, where the tokens after LayerNorm have no full rank.",
            "The logarithms are of blocks whose bound is finite.",
        ),
    )


def _table(records: StudyRecords, data: str, label: str) -> Iterator[dict[str, Any]]:
    rows = [row for run in records.of(label, data) for row in run.measured]
    for measure in MEASURES:
        for heads, head in ((WHOLE, None), ("each", "each")):
            own = [r for r in rows if r["measure"] == measure and r.get("head") == head and r.get("verdicts")]
            if not own:
                continue
            counts = [sum(column) for column in zip(*(row["verdicts"] for row in own), strict=True)]
            line: dict[str, Any] = {"data": data, "variant": label, "measure": measure, "heads": heads}
            for when, name in (("start", "initial"), ("end", "last")):
                at = _finite(row for row in own if row["weights"] == name)
                for column in ("log", "log_bound"):
                    found = spread(row.get(column) for row in at)
                    words = "ln kappa" if column == "log" else "ln bound"
                    line[f"{words}, {when}"] = None if found is None else round(found.mean, 2)
            yield line | dict(zip(VERDICTS, counts, strict=True))


def _verdict(table: Rows) -> tuple[Verdict, str]:
    """Do the bounds hold, and is the one with the skip the lower?"""
    told, outcomes = [], []
    for place in dict.fromkeys((row["data"], row["variant"]) for row in table):
        whole = [row for row in table if (row["data"], row["variant"]) == place and row["heads"] == WHOLE]
        own = {row["measure"]: row for row in whole}
        parts = []
        counts = {measure: _violations(row) for measure, row in own.items()}
        outcomes += [violated == 0 for violated, tellable in counts.values() if tellable]
        parts += [f"{name} violated in {bad} of {all_of}" for name, (bad, all_of) in counts.items() if bad]
        tellable = sum(each for _, each in counts.values())
        if not parts:
            parts.append(f"no bound violated in {tellable}" if tellable else "no bound can be told")
        trivial, unknown = (sum(row[name] for row in whole) for name in ("holds trivially", "cannot tell"))
        parts += [f"{trivial} of them infinite"] if trivial else []
        parts += [f"{unknown} more beyond the arithmetic"] if unknown else []
        without, with_skip = (own.get(f"kappa {number} linear") for number in ("4.1", "4.2"))
        bound, kappa = (_lower(with_skip, without, column) for column in ("ln bound, end", "ln kappa, end"))
        if bound is not None and kappa is not None:
            outcomes.append(bound > 0)
            parts.append(
                f"with the skip the bound's logarithm is {bound:.1f} lower, that of kappa {kappa:.1f}"
            )
        told.append(f"{', '.join(place)}: {', '.join(parts)}")
    if not outcomes:
        return "incomplete", "no bound was measured"
    if all(outcomes):
        return "reproduced", "; ".join(told)
    return ("partly" if any(outcomes) else "not"), "; ".join(told)


def _heads_notes(table: Rows) -> Iterator[str]:
    """The propositions have one head; what they say of the weights of each head is beyond them."""
    for row in table:
        violated, tellable = _violations(row)
        if row["heads"] == "each" and violated:
            yield (
                f"{row['data']}, {row['variant']}: head by head, {row['measure']} is violated in "
                f"{violated} of {tellable}."
            )


def _violations(row: Mapping[str, Any]) -> tuple[int, int]:
    """How many are violated, and of how many that can be told."""
    violated: int = row["violated"]
    return violated, sum(row[name] for name in VERDICTS if name != "cannot tell")


def _lower(
    with_skip: Mapping[str, Any] | None, without: Mapping[str, Any] | None, column: str
) -> float | None:
    """How much lower a logarithm is with the skip."""
    low, high = (None if row is None else row[column] for row in (with_skip, without))
    return None if low is None or high is None else float(high - low)


def _draw(records: StudyRecords, path: Path) -> None:
    """A row a model: each bound with what it bounds, and with what the model has in that place."""
    sets = [(data, label) for data in records.datasets for label in records.labels]
    canvas = Canvas(len(PICTURES), len(sets), height=3.0)
    plots = iter(canvas.plots)
    for data, label in sets:
        rows = [row for run in records.of(label, data) for row in run.measured if row.get("head") is None]
        for title, measures in PICTURES.items():
            _draw_bound(next(plots), rows, f"{data}, {label}: {title}", measures)
    canvas.save(path)


def _draw_bound(plot: Any, rows: Rows, title: str, measures: Mapping[str, str]) -> None:
    linear = [row for row in rows if row["measure"] == next(iter(measures)) and row.get("log") is not None]
    infinite = len(linear) - len(_finite(linear))
    if infinite == len(linear):
        why = "all bounds are infinite" if infinite else "the model has none"
        plot.text(0.5, 0.5, why, ha="center", transform=plot.transAxes)
        plot.set(xticks=[], yticks=[])
    elif infinite:
        title += f"\n(without {infinite} of {len(linear)} whose bound is infinite)"
    _band(plot, _finite(linear), "log_bound", "bound", "C3")
    for color, (measure, words) in enumerate(measures.items()):
        _band(plot, _finite(row for row in rows if row["measure"] == measure), "log", words, f"C{color}")
    plot.set_title(title, fontsize=8)
    plot.set(xlabel="epoch", ylabel="ln kappa")


def _finite(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those with a finite bound: kappa of the others would stand beside a bound that is not theirs."""
    return [row for row in rows if row.get("log_bound") is not None]


def _band(plot: Any, rows: Iterable[Mapping[str, Any]], column: str, label: str, color: str) -> None:
    """The median over blocks and seeds as a line, their range as a band."""
    of_epoch: dict[float, list[float]] = {}
    for row in rows:
        if row.get(column) is not None and row["epoch"] is not None:
            of_epoch.setdefault(row["epoch"], []).append(row[column])
    epochs = sorted(of_epoch)
    if not epochs:
        return
    middle = [statistics.median(of_epoch[epoch]) for epoch in epochs]
    plot.plot(epochs, middle, color=color, label=label, marker="o", markersize=3)
    lows, highs = ([pick(of_epoch[epoch]) for epoch in epochs] for pick in (min, max))
    plot.fill_between(epochs, lows, highs, color=color, alpha=0.2, linewidth=0)


def _log(value: float | None) -> float | None:
    return math.log(value) if value is not None and value > 0 else None


STUDY = Study(
    name="bounds",
    title="measured kappa against the paper's bounds, through training",
    paper="Always Skip Attention, section 4, Propositions 4.1 and 4.2",
    claim="kappa after attention stays below C kappa(X)^3 without the skip, with it below a bound that is "
    "far lower, and after the MLP below one that grows with kappa(X) to the first power.",
    cells=cells,
    base=plain_vit_with_checkpoints,
    after=bounds_of_run,
    report=report,
    on_cpu=True,
)
