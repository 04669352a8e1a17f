"""Graying on a CPU: exact values, exact gradients in every direction, and threads."""

import math
import multiprocessing
import threading

import pytest
import torch
from torch import Tensor

from reference.spectra import clustered, generator, geometric, power_law, repeated, with_singular_values
from wellposed.linalg import execution, spectral_plan, spectral_power, svd_power
from wellposed.linalg.svd_power import _adjoint
from wellposed.nn.functional import gray

TOKENS, CHANNELS = 40, 56


def spectra(kappa: float, n: int = TOKENS) -> dict[str, Tensor]:
    one = torch.ones(1, dtype=torch.float64)
    return {
        "geometric": geometric(n, kappa),
        "power law": power_law(n, math.log(kappa) / math.log(n)),
        "one large": torch.cat((one, torch.full((n - 1,), 1 / kappa, dtype=torch.float64))),
        "repeated": repeated(geometric(n // 4, kappa), 4),
        "clustered": clustered(geometric(n // 2, kappa / (1 + 1e-7)), 1e-7),
    }


over_spectra = pytest.mark.parametrize("name", spectra(10))


@pytest.mark.pairwise
@over_spectra
@pytest.mark.parametrize("kappa", [1e2, 1e4, 1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_singular_values_up_to_kappa_1e5(name, kappa, dtype):
    x = with_singular_values(spectra(kappa)[name], TOKENS, CHANNELS, (2,)).matrix().to(dtype)
    s = torch.linalg.svdvals(x.double())
    for eps in (0.1, 0.5, 0.7, 0.95):
        expected = s[:, :1] * (s / s[:, :1]) ** eps
        for y in (spectral_power(x, eps), spectral_power(x.mT, eps).mT):
            actual = torch.linalg.svdvals(y.double())
            # Seen 5e-7; and the result in float32 is rounded, which the smallest of its values notice.
            rounding = torch.finfo(dtype).eps * kappa**eps
            torch.testing.assert_close(actual, expected, rtol=1e-5 + rounding, atol=0)


def largest_error(x: Tensor, eps: float) -> float:
    """Of the gradient for the upstreams u_i v_j^T, relative to Daleckii and Krein's in float64."""
    U, s, Vh = torch.linalg.svd(x.double(), full_matrices=False)
    upstream = (U.mT[:, None, :, None] * Vh[None, :, None]).flatten(0, 1).to(x)
    leaf = x.expand(len(upstream), -1, -1).clone().requires_grad_()
    (actual,) = torch.autograd.grad(spectral_power(leaf, eps), leaf, upstream)
    expected = _adjoint(U, s, Vh.mT, upstream.double(), eps, 1e-12, True)
    return ((actual.double() - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))).max().item()


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ["geometric", "power law", "one large"])
@pytest.mark.parametrize("kappa", [1e2, 1e4, 1e5])
@pytest.mark.parametrize("eps", [0.1, 0.3, 0.7])
def test_gradient_in_every_direction(name, kappa, eps):
    x = with_singular_values(spectra(kappa, 12)[name], 12, 17).matrix()
    assert largest_error(x, eps) <= 1e-4  # seen 8e-6
    # The gradient is stored in float32, and what it takes to its size is the largest gain.
    assert largest_error(x.float(), eps) <= 3e-7 * kappa ** (1 - eps)


@pytest.mark.parametrize("gap", [0.0, 1e-14, 1e-9, 1e-6, 1e-5, 1e-3])
def test_gradient_where_singular_values_nearly_repeat(gap):
    s = torch.tensor([2.0, 1.0, 1.0 - gap, 1e-3, 1e-3 * (1 - gap), 1e-5], dtype=torch.float64)
    assert largest_error(with_singular_values(s, 6, 9).matrix(), 0.7) <= 1e-4


def test_gradient_where_the_largest_repeats():
    x = with_singular_values(torch.tensor([2.0, 2.0, 1.0, 1e-2]).double(), 4, 9).matrix()
    upstream = torch.randn(4, 9, dtype=torch.float64, generator=generator(1))
    slopes = []
    for power in (spectral_power, svd_power):
        leaf = x.clone().requires_grad_()
        slopes += torch.autograd.grad(power(leaf, 0.7), leaf, upstream)
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-9)


def test_tokens_of_trained_models_get_the_power_of_their_kappa():
    # Trained patch embeddings have a kappa of 1e5 and more, which a floor of 1/300 or 1e-4 bends.
    for kappa in (2500, 3.7e5):
        x = with_singular_values(geometric(TOKENS, kappa), TOKENS, CHANNELS).matrix().float()
        true = torch.linalg.cond(x.double()).item()
        assert torch.linalg.cond(gray(x, 0.7).double()).item() == pytest.approx(true**0.7, rel=1e-3)


@over_spectra
@pytest.mark.parametrize("kappa", [10, 300])
def test_the_error_of_float32_that_the_plan_states(name, kappa):
    x = with_singular_values(spectra(kappa)[name], TOKENS, CHANNELS, (4,)).matrix().float()
    s, bound = torch.linalg.svdvals(x.double()), spectral_plan(x, precision="float32").error
    for eps in (0.3, 0.7):
        y = spectral_power(x, eps, precision="float32")
        expected = s[:, :1] * (s / s[:, :1]) ** eps
        actual = torch.linalg.svdvals(y.double())
        reached = s >= s[:, :1] / 300
        torch.testing.assert_close(actual[reached], expected[reached], rtol=bound, atol=0)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def value_and_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    y = spectral_power(leaf, 0.7)
    return y.detach(), torch.autograd.grad(y, leaf, torch.cos(x))[0]


@pytest.mark.usefixtures("two_threads")
def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(execution, "_ENTRIES", 4 * 20**2)
    x = torch.randn(30, 20, 33, generator=generator(2))
    shared = value_and_gradient(x)
    assert torch.get_num_threads() == 2
    with torch.inference_mode():
        assert torch.equal(spectral_power(x, 0.7), shared[0])
    torch.set_num_threads(1)
    alone = value_and_gradient(x)
    torch.testing.assert_close(shared, alone, rtol=1e-6, atol=1e-6)
    # A thread that is new starts with the number that was set, whatever our own threads use.
    torch.set_num_threads(2)
    seen = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert seen == [2]


@pytest.mark.usefixtures("two_threads")
def test_several_threads_may_gray_at_once(monkeypatch):
    monkeypatch.setattr(execution, "_ENTRIES", 4 * 20**2)
    x = torch.randn(30, 20, 33, generator=generator(2))
    expected = value_and_gradient(x)
    found: list[tuple[Tensor, Tensor]] = []
    threads = [threading.Thread(target=lambda: found.append(value_and_gradient(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for result in found:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def _gray_in_a_child(x: Tensor, queue) -> None:
    torch.set_num_threads(2)
    queue.put(spectral_power(x, 0.7).sum().item())


@pytest.mark.usefixtures("two_threads")
def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(execution, "_ENTRIES", 4 * 20**2)
    x = torch.randn(30, 20, 33, generator=generator(2))
    expected = spectral_power(x, 0.7).sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_gray_in_a_child, args=(x, queue))
    child.start()
    assert queue.get(timeout=60) == pytest.approx(expected, rel=1e-5)
    child.join()


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rescale", [True, False])
def test_without_a_gradient_it_is_the_same(precision, dtype, rescale):
    x = 30 * with_singular_values(geometric(TOKENS, 20), TOKENS, CHANNELS, (2,)).matrix().to(dtype)
    trained = spectral_power(x.clone().requires_grad_(), 0.7, rescale=rescale, precision=precision)
    with torch.no_grad():
        y = spectral_power(x, 0.7, rescale=rescale, precision=precision)
    narrowest = max(torch.finfo(dtype).eps, torch.finfo(getattr(torch, precision)).eps)
    assert (y - trained).abs().max() <= 8 * narrowest * trained.abs().max()
