"""The DCT against SciPy's, and a cache that no mode or transform of torch can spoil."""

import numpy as np
import pytest
import scipy.fft
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from reference.spectra import generator
from wellposed.linalg import dct2, dct_matrix, idct2
from wellposed.linalg.dct import _cached_dct_matrix
from wellposed.nn.functional import gray

SIZES = (1, 2, 3, 7, 64, 196, 768)
SHAPES = ((1, 1), (1, 7), (7, 1), (5, 8), (2, 3, 6, 4), (196, 64))


@pytest.fixture(autouse=True)
def _empty_cache():
    _cached_dct_matrix.cache_clear()
    yield
    _cached_dct_matrix.cache_clear()


def _random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(0)).to(dtype)


@pytest.mark.parametrize("n", SIZES)
def test_matrix_is_orthogonal(n):
    matrix = dct_matrix(n, like=torch.empty(0, dtype=torch.float64)).numpy()
    # A float64 product of two 768 x 768 matrices is itself off by 1.5e-14: the check needs more digits.
    exact = matrix.astype(np.longdouble)
    assert np.abs(exact @ exact.T - np.eye(n)).max() < 1e-14


@pytest.mark.parametrize("n", SIZES)
def test_matrix_is_the_transform_of_the_identity(n):
    matrix = dct_matrix(n, like=torch.empty(0, dtype=torch.float64))
    expected = scipy.fft.dct(torch.eye(n, dtype=torch.float64).numpy(), type=2, norm="ortho", axis=0)
    torch.testing.assert_close(matrix, torch.from_numpy(expected), rtol=0, atol=1e-15 + 2e-15 / n**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_matrix_is_the_wide_one_rounded_once(dtype):
    wide = dct_matrix(196, like=torch.empty(0, dtype=torch.float64))
    assert torch.equal(dct_matrix(196, like=torch.empty(0, dtype=dtype)), wide.to(dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_dct2_equals_scipy(shape):
    x = _random(*shape)
    expected = scipy.fft.dctn(x.numpy(), type=2, norm="ortho", axes=(-2, -1))
    torch.testing.assert_close(dct2(x), torch.from_numpy(expected), rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES)
def test_idct2_equals_scipy(shape):
    coefficients = _random(*shape)
    expected = scipy.fft.idctn(coefficients.numpy(), type=2, norm="ortho", axes=(-2, -1))
    torch.testing.assert_close(idct2(coefficients), torch.from_numpy(expected), rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES)
def test_idct2_undoes_dct2(shape):
    x = _random(*shape)
    torch.testing.assert_close(idct2(dct2(x)), x, rtol=0, atol=1e-13)


def test_cache_returns_the_same_object():
    assert dct_matrix(5, like=_random(1)) is dct_matrix(5, like=_random(2))


def test_cache_tells_sizes_and_dtypes_apart():
    wide = _random(1)
    assert dct_matrix(5, like=wide).shape != dct_matrix(6, like=wide).shape
    assert dct_matrix(5, like=wide).dtype != dct_matrix(5, like=wide.float()).dtype


def _graying_with_gradient(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    gray(x, 0.5, "dct").square().sum().backward()
    return x.grad


def _assert_eager_use_is_unharmed():
    """A plain tensor in the cache, that autograd takes, and the right matrix."""
    x = _random(5, 7)
    for n in (5, 7):
        matrix = dct_matrix(n, like=x)
        assert type(matrix) is Tensor
        assert not matrix.is_inference()
        assert not matrix.requires_grad
        assert not torch._C._functorch.is_functorch_wrapped_tensor(matrix)
        expected = scipy.fft.dct(torch.eye(n, dtype=torch.float64).numpy(), norm="ortho", axis=0)
        torch.testing.assert_close(matrix, torch.from_numpy(expected))
    assert _graying_with_gradient(x).isfinite().all()


def test_cache_survives_inference_mode():
    with torch.inference_mode():
        gray(_random(5, 7), 0.5, "dct")
    _assert_eager_use_is_unharmed()


def test_cache_survives_no_grad():
    with torch.no_grad():
        gray(_random(5, 7), 0.5, "dct")
    _assert_eager_use_is_unharmed()


def test_cache_survives_vmap_and_grad():
    x = _random(3, 5, 7)
    gradient = torch.func.grad(lambda x: gray(x, 0.5, "dct").square().sum())
    torch.testing.assert_close(torch.func.vmap(gradient)(x), _graying_with_gradient(x))
    _cached_dct_matrix.cache_clear()
    torch.func.vmap(gradient)(x)
    _assert_eager_use_is_unharmed()


def test_cache_survives_fake_tensors():
    with FakeTensorMode():
        assert gray(torch.randn(5, 7, dtype=torch.float64), 0.5, "dct").shape == (5, 7)
    _assert_eager_use_is_unharmed()


def test_cache_survives_a_plain_tensor_among_fake_ones():
    x = _random(5, 7)
    with FakeTensorMode(allow_non_fake_inputs=True):
        gray(x, 0.5, "dct")
    _assert_eager_use_is_unharmed()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_cache_survives_compilation(backend):
    torch.compiler.reset()
    compiled = torch.compile(lambda x: gray(x, 0.5, "dct"), backend=backend)
    x = _random(5, 7)
    torch.testing.assert_close(compiled(x), gray(x, 0.5, "dct"))
    _cached_dct_matrix.cache_clear()
    torch.compiler.reset()
    compiled(x)
    _assert_eager_use_is_unharmed()


def test_cached_matrix_made_for_eager_use_serves_a_compiled_program():
    torch.compiler.reset()
    x = _random(5, 7)
    expected = gray(x, 0.5, "dct")
    compiled = torch.compile(lambda x: gray(x, 0.5, "dct"), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


def test_second_derivative_and_forward_mode():
    x = _random(4, 5).requires_grad_()
    torch.autograd.gradgradcheck(dct2, x)
    tangent = _random(4, 5)
    _, jvp = torch.func.jvp(dct2, (x.detach(),), (tangent,))
    torch.testing.assert_close(jvp, dct2(tangent))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), tangent)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dct2(dual)).tangent, dct2(tangent))


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("shape", [(3, 14, 24), (2, 15, 9)])
def test_half_products_at_any_size(shape, size):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * size
    x[0] = 0
    coefficients = dct2(x, half=True)
    exact = dct2(x.double())
    assert (coefficients[0] == 0).all()
    assert 0 < ((coefficients - exact) / size).norm() <= 2e-3 * (exact / size).norm()
    back = idct2(exact.float(), half=True, size=exact.float().abs().amax((-2, -1), keepdim=True))
    assert ((back - x) / size).norm() <= 2e-3 * (x / size).norm()


def test_half_products_have_the_gradient_of_the_transform():
    x = torch.randn(2, 14, 24, generator=torch.Generator().manual_seed(0), requires_grad=True)
    grad = torch.randn(2, 14, 24, generator=torch.Generator().manual_seed(1)) * 1e-9
    (got,) = torch.autograd.grad(dct2(x, half=True), x, grad)
    # 1e-9 is nothing in float16: the gradient has a scale of its own.
    assert (got - idct2(grad)).norm() <= 2e-3 * grad.norm()
