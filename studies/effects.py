"""What each change is worth on each data set, of all studies in one picture.

    python -m studies.effects [--out results/effects]

Reads the tables that ``python -m studies`` has written; trains nothing. Points of accuracy compared with the
same model without the change, by seed, with intervals of 95%. Hollow marks are undecided: zero is in their
interval, or there is one seed and so no interval.
"""

import argparse
import csv
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

from studies.report import write_table
from studies.study import Scale, folder_of

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

SETS = {
    "digits": "digits",
    "tiny-imagenet-50": "Tiny-ImageNet-50",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}
SMALLER = {"cifar10-20k": "cifar10"}
"""Sets that are drawn as another, of which they are a part."""


@dataclass(frozen=True)
class Row:
    """A line of the picture: a variant of a study, and what the paper has for it."""

    name: str
    study: str
    variant: str
    paper: float | None = None
    scale: Scale = "small"


EDITS = (
    Row("spectral graying of the embedding, 0.7", "eps-sweep", "spectral 0.7, embedding", 0.4),
    Row("spectral graying of the pixels, 0.7", "eps-sweep", "spectral 0.7, pixels"),
    Row("DCT graying of the embedding, 0.95", "eps-sweep", "dct 0.95, embedding", 0.3),
    Row("DCT graying of the pixels, 0.8", "eps-sweep", "dct 0.8, pixels"),
    Row("DCT graying in MAE and fine-tuning, 0.95", "mae", "MAE + DCT, fine-tuned", 0.2),
    Row("spectral graying, class token, 3 epochs", "graying-controls", "spectral 0.7", 0.4),
    Row("DCT graying, class token, 3 epochs", "graying-controls", "DCT 0.95", 0.3),
    Row("conditioned tokens, class token, 3 epochs", "graying-controls", "condition", 1.0),
    Row("CB with a class token, 3 epochs", "cb-heads", "class token, CB"),
    Row("CB_S with a class token, 3 epochs", "cb-heads", "class token, CB_S"),
    Row("half the mean, class token, 3 epochs", "mean-and-difference", "class token, 0.5 m + 1 d"),
    Row("CB, end of the MLP*", "context-broadcasting", "CB"),
    Row("CB_S, end of the MLP*", "context-broadcasting", "CB_S"),
    Row("CB, front of the MLP*", "cb-position", "MLP, front"),
    Row("CB after attention*", "cb-position", "attention, end"),
    Row("a uniform head", "cb-position", "uniform head"),
    Row("spectral graying and CB", "both", "spectral + CB"),
)
SKIPS = (
    Row("ViT, no FFN skip", "skip-ablation", "no FFN skip", -2.0),
    Row("no FFN skip, 300 epochs", "skip-ablation", "no FFN skip", -2.0, "paper"),
    Row("ViT, no attention skip", "skip-ablation", "no attention skip", -22.0),
    Row("no attention skip, 300 epochs", "skip-ablation", "no attention skip", -22.0, "paper"),
    Row("ConvMixer, no skip", "convmixer", "without skips", 0.0),
)


@dataclass(frozen=True)
class Effect:
    """Of one variant on one data set."""

    name: str
    study: str
    data: str
    points: float
    low: float | None
    high: float | None
    n: int

    @property
    def is_decided(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def effects(row: Row) -> list[Effect]:
    """Those that the study's table has; a table without any is an error."""
    path = folder_of(row.study, row.scale) / "table.csv"
    with path.open(newline="") as file:
        every = [line for line in csv.DictReader(file) if line["variant"] == row.variant]
    lines = [line for line in every if line["difference"]]
    if not lines:
        raise ValueError(f"{path} has no difference of {row.variant!r}; run the study again, with all of it.")
    return [
        Effect(
            row.name,
            row.study,
            line["data"],
            float(line["difference"]),
            float(line["low"]) if line["low"] else None,
            float(line["high"]) if line["high"] else None,
            int(line["pairs"]),
        )
        for line in lines
    ]


def draw(plot: Axes, rows: tuple[Row, ...], found: dict[str, list[Effect]]) -> None:
    for place, row in enumerate(rows):
        if place % 2:
            plot.axhspan(place - 0.5, place + 0.5, color="0.95", zorder=0)
        for effect in found[row.name]:
            index = list(SETS).index(SMALLER.get(effect.data, effect.data))
            at = place + 0.2 * (index - 1.5)
            colour = f"C{index}"
            plot.errorbar(
                [effect.points],
                [at],
                xerr=None if effect.high is None else [effect.high - effect.points],
                fmt="o" if effect.n > 1 else "D",
                markersize=5,
                color=colour,
                markerfacecolor=colour if effect.is_decided else "white",
                capsize=2,
            )
        if row.paper is not None:
            plot.plot([row.paper] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
    plot.axvline(0.0, color="black", linewidth=0.8)
    plot.set_yticks(range(len(rows)), [row.name for row in rows])
    plot.set_ylim(len(rows) - 0.5, -0.5)
    plot.set_xlabel("points of accuracy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("results/effects"))
    options = parser.parse_args()
    found = {row.name: effects(row) for row in (*EDITS, *SKIPS)}
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, plots = plt.subplots(
        2,
        1,
        figsize=(8.0, 8.6),
        height_ratios=[len(EDITS), len(SKIPS) + 0.5],
        constrained_layout=True,
    )
    for plot, rows in zip(plots, (EDITS, SKIPS), strict=True):
        draw(plot, rows, found)
    for index, name in enumerate(SETS.values()):
        plots[0].plot([], [], "o", color=f"C{index}", label=name)
    plots[0].plot([], [], color="black", linewidth=2, label="the paper")
    plots[0].plot([], [], "o", color="0.4", markerfacecolor="white", label="undecided")
    plots[0].plot([], [], "D", color="0.4", label="one seed")
    plots[0].set_xlabel("points of accuracy\n* mean-pooled on natural images: not tested as published")
    plots[0].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(options.out.with_suffix(".png"), dpi=120)
    write_table(
        options.out.with_suffix(".csv"), [asdict(effect) for of_row in found.values() for effect in of_row]
    )


if __name__ == "__main__":
    main()
