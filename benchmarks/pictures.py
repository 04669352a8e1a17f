"""The pictures of README.md and docs/ideas.md with the numbers in them, and the table of the bounds.

    python -m benchmarks kappa-picture [--out results/kappa-digits]
    python -m benchmarks jacobian-picture [--out results/jacobian-digits]
    python -m benchmarks idea-pictures
    python -m benchmarks bounds-table [--out results/bounds-digits]

Small ViTs (17 tokens of 48 channels, 3 heads, 6 blocks) are trained on the embedded digits for them.
"""

import csv
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.digits import Digits, build_model, load_digits
from wellposed.linalg import condition_number
from wellposed.nn import PixelGraying
from wellposed.nn.functional import broadcast
from wellposed.probes import JacobianSpectrum, bounds, graying_sweep
from wellposed.probes.tables import as_text, bounds_table
from wellposed.records import Record

PROBE_IMAGES = 128


def train(model: nn.Module, data: Digits, epochs: int, seed: int) -> Iterator[float]:
    """AdamW with a one-cycle schedule; yields the mean loss of each epoch."""
    generator = torch.Generator().manual_seed(seed)
    batch = 64
    steps = len(data.train_x) // batch
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=epochs * steps)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(data.train_x), generator=generator)
        total = 0.0
        for indices in order[: steps * batch].reshape(steps, batch):
            loss = nn.functional.cross_entropy(model(data.train_x[indices]), data.train_y[indices])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            total += loss.item()
        yield total / steps


matplotlib.use("Agg")

EPS = (1.0, 0.9, 0.7, 0.5)
VARIANTS: dict[str, Callable[[nn.Module], object]] = {
    "as it is": lambda model: None,
    "no FFN skips": lambda model: wp.remove_skips(model, "ffn"),
    "no attention skips": lambda model: wp.remove_skips(model, "attention"),
}


def spectra(images: Tensor) -> dict[float, Tensor]:
    """Mean singular values of the first block's tokens, relative to the largest, over eps."""
    model = build_model(0).eval()
    caught: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda block, args: caught.append(args[0]))
    with torch.inference_mode():
        model(images)
    tokens = caught[0].double()
    values = {}
    for eps in EPS:
        s = torch.linalg.svdvals(wp.nn.functional.gray(tokens, eps, "svd"))
        values[eps] = (s / s[..., :1]).log().mean(0).exp()
    return values


def kappa_by_block(name: str, data: Digits, epochs: int) -> dict[str, list[Record]]:
    """Median kappa of the attention and FFN branch of each block after training."""
    model = build_model(0)
    VARIANTS[name](model)
    for _ in train(model, data, epochs, seed=0):
        pass
    diagnosis = wp.diagnose(model, data.test_x[:PROBE_IMAGES], what="conditioning")
    return {role: diagnosis.select("kappa", position=f"{role}.branch") for role in ("attention", "ffn")}


def draw_kappa(by_eps: dict[float, Tensor], by_block: dict[str, dict[str, list[Record]]], path: Path) -> None:
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for eps, s in by_eps.items():
        left.semilogy(range(1, len(s) + 1), s, label=f"eps {eps:g}, kappa {s[0] / s[-1]:,.0f}")
    left.set(
        title="Token Graying flattens the spectrum", xlabel="singular value", ylabel="relative to the largest"
    )
    left.legend(frameon=False)
    colours = ("tab:blue", "tab:green", "tab:red")
    for colour, (name, kappas) in zip(colours, by_block.items(), strict=True):
        for role, style in (("attention", "-o"), ("ffn", "--s")):
            label = f"{name}: {'attention' if role == 'attention' else 'FFN'}"
            values = [record.value for record in kappas[role]]
            right.semilogy(values, style, color=colour, label=label, markersize=4)
            bounds = [record.block for record in kappas[role] if record.status == "at least"]
            right.semilogy(bounds, [values[block] for block in bounds], "^", color=colour, markersize=9)
    right.set(title="What a branch adds, without its skip", xlabel="block", ylabel="condition number")
    right.annotate("triangles: at least", (0.02, 0.95), xycoords="axes fraction", color="grey", fontsize=8)
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path.with_suffix(".png"), dpi=120)


def kappa(
    out: Path = Path("results/kappa-digits"),
    epochs: int = 20,
) -> None:
    """The picture of the README: spectra under graying, and kappa block by block with and without skips.

    Trains three times: all skips, none around the FFN, none around attention.
    """
    data = load_digits(0)
    by_eps = spectra(data.test_x[:PROBE_IMAGES])
    by_block = {name: kappa_by_block(name, data, epochs) for name in VARIANTS}
    draw_kappa(by_eps, by_block, out)
    with out.with_suffix(".csv").open("w", newline="") as file:
        file.write(
            f"# torch {torch.__version__}, CPU, {epochs} epochs, seed 0, one run; median over "
            f"{PROBE_IMAGES} test images, float64 SVD of float32 tokens\n"
        )
        writer = csv.writer(file)
        writer.writerow(["model", "branch", "block", "kappa", "status"])
        for name, kappas in by_block.items():
            for role, records in kappas.items():
                writer.writerows([name, role, r.block, f"{r.value:.4g}", r.status] for r in records)


matplotlib.use("Agg")

GRAY_METHODS = ("svd", "dct")


def draw_jacobian(sweeps: dict[str, dict[float, JacobianSpectrum]], path: Path) -> None:
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True, sharey=True)
    for axis, (method, sweep) in zip(axes, sweeps.items(), strict=True):
        for eps, spectrum in sweep.items():
            values = spectrum.relative(10**6)
            shown = values[values > 1e-8]  # LayerNorm makes the others zero
            axis.semilogy(
                range(1, len(shown) + 1), shown, label=f"eps {eps:g}, largest {values_max(spectrum)}"
            )
        axis.set(title=f"Attention Jacobian, tokens grayed by {method.upper()}", xlabel="singular value")
        axis.set_ylim(1e-6, 1.5)
        axis.legend(frameon=False, loc="lower left")
    axes[0].set_ylabel("relative to the largest")
    figure.savefig(path.with_suffix(".png"), dpi=120)


def values_max(spectrum: JacobianSpectrum) -> str:
    return f"{spectrum.sigma_max.value:.3g}"


def jacobian(
    out: Path = Path("results/jacobian-digits"),
    epochs: int = 20,
) -> None:
    """Singular values of an attention Jacobian under graying (Figures 7 and 8 of Always Skip Attention).

    The whole spectrum of the Jacobian of the first block's attention, without its skip, at the grayed tokens
    of one test image: 816 x 816, dense.
    """
    data = load_digits(0)
    model = build_model(0)
    for _ in train(model, data, epochs, seed=0):
        pass
    sweeps = {
        method: graying_sweep(model, data.test_x[:1], EPS, gray_method=method, where="blocks")
        for method in GRAY_METHODS
    }
    draw_jacobian(sweeps, out)
    with out.with_suffix(".csv").open("w", newline="") as file:
        file.write(
            f"# torch {torch.__version__}, CPU, {epochs} epochs, seed 0, one run, one test image; "
            "attention of block 0 without its skip, its input grayed, dense Jacobian in float64\n"
        )
        writer = csv.writer(file)
        writer.writerow(
            ["method", "eps", "sigma max", *(f"sigma {i} / max" for i in (100, 200, 400, 600, 750))]
        )
        for method, sweep in sweeps.items():
            for eps, spectrum in sweep.items():
                values = spectrum.relative(10**6)
                picked = [f"{values[i - 1].item():.3g}" for i in (100, 200, 400, 600, 750)]
                writer.writerow([method, eps, values_max(spectrum), *picked])


matplotlib.use("Agg")

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


def ideas(
    images: Path = Path("docs/images"),
    table: Path = Path("results/ideas.csv"),
    epochs: int = 20,
) -> None:
    """The pictures of docs/ideas.md and results/ideas.csv; two minutes on two CPU cores."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams.update({"svg.hashsalt": "wellposed", "svg.fonttype": "none", "font.family": "sans-serif"})
    images.mkdir(parents=True, exist_ok=True)
    points = [*draw_condition(images), *draw_graying(images)]
    points += [*draw_skip(images), *draw_broadcast(images, epochs)]
    with table.open("w", newline="", encoding="utf-8") as file:
        file.write(
            f"# torch {torch.__version__}, CPU; skip: median of {DRAWS} draws, {TOKENS} tokens of {CHANNELS} "
            f"channels, float64; broadcast: mean and deviation of {len(SEEDS)} seeds, "
            f"{epochs} epochs\n"
        )
        writer = csv.writer(file)
        writer.writerow(Point._fields)
        writer.writerows(
            [p.picture, p.series, f"{p.x:g}", f"{p.y:.5g}", f"{p.deviation:.3g}"] for p in points
        )


def bounds_of_digits(
    out: Path = Path("results/bounds-digits"),
    epochs: int = 20,
) -> None:
    """Do the bounds of Always Skip Attention hold in a trained model, and by what margin?

    Measured kappa of 16 test images compared with the bounds, before and after training.
    """
    data = load_digits(0)
    model = build_model(0)
    images = data.test_x[:16]
    text = [f"torch {torch.__version__}, CPU, seed 0, one run, 16 test images, 6 blocks, 3 heads"]
    text += ["", "before training", as_text(bounds_table(bounds(model, images, images_limit=16)))]
    for _ in train(model, data, epochs, seed=0):
        pass
    text += ["", f"after {epochs} epochs"]
    text += [as_text(bounds_table(bounds(model, images, images_limit=16)))]
    out.with_suffix(".txt").write_text("\n".join(text) + "\n")
    print("\n".join(text))
