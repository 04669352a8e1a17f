"""What each method adds to a training step, by the benchmark of graying (ASA, training time)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.graying import run_steps, usual_steps
from benchmarks.graying_steps import PLAIN
from benchmarks.timing import device_name, usual_device
from studies.figures import Canvas
from studies.study import Records, Report, Scale, Study, Variant
from wellposed.stats import Claim, one_sample

SVD, DCT = "svd-embedding", "dct-embedding"
EDITS = (SVD, "spectral-embedding", DCT, "dct-pixels", "cb", "cb_s")
PAPER = {PLAIN: 1.0, SVD: 4.552 / 0.723, DCT: 0.732 / 0.723}
"""Of its days for ViT-B, over the baseline's."""

FREE = 0.05
"""A step up to so much longer or shorter, of a plain one, counts as the paper's 1.2% for DCT graying."""
COSTLY = 2.0
"""A step from so many plain ones on counts as what the paper has for SVD graying."""

_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_ROUNDS: Mapping[Scale, int] = {"small": 3, "paper": 5}


def variants(scale: Scale, data: str) -> list[Variant]:
    """It trains nothing."""
    return []


def steps_once(
    scale: Scale, folder: Path, data: Sequence[str], changes: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Steps of ViT-B/16 at 224 pixels, batch 256, bf16, compiled; on a CPU of ViT-Tiny, batch 4, in float32.

    The paper scale is the same with more rounds. The images are random: what is in them takes no time.
    """
    device = usual_device(None)
    plan = usual_steps(device, {"edits": EDITS, "rounds": _ROUNDS[scale]})
    rows = run_steps(plan, device, None, Console(stderr=True))
    about = {"device": device_name(device), "on": device.type, **asdict(plan), "edits": list(plan.edits)}
    return [{"measure": "training step", **asdict(row), "about": about} for row in rows]


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """On the times over a plain step's, round by round."""
    rounds = {
        row["edit"]: [float(each) for each in row["each_round"].split()]
        for row in rows
        if row["status"] == "ok"
    }
    is_gpu = all(row["about"]["on"] == "cuda" for row in rows)
    differs = "" if is_gpu else "a small model on a CPU, the paper's is ViT-B on GPUs"

    def over(edit: str, beyond: float) -> list[float]:
        pairs = zip(rounds.get(edit, []), rounds.get(PLAIN, []), strict=False)
        return [own / plain - beyond for own, plain in pairs]

    dct, svd = over(DCT, 1.0), over(SVD, COSTLY)
    return [
        Claim(
            "DCT graying is nearly free",
            f"{DCT} / {PLAIN} - 1, time of a training step",
            "same",
            one_sample(dct) if dct else None,
            margin=FREE,
            paper=round(PAPER[DCT] - 1, 3),
            differs=differs,
        ),
        Claim(
            f"SVD graying makes a training step at least {COSTLY:g} times as long",
            f"{SVD} / {PLAIN} - {COSTLY:g}, time of a training step",
            "higher",
            one_sample(svd) if svd else None,
            paper=round(PAPER[SVD] - COSTLY, 3),
            differs=differs,
        ),
    ]


def report(records: Records) -> Report:
    rows = [row for row in records.measured if row.get("measure") == "training step"]
    return Report(
        tables={"table": [_line(row) for row in rows]},
        claims=claims(rows),
        draw=partial(_draw, rows) if rows else None,
        notes=(
            "The paper times whole trainings; a ratio here is of bare training steps, which have no data "
            "loading that could hide a cost.",
            "spectral is the same graying as svd, computed without an SVD.",
        ),
    )


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    columns = (
        "edit",
        "rounds",
        "milliseconds",
        "ratio",
        "ratio_low",
        "ratio_high",
        "peak_gib",
        "status",
        "note",
    )
    line = {name: _short(row.get(name)) for name in columns}
    about = row["about"]
    where = {name: about[name] for name in ("model", "image_size", "batch_size", "precision", "device")}
    paper = PAPER.get(row["edit"])
    return {**line, "ratio in the paper": None if paper is None else round(paper, 3), **where}


def _draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    timed = [row for row in rows if row.get("ratio") is not None]
    canvas = Canvas(1, width=7.0)
    (plot,) = canvas.plots
    places = range(len(timed))
    plot.barh(places, [row["ratio"] for row in timed], color="C0", label="measured")
    for place, row in zip(places, timed, strict=True):
        plot.plot([row["ratio_low"], row["ratio_high"]], [place, place], color="black", linewidth=1)
        plot.text(row["ratio_high"], place, f" {row['ratio']:.2f}", va="center", fontsize=8)
    known = [
        (PAPER[row["edit"]], place) for place, row in zip(places, timed, strict=True) if row["edit"] in PAPER
    ]
    if known:
        plot.scatter(*zip(*known, strict=True), color="C3", marker="|", s=200, label="paper, ViT-B", zorder=3)
    plot.set_yticks(places, [row["edit"] for row in timed])
    plot.invert_yaxis()
    about = timed[0]["about"]
    plot.set(xscale="log", xlabel="time of a training step / plain step")
    widest = max([row["ratio_high"] for row in timed] + [ratio for ratio, _ in known])
    ticks = [tick for tick in _TICKS if tick <= widest]
    plot.set_xticks(ticks, map(str, ticks))
    plot.set_xticks([], minor=True)
    plot.set_title(f"{about['model']}, batch {about['batch_size']}, {about['device']}", fontsize=9)
    canvas.save(path)


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


STUDY = Study(
    title="what each method adds to a training step",
    paper="ASA, training time",
    claim="Training ViT-B takes 6.3 times as long with SVD graying, and 1.012 times with DCT graying.",
    variants=variants,
    report=report,
    once=steps_once,
    decides="More rounds on a GPU that does nothing else: `python -m studies training-time --scale paper`.",
)
