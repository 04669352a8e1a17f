"""The pictures of docs/ideas.md, and the numbers in them.

    python benchmarks/idea_pictures.py

Draws docs/images/idea-*.svg and writes results/ideas.csv. Two CPU cores take about two minutes, most of it
for the six small ViTs that are trained for the last picture.
"""

import argparse
import csv
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from digit_training import train
from torch import Tensor

import wellposed as wp
from wellposed.digits import build_model, load_digits
from wellposed.linalg import condition_number
from wellposed.nn import PixelGraying
from wellposed.nn.functional import broadcast

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EPS = (1.0, 0.9, 0.7, 0.5)
KAPPAS = (2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 50.0, 100.0)
TOKENS, CHANNELS, DRAWS, SEEDS = 64, 64, 20, (0, 1, 2)


class Point(NamedTuple):
    """One number of a picture."""

    picture: str
    series: str
    x: float
    y: float
    deviation: float = 0.0


def draw_condition(path: Path) -> list[Point]:
    """What two matrices of two channels make of the unit circle."""
    angle = torch.linspace(0, 2 * math.pi, 200, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    turn = torch.tensor([[0.8, -0.6], [0.6, 0.8]], dtype=torch.float64)
    figure, axes = plt.subplots(1, 3, figsize=(8, 2.7), constrained_layout=True)
    points = []
    for axis, kappa in zip(axes, (1.0, 3.0, 20.0), strict=True):
        matrix = turn @ torch.diag(torch.tensor([1.0, 1 / kappa], dtype=torch.float64)) @ turn.T
        measured = condition_number(matrix).kappa.item()
        ellipse = circle @ matrix
        axis.plot(*circle.T, color="0.75", linewidth=1)
        axis.fill(*ellipse.T, color="C0", alpha=0.35)
        axis.plot(*ellipse.T, color="C0")
        axis.set(title=f"kappa = {measured:.0f}", xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal")
        axis.axis("off")
        points.append(Point("condition", "constructed kappa, measured kappa", kappa, measured))
    _save(figure, path / "idea-condition.svg")
    return points


def draw_graying(path: Path) -> list[Point]:
    """One digit under pixel graying, and the spectrum of its patch matrix."""
    image = load_digits(0).test_x[0].double()
    figure = plt.figure(figsize=(9, 4.2), constrained_layout=True)
    grid = figure.add_gridspec(2, 7)
    spectrum = figure.add_subplot(grid[:, 4:])
    points = []
    for column, eps in enumerate(EPS):
        grayed = PixelGraying(2, eps=eps, method="svd")(image)
        values = torch.linalg.svdvals(_patches(grayed))
        kappa = (values[0] / values[-1]).item()
        change = grayed - image
        above, below = (figure.add_subplot(grid[row, column]) for row in range(2))
        above.imshow(grayed[0], cmap="gray", vmin=image.min(), vmax=image.max())
        above.set_title(f"eps {eps:g}" if eps < 1 else "as it is", fontsize=10)
        below.imshow(change[0], cmap="RdBu_r", vmin=-1.5, vmax=1.5)
        below.set_title("what changed" if column == 0 else "", fontsize=8)
        for axis in (above, below):
            axis.set(xticks=[], yticks=[])
        spectrum.plot(range(1, 5), values, "o-", label=f"eps {eps:g}: kappa {kappa:.1f}")
        points += [Point("graying", f"eps {eps:g}", i + 1.0, value.item()) for i, value in enumerate(values)]
    spectrum.set(
        title="singular values of its 16 patches", xlabel="number", xticks=range(1, 5), ylim=(0, None)
    )
    spectrum.legend(frameon=False)
    _save(figure, path / "idea-graying.svg")
    return points


def _patches(image: Tensor) -> Tensor:
    """(1, 8, 8) -> 16 patches of 2 x 2 pixels."""
    return image.reshape(4, 2, 4, 2).movedim(1, 2).reshape(16, 4)


def branches(kappa: float, seed: int) -> dict[str, Tensor]:
    """What a linear attention, a softmax attention and a linear FFN make of tokens with this kappa."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    U, V = (torch.linalg.qr(normal(TOKENS, CHANNELS))[0] for _ in range(2))
    s = torch.logspace(0, -math.log10(kappa), CHANNELS, dtype=torch.float64)
    X = (U * s) @ V.T
    X = X * (X.numel() ** 0.5 / X.norm())  # entries of size 1, as after a norm
    Wq, Wk, Wv, W1, W2 = (torch.linalg.qr(normal(CHANNELS, CHANNELS))[0] for _ in range(5))
    scores = X @ Wq @ (X @ Wk).T / CHANNELS**0.5
    linear, softmax = scores @ X @ Wv / TOKENS, scores.softmax(-1) @ X @ Wv
    return {
        "FFN, no skip": X @ W1 @ W2,
        "linear attention, no skip": linear,
        "linear attention + skip": linear + X,
        "softmax attention, no skip": softmax,
        "softmax attention + skip": softmax + X,
    }


def draw_skip(path: Path) -> list[Point]:
    """Kappa after one layer over kappa before it."""
    points = []
    for kappa in KAPPAS:
        draws = [branches(kappa, seed) for seed in range(DRAWS)]
        for name in draws[0]:
            after = condition_number(torch.stack([draw[name] for draw in draws])).kappa
            points.append(Point("skip", name, kappa, after.median().item()))
    figure, axis = plt.subplots(figsize=(7, 4), constrained_layout=True)
    styles = ("s-", "o-", "o--", "^-", "^--")
    colours = ("tab:green", "tab:red", "tab:red", "tab:purple", "tab:purple")
    for (name, line), style, colour in zip(_series(points), styles, colours, strict=True):
        axis.loglog(
            *zip(*((p.x, p.y) for p in line), strict=True), style, color=colour, label=name, markersize=4
        )
    axis.loglog(KAPPAS, [kappa**3 for kappa in KAPPAS], ":", color="0.5", label="kappa cubed")
    axis.set(title="One layer", xlabel="kappa of the tokens before", ylabel="kappa after")
    axis.legend(frameon=False, fontsize=8)
    _save(figure, path / "idea-skip.svg")
    return points


def draw_broadcast(path: Path, epochs: int) -> list[Point]:
    """Tokens move half-way to their mean; entropy of attention after training with and without CB."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    tokens = torch.randn(12, 2, generator=torch.Generator().manual_seed(1))
    moved, mean = broadcast(tokens), tokens.mean(0)
    for start, end in zip(tokens, moved, strict=True):
        left.annotate("", end.tolist(), start.tolist(), arrowprops={"arrowstyle": "->", "color": "0.6"})
    left.plot(*tokens.T, "o", color="0.6", label="before")
    left.plot(*moved.T, "o", color="C0", label="after")
    left.plot(*mean, "x", color="black", label="mean")
    left.set(title="CB: half-way to the mean", xticks=[], yticks=[], aspect="equal")
    left.legend(frameon=False, fontsize=8)
    points = list(entropies(epochs))
    for name, line in _series(points):
        values = [p.y for p in line]
        deviations = [p.deviation for p in line]
        right.errorbar([p.x for p in line], values, deviations, fmt="o-", capsize=2, label=name)
    right.set(title="entropy of trained attention", xlabel="block", ylabel="entropy / log n")
    right.legend(frameon=False)
    _save(figure, path / "idea-broadcast.svg")
    return points


def entropies(epochs: int) -> Iterator[Point]:
    """Mean and deviation over the seeds, for each block of a small ViT."""
    edits: dict[str, Any] = {"as it is": None, "CB in every MLP": wp.broadcast_context}
    for name, edit in edits.items():
        by_block: dict[int, list[float]] = {}
        for seed in SEEDS:
            data, model = load_digits(seed), build_model(seed)
            if edit is not None:
                edit(model)
            *_, loss = train(model, data, epochs, seed)
            print(f"{name}, seed {seed}: loss {loss:.3f} after {epochs} epochs", flush=True)
            for record in wp.diagnose(model, data.test_x[:64], what="density").select("entropy", head=None):
                by_block.setdefault(record.block, []).append(record.value)
        for block, values in by_block.items():
            yield Point("broadcast", name, block, statistics.fmean(values), statistics.stdev(values))


def _series(points: list[Point]) -> Iterator[tuple[str, list[Point]]]:
    for name in dict.fromkeys(point.series for point in points):
        yield name, [point for point in points if point.series == name]


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})  # drawn again, the file is the same


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    parser.add_argument("--csv", type=Path, default=Path("results/ideas.csv"))
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams.update({"svg.hashsalt": "wellposed", "svg.fonttype": "none", "font.family": "sans-serif"})
    arguments.images.mkdir(parents=True, exist_ok=True)
    points = [*draw_condition(arguments.images), *draw_graying(arguments.images)]
    points += [*draw_skip(arguments.images), *draw_broadcast(arguments.images, arguments.epochs)]
    with arguments.csv.open("w", newline="", encoding="utf-8") as file:
        file.write(
            f"# torch {torch.__version__}, CPU; skip: median of {DRAWS} draws, {TOKENS} tokens of {CHANNELS} "
            f"channels, float64; broadcast: mean and deviation of {len(SEEDS)} seeds, "
            f"{arguments.epochs} epochs\n"
        )
        writer = csv.writer(file)
        writer.writerow(Point._fields)
        writer.writerows(
            [p.picture, p.series, f"{p.x:g}", f"{p.y:.5g}", f"{p.deviation:.3g}"] for p in points
        )


if __name__ == "__main__":
    main()
