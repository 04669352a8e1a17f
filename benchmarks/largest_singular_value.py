"""How right the largest singular value is where none stands out, beside LAPACK in float64.

    python benchmarks/largest_singular_value.py [--matrices 400] [--out FILE.csv]

``squarings`` are those of the Gram matrix that Lanczos' start is made of. The errors are relative and
quantiles over the matrices; they are of the portable code, on a GPU too.
"""

import argparse
from pathlib import Path

import torch
from timing import write
from torch import Tensor

from wellposed.linalg.top_eigen import LANCZOS_STEPS, START_SQUARINGS, top_eigenpair

TOKENS, CHANNELS = 196, 768
QUANTILES = (0.5, 0.9, 0.99, 1.0)


def grams(count: int) -> dict[str, Tensor]:
    """X X^T of tokens whose leading singular values lie near each other."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(count, TOKENS, CHANNELS, generator=generator, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(count, TOKENS, TOKENS, generator=generator, dtype=torch.float64))[0]
    s = torch.linspace(1, 0.01, TOKENS, dtype=torch.float64)
    return {"flat Gaussian": X @ X.mT, "evenly spaced, 1 to 0.01": (Q * s.square()) @ Q.mT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--matrices", type=int, default=400)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[list[object]] = []
    for name, A in grams(options.matrices).items():
        exact = torch.linalg.eigvalsh(A)[:, -1].sqrt()
        for steps, squarings in ((24, 0), (LANCZOS_STEPS, 0), (LANCZOS_STEPS, START_SQUARINGS)):
            got = top_eigenpair(A.float(), steps, squarings)[0].double().sqrt()
            errors = ((got - exact) / exact).abs()
            told = (f"{errors.quantile(q).item():.1e}" for q in QUANTILES)
            rows.append([name, steps, squarings, options.matrices, *told])
            print(*rows[-1], sep="  ", flush=True)
    if options.out is not None:
        comment = f"{TOKENS} tokens, float32, beside LAPACK in float64"
        columns = ["spectrum", "steps", "squarings", "matrices", "median", "90%", "99%", "largest"]
        write(options.out, comment, columns, rows)


if __name__ == "__main__":
    main()
