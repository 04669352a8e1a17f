"""Spectral graying beside ``torch.linalg.svd`` alone on a CPU, in turns.

    python benchmarks/spectral_cpu.py [--rounds 11] [--out results/spectral-cpu.csv]

First quartile, median and third quartile over the rounds.
"""

import argparse
from pathlib import Path

import torch
from timing import compare, quartiles, seconds, write

from wellposed.linalg import spectral_plan, spectral_power

SHAPE = (64, 196, 768)
EPS = 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))

    def spectral() -> float:
        return seconds(lambda: spectral_power(x, EPS))

    def svd() -> float:
        return seconds(lambda: torch.linalg.svd(x, full_matrices=False))

    compare(spectral, svd, 1)  # warm up
    pairs = compare(spectral, svd, options.rounds)
    measured = {
        "spectral ms": [1e3 * own for own, _ in pairs],
        "svd ms": [1e3 * other for _, other in pairs],
        "svd / spectral": [other / own for own, other in pairs],
    }
    rows: list[list[object]] = [
        [name, *(f"{value:.4g}" for value in quartiles(values))] for name, values in measured.items()
    ]
    print(spectral_plan(x))
    for row in rows:
        print(*row, sep="  ")
    if options.out is not None:
        shape = " x ".join(map(str, SHAPE))
        comment = f"{shape}, eps {EPS}, {options.rounds} rounds; {spectral_plan(x)}"
        write(options.out, comment, ["what", "first quartile", "median", "third quartile"], rows)


if __name__ == "__main__":
    main()
