"""The kernels for Hopper GPUs: how right they are, and what they take compared with PyTorch's products.

    python -m benchmarks hopper [--quick] [--against SRC] [--out FILE.json]

Needs such a GPU (H100, H200), about two minutes (``--quick``: one), and nothing but torch with its Triton and
typer. Every error is relative to a float64 reference by LAPACK. Times are of CUDA events: medians, with the
smallest and largest. What is compared takes turns; ``--against`` names the source of another version, whose
graying is timed too.
"""

import contextlib
import importlib
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer
from torch import Tensor

from benchmarks import versions
from wellposed.linalg import spectral_plan, spectral_power
from wellposed.linalg.spectral_chain import power_start
from wellposed.linalg.spectral_chain import top_eigenpair as portable_top
from wellposed.linalg.svd_power import _adjoint
from wellposed.nn.functional import gray

PLAN = importlib.import_module("wellposed.linalg.spectral_plan")
EPS = (0.3, 0.5, 0.7, 0.9)
SHAPES = ((64, 196, 768), (64, 196, 192), (256, 64, 192), (32, 576, 384), (256, 196, 768))
ENGINES: dict[str, dict[str, Any]] = {
    "kernels": {},
    "portable float64": {"precision": "float64"},
    "portable float32": {"precision": "float32"},
}


def singular_values(name: str, n: int, kappa: float) -> Tensor:
    part = torch.linspace(0, 1, n, dtype=torch.float64)
    rank = torch.arange(1.0, n + 1, dtype=torch.float64)
    match name:
        case "geometric":
            return kappa**-part
        case "power law":
            return kappa ** -(rank.log() / rank[-1].log())
        case "evenly spaced":
            return 1 - part * (1 - 1 / kappa)
        case "repeated":
            return torch.where(rank <= n // 10, 1.0, 1 / kappa)
    raise ValueError(f"no spectrum is named {name!r}.")


SPECTRA = ("geometric", "power law", "evenly spaced", "repeated")


def orthonormal(rows: int, columns: int, generator: torch.Generator, images: int) -> Tensor:
    made = torch.randn(images, rows, columns, generator=generator, dtype=torch.float64)
    Q: Tensor = torch.linalg.qr(made).Q
    return Q


def tokens(s: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Float32 tokens on the CPU with singular values s, up to rounding."""
    images, n, d = shape
    generator = torch.Generator().manual_seed(n + d)
    U, V = (orthonormal(side, len(s), generator, images) for side in (n, d))
    return ((U * s) @ V.mT).float()


def run(engine: str, function: Callable[[], Any]) -> Any:
    """The function with the kernels, or without them."""
    before = PLAN._has_kernels
    if engine != "kernels":
        PLAN._has_kernels = lambda device: False
    try:
        return function()
    finally:
        PLAN._has_kernels = before


def value_errors(x: Tensor, s: Tensor, eps: float, engine: str) -> dict[str, float]:
    """Of the singular values above the floor, and of the largest, whose error all share; s are those of x."""
    on_gpu, options = x.cuda(), ENGINES[engine]
    floor = run(engine, lambda: spectral_plan(on_gpu, **options)).floor
    y = run(engine, lambda: spectral_power(on_gpu, eps, **options))
    got = torch.linalg.svdvals(y.double().cpu())
    off = got / (s[:, :1] * (s / s[:, :1]) ** eps) - 1
    above = s >= 1.001 * floor * s[:, :1]
    return {"worst": off[above].abs().max().item(), "largest value": off[:, 0].abs().max().item()}


def gradient_errors(x: Tensor, eps: float, engine: str) -> dict[str, float]:
    """Of the gradient, for a random upstream and the worst of 48 upstreams u_i v_j^T."""
    U, s, Vh = torch.linalg.svd(x[:1].double(), full_matrices=False)
    generator = torch.Generator().manual_seed(1)
    n = s.shape[1]
    i, j = (torch.randint(n, (48,), generator=generator) for _ in range(2))
    i[:6], j[:6] = torch.tensor([0, 0, n - 1, n - 1, 0, 1]), torch.tensor([0, n - 1, 0, n - 1, 1, 0])
    random = torch.randn(1, *x.shape[1:], generator=generator, dtype=torch.float64)
    upstream = torch.cat([random, U[0].mT[i][:, :, None] * Vh[0][j][:, None]])
    leaf = x[:1].expand(len(upstream), -1, -1).cuda().contiguous().requires_grad_()
    y = run(engine, lambda: spectral_power(leaf, eps, **ENGINES[engine]))
    (got,) = torch.autograd.grad(y, leaf, upstream.float().cuda())
    exact = _adjoint(U, s, Vh.mT, upstream, eps, 1e-9, True)
    off = (got.cpu().double() - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    return {"random": off[0].item(), "directions": off[1:].max().item()}


def accuracy() -> list[dict[str, Any]]:
    rows = []
    for shape in ((2, 196, 768), (2, 64, 192)):
        for kappa in (1e2, 1e4):
            for name in SPECTRA:
                x = tokens(singular_values(name, min(shape[1:]), kappa), shape)
                s = torch.linalg.svdvals(x.double())
                for eps in EPS:
                    errors = value_errors(x, s, eps, "kernels") | gradient_errors(x, eps, "kernels")
                    at = f"{shape[1]} x {shape[2]}"
                    rows.append({"shape": at, "spectrum": name, "kappa": kappa, "eps": eps, **errors})
                    show(rows[-1])
    return rows


def many_near_the_largest(images: int = 8, engines: tuple[str, ...] = tuple(ENGINES)) -> list[dict[str, Any]]:
    """576 x 384 with kappa 10: hundreds of singular values within a few percent of the largest."""
    rows = []
    for name in (*SPECTRA, "Gaussian"):
        shape = (images, 576, 384)
        if name == "Gaussian":
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        else:
            x = tokens(singular_values(name, 384, 10.0), shape)
        s = torch.linalg.svdvals(x.double())
        for engine in engines:
            for eps in (0.3, 0.7):
                errors = value_errors(x, s, eps, engine)
                rows.append({"spectrum": name, "engine": engine, "eps": eps, **errors})
                show(rows[-1])
    return rows


def orthogonal_to_the_start() -> list[dict[str, Any]]:
    """Matrices whose leading vector is orthogonal to the fixed vector that Lanczos might start from."""
    rows = []
    for n in (2, 30, 196):
        index = torch.arange(1, n + 1, dtype=torch.float64)
        hashed = torch.arange(1, n + 1) * 2654435761 % 2**32
        hashed = (hashed ^ (hashed >> 15)) * 2246822519 % 2**32
        scattered = 0.5 + ((hashed ^ (hashed >> 13)) & 0xFFFF).double() / 65536
        for start_name, start in (("golden", 0.5 + torch.frac(index * 0.61803399)), ("hashed", scattered)):
            u = torch.roll(start, 1)
            u = torch.nn.functional.normalize(u - (u @ start) / (start @ start) * start, dim=0)
            rest = torch.eye(n, dtype=torch.float64) - u[:, None] * u
            # Singular values of 1 and 0.5, then as many zeros as make it wide.
            x = (u[:, None] * u + 0.5 * rest).float()
            x = torch.nn.functional.pad(x, (0, n))[None]
            errors = value_errors(x, torch.linalg.svdvals(x.double()), 0.5, "kernels")
            rows.append({"tokens": n, "orthogonal to": start_name, **errors})
            show(rows[-1])
    return rows


def milliseconds(calls: dict[str, Callable[[], Any]], repeats: int = 15) -> dict[str, list[float]]:
    """In turns: each call's median, smallest and largest."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 3):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if round_ >= 3:
                found[name].append(start.elapsed_time(end))
    return {name: [statistics.median(own), min(own), max(own)] for name, own in found.items()}


def times(shapes: tuple[tuple[int, int, int], ...] = SHAPES, repeats: int = 15) -> list[dict[str, Any]]:
    rows = []
    for shape in shapes:
        generator = torch.Generator().manual_seed(0)
        x = (torch.randn(shape, generator=generator) + 0.3).cuda()
        upstream = torch.randn(shape, generator=generator).cuda()

        def forward(engine: str, x: Tensor = x, **more: float) -> Tensor:
            with torch.no_grad():
                out: Tensor = run(engine, lambda: spectral_power(x, 0.7, **ENGINES[engine], **more))
            return out

        def both(engine: str, x: Tensor = x, grad: Tensor = upstream, **more: float) -> Tensor:
            leaf = x.detach().requires_grad_()
            y = run(engine, lambda: spectral_power(leaf, 0.7, **ENGINES[engine], **more))
            return torch.autograd.grad(y, leaf, grad)[0]

        calls: dict[str, Callable[[], Any]] = {}
        for engine in ENGINES:
            calls[f"{engine}, forward"] = lambda engine=engine: forward(engine)
            calls[f"{engine}, forward+backward"] = lambda engine=engine: both(engine)
        calls["kernels, floor 1e-4, forward"] = lambda: forward("kernels", floor=1e-4)
        calls["kernels, floor 1e-4, forward+backward"] = lambda: both("kernels", floor=1e-4)
        calls["dct, forward+backward"] = lambda x=x, grad=upstream: dct_both(x, grad)
        for name, (median, low, high) in milliseconds(calls, repeats).items():
            at = " x ".join(map(str, shape))
            rows.append({"shape": at, "what": name, "ms": median, "low": low, "high": high})
            show(rows[-1])
        rows += parts_of_the_largest(x)
    return rows


def dct_both(x: Tensor, upstream: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(gray(leaf, 0.95, "dct"), leaf, upstream)[0]


def parts_of_the_largest(x: Tensor) -> list[dict[str, Any]]:
    """What the largest eigenvalue takes: the start by squarings, all of it by the kernel, by products."""
    engine = importlib.import_module("wellposed.linalg.hopper.engine")
    X = x if x.shape[1] <= x.shape[2] else x.mT
    n = X.shape[1]
    A = torch.zeros(len(X), engine.padded(n), engine.padded(n), device=x.device)
    A[:, :n, :n] = X @ X.mT
    calls: dict[str, Callable[[], Any]] = {
        "start": lambda: power_start(A, engine.START_SQUARINGS, torch.bfloat16),
        "start and Lanczos kernel": lambda: engine.top_eigenpair(A, n),
        "portable": lambda: portable_top(A[:, :n, :n].contiguous()),
    }
    exact = torch.linalg.eigvalsh(A[:8, :n, :n].double().cpu())[:, -1]
    error = (engine.top_eigenpair(A, n)[0][:8].double().cpu() / exact - 1).abs().max().item()
    rows = []
    for name, (median, low, high) in milliseconds(calls).items():
        at = " x ".join(map(str, x.shape))
        rows.append(
            {"shape": at, "what": f"largest eigenvalue: {name}", "ms": median, "low": low, "high": high}
        )
        show(rows[-1])
    show({"shape": " x ".join(map(str, x.shape)), "error of the largest eigenvalue": error})
    return rows


def programs() -> dict[str, bool]:
    """Whether compiled, mapped and recorded calls give what an eager call gives."""
    x = tokens(singular_values("geometric", 196, 1e4), (2, 196, 768)).cuda()
    expected = spectral_power(x, 0.7)
    found = {"again": torch.equal(expected, spectral_power(x, 0.7))}
    compiled = torch.compile(lambda x: spectral_power(x, 0.7), fullgraph=True)
    found["compiled"] = torch.equal(expected, compiled(x))
    found["vmap"] = torch.equal(expected, torch.vmap(lambda x: spectral_power(x, 0.7))(x[:, None])[:, 0])
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        out = spectral_power(x, 0.7)
    out.zero_()
    recorded.replay()
    found["CUDA graph"] = torch.equal(expected, out)
    bad = torch.cat([x[:1], torch.zeros_like(x[:1]), x[:1] * torch.nan]).requires_grad_()
    y = spectral_power(bad, 0.7)
    (slope,) = torch.autograd.grad(y, bad, torch.ones_like(y))
    found["zeros and NaN stay alone"] = bool(
        (y[0] - expected[0]).abs().max() == 0 and (y[1] == 0).all() and y[2].isnan().all()
    )
    found["their gradients"] = bool(
        slope[0].isfinite().all() and (slope[1] == 1).all() and not slope[2].any()
    )
    show(found)
    return found


def in_turns(turns: versions.Versions, wanted: list[versions.Case]) -> list[dict[str, Any]]:
    """Graying by this version and another one, which warm up while errors are looked at."""
    turns.warmed(wanted)
    rows = []
    for case in wanted:
        row = turns.row(case, rounds=5)
        versions.show(row)
        rows.append(vars(row))
    return rows


def show(row: dict[str, Any]) -> None:
    cells = (
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )
    print("  ".join(cells), flush=True)


def main(
    out: Annotated[Path | None, typer.Option(help="write all of it here too, as JSON")] = None,
    quick: Annotated[
        bool, typer.Option(help="fewer matrices and shapes: what a new version has to show")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="source folder of another version, to be timed in turns with this one")
    ] = None,
) -> None:
    """Accuracy and time of the kernels for Hopper GPUs; about two minutes on an H100 or H200."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit(
            "expected a Hopper GPU (H100, H200), got none: tests/linalg/test_hopper.py interprets."
        )
    plan = spectral_plan(torch.zeros(2, 196, 768, device="cuda"))
    content: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "plan": str(plan),
    }
    show(content)
    parts: dict[str, Callable[[], Any]] = {
        "orthogonal to the start": orthogonal_to_the_start,
        "many near the largest": many_near_the_largest,
        "times": times,
        "accuracy": accuracy,
        "programs": programs,
    }
    if quick:
        two = ("kernels", "portable float64")
        parts = {
            "many near the largest": lambda: many_near_the_largest(2, two),
            "orthogonal to the start": orthogonal_to_the_start,
            "times": lambda: times(SHAPES[:4], repeats=7),
            "programs": programs,
        }
    with contextlib.ExitStack() as stack:
        if against is not None:
            turns = stack.enter_context(versions.Versions(against, "cuda"))
            wanted = versions.cases("cuda", repeats=5)
            turns.begin(wanted)
            # After the errors, whose references are made while the other version compiles its kernels.
            before = list(parts)[:1]
            rest = {name: parts.pop(name) for name in list(parts) if name not in before}
            parts |= {"in turns with another version": lambda: in_turns(turns, wanted), **rest}
        for name, part in parts.items():
            print(f"\n{name}", flush=True)
            content[name.replace(" ", "_")] = part()
            if out is not None:
                out.write_text(json.dumps(content, indent=1) + "\n")
