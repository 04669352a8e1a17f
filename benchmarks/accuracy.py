"""How right spectral graying and its largest singular value are, compared with LAPACK in float64.

python -m benchmarks spectral [--packed FILE.npz] [--weights FILE] [--images 64] [--out FILE.csv]
python -m benchmarks largest [--matrices 400] [--out FILE.csv]
"""

from io import BytesIO
from pathlib import Path
from typing import Annotated

import numpy as np
import timm
import torch
import typer
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.timing import write
from wellposed.linalg import spectral_plan, spectral_power
from wellposed.linalg.spectral_chain import LANCZOS_STEPS, START_SQUARINGS, top_eigenpair
from wellposed.linalg.svd_power import _adjoint

EPS = (0.3, 0.5, 0.7, 0.9, 0.99)
TOKENS, CHANNELS = 196, 768


def prescribed(kappa: float) -> dict[str, Tensor]:
    """Singular values from 1 to 1 / kappa."""
    rank = torch.arange(1.0, TOKENS + 1, dtype=torch.float64)
    smallest = 1 / kappa
    half = TOKENS // 2
    near = torch.linspace(1, 1.001, half, dtype=torch.float64)
    return {
        f"geometric, kappa {kappa:g}": smallest ** ((rank - 1) / (TOKENS - 1)),
        f"power law, kappa {kappa:g}": rank
        ** -(torch.tensor(kappa).log() / torch.tensor(TOKENS).log()).item(),
        f"clustered, kappa {kappa:g}": torch.cat([torch.ones(1), smallest**0.5 * near, smallest * near])[
            :TOKENS
        ],
        f"repeated, kappa {kappa:g}": torch.where(
            rank == 1, 1, torch.where(rank < half, smallest**0.5, smallest)
        ),
    }


def with_spectrum(s: Tensor, images: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    U = torch.linalg.qr(torch.randn(images, TOKENS, TOKENS, generator=generator, dtype=torch.float64))[0]
    V = torch.linalg.qr(torch.randn(images, CHANNELS, TOKENS, generator=generator, dtype=torch.float64))[0]
    return ((U * s) @ V.mT).float()


def real_tokens(file: Path, count: int, weights: Path | None = None) -> dict[str, Tensor]:
    with np.load(file) as packed:
        ends, raw = packed["test_offsets"], packed["test_bytes"]
        pictures = [Image.open(BytesIO(raw[ends[i] : ends[i + 1]].tobytes())) for i in range(count)]
        pixels = torch.stack([torch.as_tensor(np.array(picture.convert("RGB"))) for picture in pictures])
    images = (pixels.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    torch.manual_seed(0)
    embed = timm.create_model("vit_base_patch16_224").patch_embed
    patches = images.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 1, 4, 5)
    with torch.no_grad():
        tokens = {
            "pixel patches": patches.reshape(count, TOKENS, CHANNELS),
            "patch embeddings": embed(images),
        }
        if weights is not None:
            trained = timm.create_model("deit_tiny_patch16_224").eval()
            trained.load_state_dict(load_file(weights))
            mean, std = (torch.tensor(trained.default_cfg[name])[:, None, None] for name in ("mean", "std"))
            embedded = trained.patch_embed((images / 2 + 0.5 - mean) / std)
            tokens |= {"DeiT-Ti, patches": embedded, "DeiT-Ti, into block 0": trained._pos_embed(embedded)}
    return tokens


def measure(x: Tensor, eps: float, precision: str) -> dict[str, object]:
    plan = spectral_plan(x, precision=precision)
    x = x.clone().requires_grad_()
    y = spectral_power(x, eps, precision=precision)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    y.backward(grad)
    # The reference on the CPU: LAPACK's singular vectors are right to the last digits.
    U, s, Vh = torch.linalg.svd(x.detach().double().cpu(), full_matrices=False)
    relative = s / s[:, :1]
    got = torch.linalg.svdvals(y.detach().double().cpu())
    expected = s[:, :1] * relative**eps
    above = relative >= plan.floor * (1 - 1e-3)
    exact = _adjoint(U, s, Vh.mT, grad.double().cpu(), eps, 1e-7, True)
    slope_error = (x.grad.cpu() - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    # A gradient beside the exact one has a meaning where the whole spectrum is above the floor.
    whole = above.all(1)
    return {
        "engine": plan.engine,
        "precision": plan.precision,
        "floor": f"1/{1 / plan.floor:.0f}",
        "eps": eps,
        "images": len(x),
        "median_kappa": f"{(1 / relative[:, -1]).median().item():.3g}",
        "values": f"{((got - expected) / expected).abs()[above].max().item():.2e}",
        "median_kappa_after": f"{(got[:, 0] / got[:, -1]).median().item():.4g}",
        "by_formula": f"{(relative[:, -1] ** -eps).median().item():.4g}",
        "images_above_floor": int(whole.sum()),
        "gradient": f"{slope_error[whole].max().item():.2e}" if whole.any() else "",
    }


def spectral(
    packed: Annotated[Path | None, typer.Option(help="images of 224 pixels")] = None,
    images: Annotated[int, typer.Option(help="how many of them")] = 64,
    each: Annotated[int, typer.Option(help="matrices of a prescribed spectrum")] = 4,
    weights: Annotated[
        Path | None, typer.Option(help="of timm's deit_tiny_patch16_224, with --packed")
    ] = None,
    precision: Annotated[list[str] | None, typer.Option(help="[default: float64, float32]")] = None,
    out: Path | None = None,
) -> None:
    """Spectral graying compared with a float64 SVD, over prescribed spectra and real tokens.

    With a file of ``wellposed pack`` the tokens are the 16-pixel patches of its first test images of 224
    pixels, and their embedding by a ViT-B/16 at its initialisation. ``values`` is the largest relative error
    of a singular value above the floor; ``gradient``, for a random upstream gradient, the largest of ||got -
    exact|| / ||exact|| over the images whose whole spectrum is above it.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = {
        name: with_spectrum(s, each) for kappa in (1e1, 1e3, 1e5) for name, s in prescribed(kappa).items()
    }
    inputs["flat Gaussian"] = torch.randn(each, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0))
    if packed:
        inputs |= real_tokens(packed, images, weights)
    rows = []
    for each_precision in precision or ("float64", "float32"):
        for name, x in inputs.items():
            for eps in EPS:
                rows.append({"tokens": name, **measure(x.to(device), eps, each_precision)})
                print(*rows[-1].values(), sep="  ", flush=True)
    if out is not None:
        comment = f"{TOKENS} x {CHANNELS} tokens (DeiT-Ti: 196 or 197 x 192), compared with a float64 SVD"
        write(out, comment, list(rows[0]), [list(row.values()) for row in rows])


QUANTILES = (0.5, 0.9, 0.99, 1.0)


def grams(count: int) -> dict[str, Tensor]:
    """X X^T of tokens whose leading singular values lie near each other."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(count, TOKENS, CHANNELS, generator=generator, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(count, TOKENS, TOKENS, generator=generator, dtype=torch.float64))[0]
    s = torch.linspace(1, 0.01, TOKENS, dtype=torch.float64)
    return {"flat Gaussian": X @ X.mT, "evenly spaced, 1 to 0.01": (Q * s.square()) @ Q.mT}


def largest(
    matrices: int = 400,
    out: Path | None = None,
) -> None:
    """The largest singular value where none stands out.

    ``squarings`` are those of the Gram matrix that Lanczos' initial vector is made of. The errors are
    relative and quantiles over the matrices; they are of the portable code, on a GPU too.
    """
    rows: list[list[object]] = []
    for name, A in grams(matrices).items():
        exact = torch.linalg.eigvalsh(A)[:, -1].sqrt()
        for steps, squarings in ((24, 0), (LANCZOS_STEPS, 0), (LANCZOS_STEPS, START_SQUARINGS)):
            got = top_eigenpair(A.float(), steps, squarings)[0].double().sqrt()
            errors = ((got - exact) / exact).abs()
            told = (f"{errors.quantile(q).item():.1e}" for q in QUANTILES)
            rows.append([name, steps, squarings, matrices, *told])
            print(*rows[-1], sep="  ", flush=True)
    if out is not None:
        comment = f"{TOKENS} tokens, float32, beside LAPACK in float64"
        columns = ["spectrum", "steps", "squarings", "matrices", "median", "90%", "99%", "largest"]
        write(out, comment, columns, rows)
