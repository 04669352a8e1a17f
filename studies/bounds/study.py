"""Measured kappa compared with Propositions 4.1, 4.2 and the FFN's bound, through training (ASA, section 4).

What each measure is, and where its bound is a theorem, says :mod:`wellposed.probes.bounds`.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from studies import compare
from studies.figures import Canvas
from studies.measures import measured_row, moment_row
from studies.recipes import measured_vit
from studies.study import Records, Report, Scale, Study, Variant, data_name
from wellposed import anatomy
from wellposed.probes import bounds as bounds_of
from wellposed.records import VERDICTS, Record
from wellposed.stats import Claim
from wellposed.study_records import RunRecord, thinned
from wellposed.train import open_run
from wellposed.train.runs import Moment, TrainedRun

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
MEASURES = {
    measure: f"{title}, {words}" for title, lines in PICTURES.items() for measure, words in lines.items()
}
EDITS: dict[str, dict[str, Any]] = {
    "all skips": {},
    "no attention skip": {"edits": ["remove_skips which=attention"], "init": "xavier"},
}
IMAGES = 4
BLOCKS = 6
"""Of a deep model so many, evenly: two float64 SVDs a head and image take their time."""
MOMENTS = 6
"""Of training, at most; the first and the last among them."""
_KEPT = ("weights", "epoch", "measure", "block", "head", "log", "log_bound", "verdicts", "estimator", "dtype")

WHOLE = "all as one"
"""All heads of a block as one: what the propositions are about."""

Rows = Sequence[Mapping[str, Any]]


def variants(scale: Scale, data: str) -> list[Variant]:
    """With about ten checkpoints kept, of 600 updates with the digits, of 1,455 or 375,000 with images."""
    kept: dict[str, Any] = {"epochs": 300, "checkpoint_every": 30_000}
    if data_name(data) == "digits":
        kept = {"epochs": 60, "checkpoint_every": 60}
    elif scale == "small":
        # With larger steps it does not learn without skips.
        kept = {"epochs": 15, "checkpoint_every": 150, "lr": 3e-4}
    # Stochastic depth does not go with blocks without skips.
    kept |= {"keep": 100, "drop_path": 0.0}
    return [Variant(label, measured_vit(scale, data, **kept | edit)) for label, edit in EDITS.items()]


def bounds_of_run(folder: Path) -> list[dict[str, Any]]:
    """Kappa and bound of each measure and block, before training, at the checkpoints and after it."""
    run = open_run(folder, IMAGES)
    moments = thinned(run.through_training(), MOMENTS)
    return [row for moment in moments for row in _measured(run, moment)]


def _measured(run: TrainedRun, moment: Moment) -> Iterator[dict[str, Any]]:
    model = run.model(moment)
    found = bounds_of(model, run.images, images_limit=IMAGES, blocks=_some(len(anatomy.blocks(model))))
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
    about = moment_row(moment)
    return {
        "weights": about["weights"],
        "epoch": about["epoch"],
        "measure": measure,
        "block": block,
        "head": "each",
        "log": statistics.median(record.log for record in records if record.log is not None),
        "log_bound": _log(statistics.median(known)) if known else None,
        "verdicts": _summed(record.verdicts for record in records),
        "estimator": records[0].estimator,
        "dtype": records[0].dtype,
        "heads": len(records),
    }


def _some(count: int) -> list[int]:
    """Indices of at most :data:`BLOCKS` blocks, the first and the last among them.

    >>> _some(3), _some(12)
    ([0, 1, 2], [0, 2, 4, 7, 9, 11])
    """
    return thinned(range(count), BLOCKS)


def claims(records: Records) -> list[Claim]:
    """Over the runs of all data sets: a bound is about any trained model."""
    found = []
    for label in records.labels:
        runs = {(run.data, run.seed): run for run in records.of(label)}
        for measure, words in MEASURES.items():
            margins = {key: _smallest_margin(run, measure) for key, run in runs.items()}
            known = {key: value for key, value in margins.items() if value is not None}
            if known:
                apart = compare.difference(known, dict.fromkeys(known, 0.0))
                contrast = f"ln bound - ln kappa where they are nearest, {label}"
                found.append(Claim(f"kappa is below its bound: {words}", contrast, "higher", apart))
        for column, what in (("log_bound", "bound"), ("log", "kappa")):
            lower = {key: _with_skip(run, column) for key, run in runs.items()}
            known = {key: value for key, value in lower.items() if value is not None}
            apart = compare.difference(known, dict.fromkeys(known, 0.0))
            name = f"attention's skip lowers its {what}"
            contrast = f"Prop. 4.2 - Prop. 4.1, linear attention, {label}, ln {what} after training"
            found.append(Claim(name, contrast, "lower", apart))
    return found


def _told(run: RunRecord, measure: str) -> list[Mapping[str, Any]]:
    """Rows of all heads as one whose bound is finite and whose kappas float32 could tell."""
    cannot_tell = VERDICTS.index("cannot tell")
    rows = _finite(row for row in run.measured if row["measure"] == measure and row.get("head") is None)
    return [row for row in rows if row["verdicts"] and not row["verdicts"][cannot_tell]]


def _smallest_margin(run: RunRecord, measure: str) -> float | None:
    return min((row["log_bound"] - row["log"] for row in _told(run, measure)), default=None)


def _with_skip(run: RunRecord, column: str) -> float | None:
    """How a logarithm differs with the skip, the mean over the blocks where both are told."""

    def last(measure: str) -> dict[int, float]:
        return {row["block"]: row[column] for row in _told(run, measure) if row["weights"] == "last"}

    without, with_skip = last("kappa 4.1 linear"), last("kappa 4.2 linear")
    changes = [with_skip[block] - without[block] for block in with_skip.keys() & without.keys()]
    return statistics.fmean(changes) if changes else None


def report(records: Records) -> Report:
    table = [
        row for data in records.datasets for label in records.labels for row in _table(records, data, label)
    ]
    return Report(
        tables={"table": table},
        claims=claims(records),
        draw=partial(_draw, records),
        notes=(
            *_counts(table),
            *_heads_notes(table),
            "The linear forms are the propositions' own; for the model's attention and MLP they are rules of "
            "thumb, since softmax, biases and the activation are not in them.",
            "Where some cannot be told, ln kappa is a lower bound: the arithmetic ends there.",
            "A bound is infinite, and holds trivially, where the tokens after LayerNorm have no full rank.",
            "The logarithms are of blocks whose bound is finite.",
        ),
    )


def _table(records: Records, data: str, label: str) -> Iterator[dict[str, Any]]:
    rows = [row for run in records.of(label, data) for row in run.measured]
    for measure in MEASURES:
        for heads, head in ((WHOLE, None), ("each", "each")):
            own = [r for r in rows if r["measure"] == measure and r.get("head") == head and r.get("verdicts")]
            if not own:
                continue
            line: dict[str, Any] = {"data": data, "variant": label, "measure": measure, "heads": heads}
            for when, name in (("start", "initial"), ("end", "last")):
                at = _finite(row for row in own if row["weights"] == name)
                for column in ("log", "log_bound"):
                    found = compare.spread(row.get(column) for row in at)
                    words = "ln kappa" if column == "log" else "ln bound"
                    line[f"{words}, {when}"] = None if found is None else round(found.mean, 2)
            yield line | dict(zip(VERDICTS, _summed(row["verdicts"] for row in own), strict=True))


def _summed(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]


def _counts(table: Rows) -> Iterator[str]:
    """A proposition is a theorem: one violation would be an error, of the paper or of the code."""
    for data, label in dict.fromkeys((row["data"], row["variant"]) for row in table):
        own = [row for row in table if (row["data"], row["variant"], row["heads"]) == (data, label, WHOLE)]
        violated, tellable = (sum(column) for column in zip(*map(_violations, own), strict=True))
        infinite, unknown = (sum(row[name] for row in own) for name in ("holds trivially", "cannot tell"))
        yield (
            f"{data}, {label}: {violated or 'none'} of {tellable} bounds violated, {infinite} of them "
            f"infinite; {unknown} more are beyond the arithmetic."
        )


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
    return row["violated"], sum(row[name] for name in VERDICTS if name != "cannot tell")


def _draw(records: Records, path: Path) -> None:
    """A row a model: each bound with what it bounds, and with what the model has in that place."""
    sets = [(data, label) for data in records.datasets for label in records.labels]
    canvas = Canvas(len(PICTURES), max(1, len(sets)), height=3.0)
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
    """Those with a finite bound: kappa of the others would be compared with a bound that is not theirs."""
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
    title="measured kappa against the paper's bounds, through training",
    paper="ASA section 4, Propositions 4.1 and 4.2",
    claim="kappa after attention stays below C kappa(X)^3 without the skip, with it below a bound that is "
    "far lower, and after the MLP below one that grows with kappa(X) to the first power.",
    variants=variants,
    report=report,
    after=bounds_of_run,
    on_cpu=True,
    decides="A theorem needs no runs: one violation that float64 can tell would refute it, and the notes "
    "count them. That the skip lowers kappa in large models too: `python -m studies bounds --scale paper "
    "--data IMAGENET_DIR`.",
)
