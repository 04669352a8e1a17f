"""How right spectral graying is: singular values and gradient beside a float64 SVD.

    python benchmarks/spectral_accuracy.py [--packed FILE.npz] [--images 64] [--out FILE.csv]

Over prescribed spectra and, with a file of ``wellposed pack``, over real tokens: the 16-pixel patches of its
first test images of 224 pixels, and their embedding by a freshly initialised ViT-B/16. ``values`` is the
largest relative error of a singular value above the floor; ``gradient``, for a random upstream gradient, the
largest of ||got - exact|| / ||exact|| over the images whose whole spectrum is above it.
"""

import argparse
from io import BytesIO
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from timing import write
from torch import Tensor

from wellposed.linalg import spectral_plan, spectral_power
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


def real_tokens(file: Path, count: int) -> dict[str, Tensor]:
    with np.load(file) as packed:
        ends, raw = packed["test_offsets"], packed["test_bytes"]
        pictures = [Image.open(BytesIO(raw[ends[i] : ends[i + 1]].tobytes())) for i in range(count)]
        pixels = torch.stack([torch.as_tensor(np.array(picture.convert("RGB"))) for picture in pictures])
    images = (pixels.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    torch.manual_seed(0)
    embed = timm.create_model("vit_base_patch16_224").patch_embed
    patches = images.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 1, 4, 5)
    with torch.no_grad():
        return {"pixel patches": patches.reshape(count, TOKENS, CHANNELS), "patch embeddings": embed(images)}


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
        "images_above_floor": int(whole.sum()),
        "gradient": f"{slope_error[whole].max().item():.2e}" if whole.any() else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--packed", type=Path, help="images of 224 pixels")
    parser.add_argument("--images", type=int, default=64, help="how many of them")
    parser.add_argument("--each", type=int, default=4, help="matrices of a prescribed spectrum")
    parser.add_argument("--precision", nargs="*", default=["float64", "float32"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = {
        name: with_spectrum(s, options.each)
        for kappa in (1e1, 1e2, 1e3, 1e4)
        for name, s in prescribed(kappa).items()
    }
    inputs["flat Gaussian"] = torch.randn(
        options.each, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0)
    )
    if options.packed:
        inputs |= real_tokens(options.packed, options.images)
    rows = []
    for precision in options.precision:
        for name, x in inputs.items():
            for eps in EPS:
                rows.append({"tokens": name, **measure(x.to(device), eps, precision)})
                print(*rows[-1].values(), sep="  ", flush=True)
    if options.out is not None:
        comment = f"{TOKENS} x {CHANNELS} tokens, beside a float64 SVD"
        write(options.out, comment, list(rows[0]), [list(row.values()) for row in rows])


if __name__ == "__main__":
    main()
