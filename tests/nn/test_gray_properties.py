"""What graying must do whatever the tokens are: float64 properties over drawn matrices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference.spectra import Factored, generator, geometric, orthogonal, with_singular_values
from wellposed.linalg import dct2
from wellposed.nn.functional import gray

ALL_METHODS = ("svd", "spectral", "dct")
EXACT_METHODS = ("svd", "spectral")

# Rounding (1e-16) times the stretch of graying (kappa^(1 - eps), at most KAPPA), relative to the largest
# singular value. Seen: at most 5e-14.
KAPPA = 1e4
TOLERANCE = 1e-12
# X X^T squares the condition number: rounding over its smallest eigenvalue, 1e-8, times the gain. Seen: 2e-6.
TOLERANCES = {"svd": TOLERANCE, "dct": TOLERANCE, "spectral": 1e-5}
# How far each is from the map itself, relative.
ERRORS = {"svd": 1e-12, "dct": 1e-12, "spectral": 1e-3}

quick = settings(derandomize=True, deadline=None, max_examples=100)
# sampled_from spreads its draws evenly, where floats would be one end or the other half of the time.
powers = st.sampled_from([0.05, 0.1, 0.25, 0.31, 0.5, 0.62, 0.7, 0.83, 0.95, 1.0])
scales = st.sampled_from([1e-10, 3e-7, 2e-3, 0.5, 0.7, 3.0, 1e4, 7e7, 1e10])
kappas = st.sampled_from([1.0, 2.0, 10.0, 100.0, 2e3, KAPPA])
sizes = st.sampled_from(range(1, 9))
seeds = st.integers(0, 2**16)


@st.composite
def factored(draw: st.DrawFn) -> Factored:
    tokens, channels = draw(sizes), draw(sizes)
    s = geometric(min(tokens, channels), draw(kappas), largest=draw(st.sampled_from([0.1, 1.0, 10.0])))
    return with_singular_values(s, tokens, channels, seed=draw(seeds))


matrices = factored().map(Factored.matrix)


def assert_equal_to_rounding(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    size = torch.linalg.matrix_norm(expected, 2).item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * size)


over_exact_methods = pytest.mark.parametrize("method", EXACT_METHODS)
over_all_methods = pytest.mark.parametrize("method", ALL_METHODS)


@over_exact_methods
@quick
@given(x=matrices, eps=powers, seed=seeds)
def test_rotations_pass_through(method, x, eps, seed):
    Q, W = orthogonal(x.shape[0], seed=seed), orthogonal(x.shape[1], seed=seed + 1)
    assert_equal_to_rounding(gray(Q @ x @ W, eps, method), Q @ gray(x, eps, method) @ W, TOLERANCES[method])


@over_exact_methods
@quick
@given(x=matrices, eps=powers)
def test_transpose_passes_through(method, x, eps):
    assert_equal_to_rounding(gray(x.mT, eps, method), gray(x, eps, method).mT, TOLERANCES[method])


@quick
@given(x=matrices, eps=powers)
def test_transpose_passes_through_dct(x, eps):
    assert_equal_to_rounding(gray(x.mT, eps, "dct", floor=1e-4), gray(x, eps, "dct", floor=1e-4).mT)


@over_all_methods
@quick
@given(x=matrices, eps=powers, c=scales)
def test_scale_passes_through(method, x, eps, c):
    assert_equal_to_rounding(gray(c * x, eps, method), c * gray(x, eps, method), TOLERANCES[method])


@over_all_methods
@quick
@given(x=matrices, eps=powers, c=scales)
def test_literal_form_forgets_the_scale(method, x, eps, c):
    actual, expected = gray(c * x, eps, method, rescale=False), gray(x, eps, method, rescale=False)
    assert_equal_to_rounding(actual, expected, TOLERANCES[method])


@over_all_methods
@pytest.mark.parametrize("c", [1e-10, 1e-3, 1e10])
def test_any_scale_passes_through_in_float32(method, c):
    x = torch.randn(5, 7, generator=generator(3))
    torch.testing.assert_close(gray(c * x, 0.5, method) / c, gray(x, 0.5, method), rtol=1e-4, atol=1e-5)
    literal = gray(c * x, 0.5, method, rescale=False)
    torch.testing.assert_close(literal, gray(x, 0.5, method, rescale=False), rtol=1e-4, atol=1e-5)


@over_all_methods
@quick
@given(x=matrices)
def test_eps_one_is_the_identity(method, x):
    assert torch.equal(gray(x, 1, method), x)


@over_all_methods
@quick
@given(x=matrices)
def test_eps_near_one_is_near_the_identity(method, x):
    # eps = 1 may be a shortcut: this is the map itself on the way there.
    assert_equal_to_rounding(gray(x, 1 - 1e-14, method), x, ERRORS[method])


@over_exact_methods
@quick
@given(x=matrices)
def test_eps_one_in_the_literal_form_divides_by_the_largest_value(method, x):
    largest = torch.linalg.matrix_norm(x, 2)
    assert_equal_to_rounding(gray(x, 1, method, rescale=False), x / largest, ERRORS[method])


@over_exact_methods
@quick
@given(x=matrices, first=powers, second=powers)
def test_two_grayings_are_one_by_the_product(method, x, first, second):
    twice = gray(gray(x, first, method), second, method)
    assert_equal_to_rounding(twice, gray(x, first * second, method), 3 * ERRORS[method])


@over_exact_methods
@quick
@given(factors=factored(), eps=powers)
def test_condition_number_becomes_its_power(method, factors, eps):
    kappa = (factors.s[0] / factors.s[-1]).item()
    actual = torch.linalg.cond(gray(factors.matrix(), eps, method)).item()
    assert actual == pytest.approx(kappa**eps, rel=max(2 * ERRORS[method], 1e-10))


@over_exact_methods
@quick
@given(x=matrices, eps=powers)
def test_largest_singular_value_is_kept(method, x, eps):
    kept = torch.linalg.matrix_norm(gray(x, eps, method), 2)
    torch.testing.assert_close(kept, torch.linalg.matrix_norm(x, 2), rtol=ERRORS[method], atol=0)


@quick
@given(x=matrices, eps=powers)
def test_dct_keeps_signs_and_order(x, eps):
    before, after = dct2(x).flatten(), dct2(gray(x, eps, "dct")).flatten()
    # A coefficient that is rounding and nothing else has no sign to keep.
    clear = before.abs() > 1e-6 * before.abs().max()
    assert torch.equal(before[clear].sign(), after[clear].sign())
    ordered = after.abs()[before.abs().argsort()]
    assert (ordered.diff() >= -TOLERANCE * ordered.max()).all()


@quick
@given(x=matrices, eps=powers)
def test_dct_keeps_the_largest_coefficient(x, eps):
    largest = dct2(gray(x, eps, "dct")).abs().max()
    torch.testing.assert_close(largest, dct2(x).abs().max(), rtol=1e-12, atol=0)


# BLAS rounds by where a matrix lies in memory and in its blocks. With 16 x 32 every matrix lies alike.
ALIKE = (16, 32)


@over_all_methods
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_order_does_not_matter_to_the_bit(method, dtype):
    x = torch.randn(6, *ALIKE, generator=generator(3), dtype=dtype)
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    assert torch.equal(gray(x[order], 0.5, method), gray(x, 0.5, method)[order])


@over_all_methods
@quick
@given(seed=seeds, eps=powers, order=st.permutations(range(5)))
def test_batch_order_does_not_matter(method, seed, eps, order):
    x = torch.randn(5, 4, 7, generator=generator(seed), dtype=torch.float64)
    actual, expected = gray(x[list(order)], eps, method), gray(x, eps, method)[list(order)]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@over_all_methods
def test_batched_result_is_that_of_each_matrix_alone(method):
    x = torch.randn(2, 3, *ALIKE, generator=generator(3), dtype=torch.float64)
    each = torch.stack([torch.stack([gray(matrix, 0.5, method) for matrix in row]) for row in x])
    torch.testing.assert_close(gray(x, 0.5, method), each, rtol=0, atol=1e-12)
