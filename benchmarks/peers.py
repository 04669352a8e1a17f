"""Measurements on a CPU compared with the plain way to the same numbers: process time of a thread, in turns.

python -m benchmarks peers [--rounds 5] [--out DIR]

    kappa      condition_number; the plain way is LAPACK's singular values in float64
    ntk        images mapped together; one backward pass for each row
    jacobian   the largest singular value to 1%; the largest and the smallest
    dct        graying by FFT; the DCT as two matrix products
    diagnose   of a ViT-Tiny; a forward pass, and the same with singular values for each condition number
    import     wellposed.nn.functional; torch
"""

import functools
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Annotated
from unittest import mock

import timm
import torch
import typer
from torch import nn

import wellposed as wp
from benchmarks.graying_peers import SHAPES, gray_by_dct_products
from benchmarks.timing import in_turns, write_environment
from wellposed.files import write_cells
from wellposed.linalg import condition_number, spectrum
from wellposed.nn.functional import gray
from wellposed.probes import jacobian_spectrum, ntk
from wellposed.probes.ntk_gradients import RowFunction

NAME = "peers-cpu"
Work = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Our time over that of the plain way: median, smallest and largest of the rounds."""

    what: str
    size: str
    plain: str
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int
    note: str = ""


def by_svd(work: Work) -> None:
    """The work with LAPACK's SVD for every condition number."""
    with mock.patch.object(spectrum, "_values", lambda x, _: (torch.linalg.svdvals(x.double()), False)):
        work()


def row_by_row(work: Work) -> None:
    with mock.patch.object(RowFunction, "map_images", return_value=None):
        work()


def _seconds(work: Work) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def seconds_to_import(module: str) -> float:
    """Process time of a fresh interpreter that imports it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compared(
    what: str, size: str, plain: str, ours: Callable[[], float], other: Callable[[], float], rounds: int
) -> Row:
    ours()  # both warm up
    other()
    ratios = [own / peer for peer, own in in_turns(other, ours, rounds)]
    return Row(what, size, plain, statistics.median(ratios), min(ratios), max(ratios), rounds)


def _calls(images: int) -> Iterator[tuple[str, str, str, Work, Work]]:
    small = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10).eval()
    pictures = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    kernel = functools.partial(ntk, small, pictures)
    yield "ntk", "ViT-Tiny, 8 images of 32 px", "row by row", kernel, lambda: row_by_row(kernel)
    few = timm.create_model("vit_tiny_patch16_224", depth=1).eval()
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    yield (
        "jacobian, largest",
        "attention, 197 x 192",
        "both ends",
        lambda: jacobian_spectrum(few, image, k=1, ends="largest"),
        lambda: jacobian_spectrum(few, image, k=1),
    )
    vit = timm.create_model("vit_tiny_patch16_224").eval()
    x = torch.randn(images, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    diagnosis = functools.partial(wp.diagnose, vit, x, batch_size=images)
    size = f"ViT-Tiny, {images} images"
    yield "diagnose", size, "forward", diagnosis, lambda: _forward(vit, x)
    yield "diagnose", size, "with SVDs", diagnosis, lambda: by_svd(diagnosis)
    for shape in SHAPES:
        x = torch.randn((8, *shape[1:]), generator=torch.Generator().manual_seed(0)) + 0.3
        size = " x ".join(map(str, x.shape))
        yield (
            "kappa",
            size,
            "svdvals",
            lambda x=x: condition_number(x),
            lambda x=x: torch.linalg.svdvals(x.double()),
        )
    for shape in SHAPES:
        x = torch.randn((8, *shape[1:]), generator=torch.Generator().manual_seed(0)) + 0.3
        size = " x ".join(map(str, x.shape))
        yield "dct", size, "products", lambda x=x: gray(x, 0.95, "dct"), lambda x=x: gray_by_dct_products(x)


def _forward(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def measure(rounds: int, images: int) -> Iterator[Row]:
    yield compared(
        "import",
        "wellposed.nn.functional",
        "torch",
        lambda: seconds_to_import("wellposed.nn.functional"),
        lambda: seconds_to_import("torch"),
        rounds,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for what, size, plain, ours, other in _calls(images):
            yield compared(what, size, plain, lambda o=ours: _seconds(o), lambda o=other: _seconds(o), rounds)
    finally:
        torch.set_num_threads(before)


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    images: Annotated[int, typer.Option(min=1, help="of the diagnosis")] = 16,
    out: Annotated[Path | None, typer.Option(help=f"folder for {NAME}.csv")] = None,
) -> None:
    """Kappa, NTK, Jacobian, DCT, import and diagnosis on a CPU, compared with the plain way."""
    if out is not None:
        write_environment(out, NAME, {"rounds": rounds, "images": images, "threads": 1})
    rows: list[Row] = []
    for row in measure(rounds, images):
        rows.append(row)
        print(*astuple(row), sep="  ", flush=True)
        if out is not None:
            cells = ([f"{v:.4g}" if isinstance(v, float) else v for v in astuple(each)] for each in rows)
            write_cells(out / f"{NAME}.csv", [[f.name for f in fields(Row)], *cells], lineterminator="\n")
