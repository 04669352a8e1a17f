"""The largest eigenvalue and its vector against LAPACK in float64."""

import pytest
import torch

from reference.spectra import clustered, generator, geometric, orthogonal, power_law, repeated, values
from wellposed.linalg.spectral_chain import top_eigenpair

SPECTRA = {
    "geometric": geometric(60, 1e4),
    "power law": power_law(60, 2),
    "repeated": repeated(geometric(20, 1e3), 3),
    "clustered": clustered(geometric(30, 1e3), 1e-6),
    "all equal": torch.ones(60, dtype=torch.float64),
    "rank one": torch.cat((values(2.0), torch.zeros(59, dtype=torch.float64))),
}


def gram(n: int, d: int, batch: int = 3) -> torch.Tensor:
    x = torch.randn(batch, n, d, dtype=torch.float64, generator=generator(0))
    return x @ x.mT


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_prescribed_spectrum(name, dtype):
    s, Q = SPECTRA[name], orthogonal(60, (2,))
    A = ((Q * s.square()) @ Q.mT).to(dtype)
    lam, u = top_eigenpair(A)
    # A spectrum this dense at its top is the hardest; seen 6e-5.
    torch.testing.assert_close(lam.double(), s.max().square().expand(2), rtol=2e-4, atol=0)
    assert (lam.double() <= s.max().square() * (1 + 1e-6)).all()
    rayleigh = (u[:, None] @ A @ u[..., None])[:, 0, 0]
    torch.testing.assert_close(rayleigh, lam, rtol=1e-5, atol=0)
    torch.testing.assert_close(u.norm(dim=-1), torch.ones_like(lam), rtol=1e-5, atol=0)


def test_flat_gaussian_of_many_tokens():
    A = gram(196, 768)
    lam, _ = top_eigenpair(A)
    torch.testing.assert_close(lam, torch.linalg.eigvalsh(A)[:, -1], rtol=1e-8, atol=0)


def test_evenly_spaced_singular_values_of_many_tokens():
    # No eigenvalue stands out from its neighbours, which those of tokens with a common mean do.
    s, Q = torch.linspace(1, 0.01, 197, dtype=torch.float64), orthogonal(197, (8,))
    lam, _ = top_eigenpair((Q * s.square()) @ Q.mT)
    torch.testing.assert_close(lam, torch.ones_like(lam), rtol=1e-4, atol=0)


@pytest.mark.parametrize("n", [1, 2, 3, 24])
def test_few_tokens_to_the_last_digits(n):
    A = gram(n, 40)
    lam, u = top_eigenpair(A)
    expected, vectors = torch.linalg.eigh(A)
    torch.testing.assert_close(lam, expected[:, -1], rtol=1e-12, atol=0)
    torch.testing.assert_close(
        (u * vectors[..., -1]).sum(-1).abs(), torch.ones(3).double(), rtol=0, atol=1e-10
    )


def test_start_is_not_an_eigenvector_of_something_common():
    # Ones (a mean token) and basis vectors (one large token) are both found.
    for A in (torch.ones(30, 30), torch.diag(torch.cat((torch.ones(29), torch.tensor([4.0]))))):
        lam, _ = top_eigenpair(A[None].double())
        torch.testing.assert_close(lam, torch.linalg.eigvalsh(A.double())[-1:], rtol=1e-12, atol=0)


def test_zero_and_bad_matrices_stay_alone():
    A = gram(20, 30, batch=4)
    expected = top_eigenpair(A)
    A[1], A[2, 3, 4] = 0, torch.nan
    lam, u = top_eigenpair(A)
    assert lam[1] == 0
    assert not u[1].any()
    assert lam[2].isnan()
    for got, wanted in zip((lam, u), expected, strict=True):
        assert torch.equal(got[[0, 3]], wanted[[0, 3]])


def orthogonal_to(start: torch.Tensor) -> torch.Tensor:
    """A unit vector."""
    other = torch.roll(start, 1)
    other = other - (other @ start) / (start @ start) * start
    return other / other.norm()


@pytest.mark.parametrize("n", [2, 3, 30, 196])
@pytest.mark.parametrize("gap", [0.5, 1e-6])
def test_a_leading_vector_orthogonal_to_the_fixed_start(n, gap):
    fixed = 0.5 + torch.frac(torch.arange(1, n + 1, dtype=torch.float32) * 0.61803399)
    u = orthogonal_to(fixed.double())
    A = u[:, None] * u + (1 - gap) * (torch.eye(n).double() - u[:, None] * u)
    lam, _ = top_eigenpair(A[None])
    torch.testing.assert_close(lam, torch.ones(1).double(), rtol=1e-6, atol=0)


def test_one_large_token_beside_many_that_point_another_way():
    # The column with the largest diagonal entry lies across the leading vector, all other columns along it.
    A = torch.diag(torch.tensor([0.9] + [0.0] * 49).double())
    A[1:, 1:] = 1 / 49
    lam, _ = top_eigenpair(A[None])
    torch.testing.assert_close(lam, torch.ones(1).double(), rtol=1e-12, atol=0)
