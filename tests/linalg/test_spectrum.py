"""Singular values and condition numbers against prescribed spectra, by both ways of computing them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference.spectra import clustered, geometric, power_law, rank_deficient, repeated, with_singular_values
from wellposed.linalg import (
    KAPPA_LIMIT,
    condition_number,
    effective_rank,
    singular_values,
    spectrum,
    stable_rank,
)


@pytest.fixture(params=["LAPACK", "Gram"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The Gram matrix is for GPUs, but computes the same on a CPU."""
    if request.param == "Gram":
        monkeypatch.setattr(spectrum, "_by_lapack", lambda x: False)
    return request.param


def shapes_of_spectra(k: int, kappa: float) -> dict[str, Tensor]:
    one = torch.ones(1, dtype=torch.float64)
    spectra = {
        "geometric": geometric(k, kappa),
        "linear": torch.linspace(1, 1 / kappa, k, dtype=torch.float64),
        "power law": power_law(k, math.log(kappa) / math.log(k)),
        "one small": torch.cat([one.expand(k - 1), one / kappa]),
    }
    if k > 3 and kappa > 10:
        tail = torch.linspace(2 / kappa, 1 / kappa, k - 2, dtype=torch.float64)
        spectra["one large"] = torch.cat([one, tail[:1], tail])
        spectra["two large"] = torch.cat([one, one * 0.3, tail])
        spectra["repeated"] = repeated(geometric(k // 2, kappa))
        spectra["clustered"] = clustered(geometric(k // 2, kappa), 1e-9)
    return spectra


@pytest.mark.every_value
@pytest.mark.parametrize("shape", [(2, 2), (3, 5), (5, 3), (16, 48), (64, 32), (50, 192)])
@pytest.mark.parametrize("kappa", [1.001, 2.0, 1e3, 1e5, 1e6, 1e7, 2.9e7])
def test_kappa_within_one_per_cent(way: str, shape: tuple[int, int], kappa: float) -> None:
    for name, values in shapes_of_spectra(min(shape), kappa).items():
        x = with_singular_values(values, *shape, batch=(3,)).matrix()
        found = condition_number(x)
        true = float(values.max() / values.min())
        assert not found.at_least.any(), name
        assert torch.allclose(found.kappa, torch.full((3,), true, dtype=torch.float64), rtol=6e-3), name


@pytest.mark.pairwise
@pytest.mark.parametrize("kappa", [1e1, 1e4, 1e6])
@pytest.mark.parametrize("shape", [(2, 3), (16, 48), (64, 32), (50, 192)])
def test_every_singular_value(way: str, shape: tuple[int, int], kappa: float) -> None:
    for name, values in shapes_of_spectra(min(shape), kappa).items():
        x = with_singular_values(values, *shape, batch=(2,)).matrix()
        true = values.sort(descending=True).values
        assert ((singular_values(x) / true - 1).abs() < 1e-4).all(), name


@pytest.mark.parametrize("true", [4e7, 1e9, 1e12, math.inf])
def test_beyond_the_limit_it_says_at_least(way: str, true: float) -> None:
    values = rank_deficient(geometric(9, 10.0), 1) if true == math.inf else geometric(10, true)
    found = condition_number(with_singular_values(values, 10, 30, batch=(2,)).matrix())
    assert found.at_least.all()
    assert (found.kappa == KAPPA_LIMIT).all()


def test_zero_and_constant_tokens(way: str) -> None:
    x = torch.stack([torch.zeros(4, 6), torch.ones(4, 6)])
    found = condition_number(x)
    assert found.at_least.all()
    assert (found.kappa == KAPPA_LIMIT).all()
    assert torch.equal(singular_values(x)[0], torch.zeros(4, dtype=torch.float64))


def test_one_bad_image_stays_alone(way: str) -> None:
    x = with_singular_values(geometric(4, 100.0), 4, 9, batch=(3,)).matrix()
    x[1, 0, 0] = math.nan
    kappa, at_least = condition_number(x)
    assert kappa[1].isnan()
    assert torch.allclose(kappa[[0, 2]], torch.tensor(100.0, dtype=torch.float64), rtol=6e-3)
    assert not at_least.any()
    values = singular_values(x)
    assert values[1].isnan().all()
    assert values[[0, 2]].isfinite().all()


def test_one_row_and_one_column(way: str) -> None:
    for shape in ((2, 1, 7), (2, 7, 1), (2, 1, 1)):
        assert torch.allclose(condition_number(torch.rand(shape) + 1).kappa, torch.ones(2).double())


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter(way: str, scale: float) -> None:
    x = with_singular_values(geometric(6, 1e5), 6, 8).matrix()
    assert torch.allclose(condition_number(x * scale).kappa, condition_number(x).kappa, rtol=1e-6)
    single = with_singular_values(geometric(6, 1e3), 6, 8).matrix().float()
    tiny = single * 1e-25  # squares of these are far below what float32 holds
    assert torch.allclose(condition_number(tiny).kappa, condition_number(single).kappa, rtol=1e-4)
    wide = x.double() * 1e200
    assert torch.allclose(condition_number(wide).kappa, condition_number(x).kappa, rtol=1e-6)


@pytest.mark.usefixtures("way")
@given(n=st.integers(2, 12), d=st.integers(2, 12), log_kappa=st.floats(0.01, 6.5), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_invariances(n: int, d: int, log_kappa: float, seed: int) -> None:
    x = with_singular_values(geometric(min(n, d), 10**log_kappa), n, d, seed=seed).matrix()
    kappa = condition_number(x).kappa
    assert torch.allclose(condition_number(x.mT).kappa, kappa, rtol=6e-3)
    shuffled = x[torch.randperm(n, generator=torch.Generator().manual_seed(seed))]
    assert torch.allclose(condition_number(shuffled).kappa, kappa, rtol=6e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_only_rounding_decides_is_a_bound(dtype: torch.dtype) -> None:
    exact = with_singular_values(rank_deficient(geometric(49, 2.0), 1), 50, 192).matrix()
    as_it_is = condition_number(exact.to(dtype))
    assert not as_it_is.at_least
    assert as_it_is.kappa > 0.1 / torch.finfo(dtype).eps
    known = condition_number(exact.to(dtype), roundings=2)
    assert known.at_least
    # The bound is no larger than what rounding made of an infinite kappa, and not far below.
    assert as_it_is.kappa / 20 < known.kappa < as_it_is.kappa
    well = with_singular_values(geometric(50, 30.0), 50, 192).matrix()
    kappa, at_least = condition_number(well.to(dtype), roundings=2)
    assert not at_least
    assert torch.allclose(kappa, torch.tensor(30.0, dtype=torch.float64), rtol=2e-2)


@pytest.mark.parametrize("at_once", [1, 10**4])
def test_large_batches_come_in_parts(at_once: int, monkeypatch) -> None:
    x = with_singular_values(geometric(8, 1e3), 8, 12, batch=(3, 5)).matrix()
    x = x * torch.linspace(1, 2, 15, dtype=torch.float64).reshape(3, 5, 1, 1)
    monkeypatch.setattr(spectrum, "_by_lapack", lambda x: False)
    whole, values = condition_number(x), singular_values(x)
    monkeypatch.setattr(spectrum, "_ENTRIES_AT_ONCE", at_once)
    parts = condition_number(x)
    assert parts.kappa.shape == (3, 5)
    assert torch.allclose(parts.kappa, whole.kappa, rtol=1e-6)
    assert torch.equal(parts.at_least, whole.at_least)
    assert torch.allclose(singular_values(x), values, rtol=1e-9)


def test_known_values_serve() -> None:
    x = with_singular_values(geometric(5, 1e3), 5, 9, batch=(2,)).matrix()
    given_values = condition_number(x, singular_values=singular_values(x))
    assert torch.equal(given_values.kappa, condition_number(x).kappa)


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 8, 5)])
def test_no_matrices_have_no_values(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    assert singular_values(x).shape == (*shape[:-2], 5)
    assert condition_number(x).kappa.shape == shape[:-2]


@pytest.mark.parametrize("n", [30, 32])
def test_a_matrix_has_the_same_values_among_any_others(n: int) -> None:
    # Where the first is hard, with kappa above 3e4, the SVD comes first for all.
    x = with_singular_values(geometric(n, 50.0), n, 41, batch=(7,)).matrix().float()
    x[::2] *= torch.logspace(0, -7, 41)
    values = singular_values(x)
    assert torch.equal(singular_values(x[1:]), values[1:])
    assert torch.equal(torch.stack([singular_values(one) for one in x]), values)


def test_autocast_does_not_round(way: str) -> None:
    x = with_singular_values(geometric(16, 1e4), 16, 40).matrix().float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = condition_number(x).kappa, singular_values(x)
    assert torch.equal(inside[0], condition_number(x).kappa)
    assert torch.equal(inside[1], singular_values(x))


def test_ranks() -> None:
    flat, single = torch.ones(2, 7).double(), rank_deficient(torch.ones(1).double(), 6)
    assert torch.allclose(effective_rank(flat), torch.tensor(7.0).double())
    assert torch.allclose(stable_rank(flat), torch.tensor(7.0).double())
    assert effective_rank(single) == 1
    assert stable_rank(single) == 1
    values = torch.tensor([2.0, 1.0, 1.0]).double()
    p = values / 4
    assert math.isclose(effective_rank(values).item(), math.exp(-(p * p.log()).sum().item()))
    assert stable_rank(values).item() == 1.5


@pytest.mark.parametrize("function", [condition_number, singular_values])
def test_bad_input(function) -> None:
    with pytest.raises(TypeError, match=r"floating point.*int64"):
        function(torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\(3,\)"):
        function(torch.ones(3))
    with pytest.raises(ValueError, match="at least one"):
        function(torch.ones(0, 3))


@pytest.mark.parametrize("kappa", [1.001, 1.015, 1.1])
def test_flat_spectra_of_many_tokens_by_squaring(kappa: float, monkeypatch) -> None:
    # None of 577 eigenvectors stands out: six squarings were 0.8 % off.
    monkeypatch.setattr(spectrum, "_by_lapack", lambda x: False)
    for values in (torch.linspace(1, 1 / kappa, 577, dtype=torch.float64), geometric(577, kappa)):
        found = condition_number(with_singular_values(values, 577, 600).matrix())
        assert found.kappa.item() == pytest.approx(kappa, rel=2e-3)


@pytest.mark.parametrize("kappa", [1.0, 30.0, 2.9e4, 3.1e4, 1e6, 2e7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_a_cpu_the_svd_is_met(kappa: float, dtype: torch.dtype) -> None:
    x = with_singular_values(geometric(24, kappa), 24, 40, batch=(2, 3)).matrix().to(dtype)
    x[0, 1] *= 2
    true = torch.linalg.svdvals(x.double())
    assert torch.allclose(singular_values(x), true, rtol=1e-6)
    assert torch.allclose(condition_number(x).kappa, true[..., 0] / true[..., -1], rtol=1e-6)
