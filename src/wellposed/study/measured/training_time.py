"""What each method adds to a training step, by ``python -m benchmarks graying`` (ASA, training time)."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from wellposed.study.figures import Canvas
from wellposed.study.measured.settings import plain_vit
from wellposed.study.plan import Cell, Scale, Study, StudyRecords, StudyReport, Verdict

PLAIN = "plain"
EDITS = ("svd-embedding", "spectral-embedding", "dct-embedding", "dct-pixels", "cb", "cb_s")
PAPER = {PLAIN: 1.0, "svd-embedding": 4.552 / 0.723, "dct-embedding": 0.732 / 0.723}
"""Of its days for ViT-B, over the baseline's."""

FREE = 1.05
"""A step up to so much longer counts as the paper's 1.2% for DCT graying."""
DEAR = 2.0
"""A step from so much longer on counts as what the paper has for SVD graying."""

_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_ROUNDS: Mapping[Scale, int] = {"small": 3, "paper": 5}


def cells(scale: Scale) -> list[Cell]:
    """It trains nothing."""
    return []


def steps_once(scale: Scale, study: Path) -> list[dict[str, Any]]:
    """Steps of ViT-B/16 at 224 pixels, batch 256, bf16, compiled; on a CPU of ViT-Tiny, batch 4, in float32.

    The paper scale is the same with more rounds. The images are random: what is in them takes no time.
    """
    timing = importlib.import_module("benchmarks.timing")  # of the repository, where the study runs
    device = timing.usual_device()
    given: dict[str, Any] = {"edits": EDITS, "rounds": _ROUNDS[scale]}
    plan = usual_steps(device, given)
    rows = importlib.import_module("benchmarks.graying").run_steps(
        plan, device, study / "bench", Console(stderr=True)
    )
    about = {
        "device": timing.device_name(device),
        "on": device.type,
        **asdict(plan),
        "edits": list(plan.edits),
    }
    return [{"measure": "training step", **asdict(row), "about": about} for row in rows]


def usual_steps(device: Any, given: dict[str, Any]) -> Any:
    """The plan of the benchmark for a device."""
    return importlib.import_module("benchmarks.graying").usual_steps(device, given)


def report(records: StudyRecords) -> StudyReport:
    rows = [row for row in records.measured if row.get("measure") == "training step"]
    decided, reason = _verdict(rows)
    return StudyReport(
        tables={"table": [_line(row) for row in rows]},
        draw=(lambda path: _draw(rows, path)) if rows else None,
        verdict=decided,
        reason=reason,
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


def _verdict(rows: Sequence[Mapping[str, Any]]) -> tuple[Verdict, str]:
    """DCT graying is nearly free and SVD graying is dear, on a GPU as the paper's."""
    ratios = {row["edit"]: row["ratio"] for row in rows if row.get("ratio") is not None}
    dct, svd = ratios.get("dct-embedding"), ratios.get("svd-embedding")
    if dct is None or svd is None:
        return "incomplete", "DCT or SVD graying was not timed"
    told = (
        f"a step with DCT graying takes {dct:.3f} of a plain one (the paper {PAPER['dct-embedding']:.3f}), "
        f"with SVD graying {svd:.2f} (the paper {PAPER['svd-embedding']:.2f})"
    )
    if "spectral-embedding" in ratios:
        told += f", with the same graying by the spectral method {ratios['spectral-embedding']:.3f}"
    if rows[0]["about"]["on"] != "cuda":
        return "incomplete", f"{told}; but on a CPU and of a small model, the paper's is ViT-B on GPUs"
    outcomes = (dct <= FREE, svd >= DEAR)
    if all(outcomes):
        return "reproduced", told
    return ("partly" if any(outcomes) else "not"), told


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
    name="training-time",
    title="what each method adds to a training step",
    paper="Always Skip Attention, training time",
    claim="Training ViT-B takes 6.3 times as long with SVD graying, and 1.012 times with DCT graying.",
    cells=cells,
    base=plain_vit,
    once=steps_once,
    report=report,
)
