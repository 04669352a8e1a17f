"""Run by test_hopper.py in a process of its own, in which Triton interprets its kernels on the CPU."""

import sys

import torch
import triton
import triton.language as tl

from wellposed.linalg import spectral_chain
from wellposed.linalg.hopper import engine
from wellposed.linalg.spectral_fit import fit_family, fit_power


def tokens(images: int, n: int, d: int, kappa: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n + d)
    U = torch.linalg.qr(torch.randn(images, n, n, generator=generator, dtype=torch.float64))[0]
    V = torch.linalg.qr(torch.randn(images, d, n, generator=generator, dtype=torch.float64))[0]
    s = torch.logspace(0, -torch.tensor(kappa).log10().item(), n, dtype=torch.float64)
    return ((U * s) @ V.mT).float()


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))).max().item()


def compare(x: torch.Tensor, coefficients: torch.Tensor, delta: float, wide: int) -> tuple[float, float]:
    """Worst image of the result and of the gradient, beside float64."""
    y, Z, stack, lam, u = engine.forward(x, coefficients, delta, wide)
    expected, chain = spectral_chain.chain_forward(
        x.double(), coefficients, delta, rescale=True, dtype=torch.float64, keep=True
    )
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    grad = torch.empty_strided(x.shape, x.stride()).copy_(grad)
    slope = engine.backward(grad, x, Z, stack, lam, u, coefficients, delta)
    true_slope = spectral_chain.chain_backward(
        grad.double(), x.double(), chain, coefficients, delta, rescale=True
    )
    assert y.dtype == slope.dtype == torch.float32
    return relative(y, expected), relative(slope, true_slope)


def test_shapes() -> None:
    fit = fit_power(0.7)
    coefficients = torch.tensor([fit.coefficients], dtype=torch.float64)
    # One tile, several, and tokens that are taller than wide, which come as a transposed view.
    for images, n, d in ((2, 1, 5), (2, 17, 17), (1, 40, 33), (1, 70, 75)):
        x = tokens(images, min(n, d), max(n, d), 1e4)
        x = x if n <= d else x.mT.contiguous().mT
        for wide in (0, 10, fit.steps) if n == 17 else (10,):
            result, gradient = compare(x, coefficients, fit.delta, wide)
            print(n, d, wide, result, gradient)
            assert result < (1e-3 if wide == 0 else 1e-5)
            assert gradient < (0.1 if wide == 0 else 5e-4)


def test_each_image_has_its_own_power() -> None:
    family = fit_family()
    coefficients = family.coefficients(torch.tensor([0.5, 0.9]))
    result, gradient = compare(tokens(2, 12, 20, 1e3), coefficients, family.delta, family.steps)
    print(result, gradient)
    assert result < 1e-4
    assert gradient < 1e-4


def test_bad_images_stay_alone() -> None:
    fit = fit_power(0.9)
    coefficients = torch.tensor([fit.coefficients], dtype=torch.float64)
    good = tokens(1, 12, 20, 1e2)
    alone = engine.forward(good, coefficients, fit.delta, 9)
    broken = torch.where(torch.arange(20) == 3, torch.inf, good)
    x = torch.cat([broken, good, torch.zeros_like(good)])
    y, Z, stack, lam, u = engine.forward(x, coefficients, fit.delta, 9)
    assert y[0].isnan().all()
    assert torch.equal(y[1], alone[0][0])
    assert (y[2] == 0).all()
    assert lam[2] == 0
    slope = engine.backward(torch.ones_like(x), x, Z, stack, lam, u, coefficients, fit.delta)
    single = engine.backward(torch.ones_like(good), good, *alone[1:], coefficients, fit.delta)
    assert torch.equal(slope[1], single[0])
    assert (slope[0] == 0).all()
    assert (slope[2] == 1).all()


def test_no_matrix_is_orthogonal_to_the_start() -> None:
    for n in (2, 3, 40):
        index = torch.arange(1, n + 1)
        fixed = 0.5 + torch.frac(index.double() * 0.61803399)
        u = torch.roll(fixed, 1)
        u = torch.nn.functional.normalize(u - (u @ fixed) / (fixed @ fixed) * fixed, dim=0)
        hashed = index * 2654435761 % 2**32
        hashed = (hashed ^ (hashed >> 15)) * 2246822519 % 2**32
        scattered = 0.5 + ((hashed ^ (hashed >> 13)) & 0xFFFF).double() / 65536
        w = torch.roll(scattered, 1)
        w = torch.nn.functional.normalize(w - (w @ scattered) / (scattered @ scattered) * scattered, dim=0)
        for top in (u, w):
            for rest in (0.5, 0.01):
                A = torch.zeros(1, engine.padded(n), engine.padded(n))
                A[0, :n, :n] = top[:, None] * top + rest * (torch.eye(n).double() - top[:, None] * top)
                lam, _ = engine.top_eigenpair(A, n)
                print(n, rest, lam.item())
                assert abs(lam.item() - 1) < 1e-6


@triton.jit
def counting_kernel(OUT, n):
    total = 0
    for step in range(0, n, 2):
        total += step
    tl.store(OUT, total)


def loop_up_to_an_argument() -> None:
    """Not of our kernels: whether the interpreter itself can do what they all need."""
    out = torch.zeros(1, dtype=torch.int32)
    counting_kernel[(1,)](out, 6)
    assert out.item() == 0 + 2 + 4


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
