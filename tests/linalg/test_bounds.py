"""The bounds of the propositions: where they are theorems, and where they fail."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference.spectra import generator, geometric, values, with_singular_values
from wellposed.linalg.bounds import (
    Comparison,
    bound_attention,
    bound_attention_with_skip,
    bound_depthwise,
    bound_ffn,
    compare,
    depthwise_extremes,
    extremes,
    product_condition_number,
)
from wellposed.linalg.spectrum import ConditionNumber

ROUNDING = 1 + 1e-9

quick = settings(derandomize=True, deadline=None, max_examples=60)
sizes = st.sampled_from(range(1, 7))
kappas = st.sampled_from([1.0, 2.0, 10.0, 100.0])
scales = st.sampled_from([0.01, 0.3, 1.0, 5.0, 100.0])
seeds = st.integers(0, 2**16)


def kappa(x: Any) -> float:
    """Over min(m, n) singular values, by NumPy."""
    s = np.linalg.svd(np.asarray(x), compute_uv=False)
    return float(s[0] / s[-1]) if s[-1] > 0 else math.inf


def drawn(draw: st.DrawFn, rows: int, columns: int) -> Tensor:
    s = geometric(min(rows, columns), draw(kappas), largest=draw(scales))
    return with_singular_values(s, rows, columns, seed=draw(seeds)).matrix()


# Where the bounds are theorems


@st.composite
def one_way(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A (m, p) and B (p, n) with m >= p >= n or m <= p <= n."""
    m, p, n = sorted([draw(sizes), draw(sizes), draw(sizes)], reverse=draw(st.booleans()))
    return drawn(draw, m, p), drawn(draw, p, n)


@quick
@given(pair=one_way())
def test_kappa_of_a_product_where_sizes_go_one_way(pair):
    A, B = pair
    assert kappa(A @ B) <= kappa(A) * kappa(B) * ROUNDING


@st.composite
def tall_attention(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    channels = draw(sizes)
    x = drawn(draw, channels + draw(st.integers(0, 4)), channels)
    return x, *(drawn(draw, channels, channels) for _ in range(3))


@quick
@given(case=tall_attention())
def test_proposition_4_1_with_as_many_tokens_as_channels_and_square_weights(case):
    x, wq, wk, wv = case
    C = torch.tensor(kappa(wq) * kappa(wk) * kappa(wv))
    bound = bound_attention(C, *extremes(x))
    measured = kappa(x @ wq @ wk.T @ x.T @ x @ wv)
    # The product has a kappa of up to 1e12, whose smallest singular value LAPACK knows to 1e-3.
    assert measured <= bound * (1 + 1e-14 * float(bound)) * ROUNDING


@quick
@given(s=st.lists(st.floats(0.01, 100), min_size=2, max_size=5), n=st.integers(0, 3), seed=seeds)
def test_proposition_4_1_and_4_2_are_reached_by_identity_weights(s, n, seed):
    # For any number of tokens.
    s = torch.tensor(sorted(s, reverse=True), dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    for tokens, channels in ((len(s) + n, len(s)), (len(s), len(s) + n)):
        x = with_singular_values(s, tokens, channels, seed=seed).matrix()
        cubed = x @ x.T @ x
        tight = pytest.approx(float(bound_attention(one, s[0], s[-1])), rel=1e-2)
        assert kappa(cubed) == tight
        tight = pytest.approx(float(bound_attention_with_skip(one, s[0], s[-1])), rel=1e-2)
        # s^3 + s grows with s, so the largest and the smallest stay these.
        assert kappa(cubed + x) == tight


@st.composite
def positive_attention(draw: st.DrawFn) -> tuple[Tensor, ...]:
    """X = U S V^T (N >= D) and weights V W V^T, smallest values of a product of at most 1: M >= 0."""
    channels = draw(st.integers(2, 5))
    x = with_singular_values(
        geometric(channels, draw(kappas), largest=draw(scales)), channels + 2, channels, seed=draw(seeds)
    )
    weights = []
    for _ in range(3):
        w = geometric(channels, draw(kappas), largest=1.0)
        order = torch.randperm(channels, generator=generator(draw(seeds)))
        smallest = draw(st.sampled_from([0.1, 0.7, 1.0]))
        weights.append((x.V * (w / w.min() * smallest)[order]) @ x.V.mT)
    return x.matrix(), *weights


@quick
@given(case=positive_attention())
def test_proposition_4_2_for_a_positive_semidefinite_m(case):
    x, wq, wk, wv = case
    C = torch.tensor(kappa(wq) * kappa(wk) * kappa(wv))
    bound = bound_attention_with_skip(C, *extremes(x))
    measured = kappa(x @ wq @ wk.T @ x.T @ x @ wv + x)
    assert measured <= bound * (1 + 1e-14 * measured) * ROUNDING


@quick
@given(case=tall_attention(), other=tall_attention())
def test_the_skip_bound_is_the_formula_of_the_paper(case, other):
    x, keys = extremes(case[0]), extremes(other[0])
    C = torch.tensor(3.0, dtype=torch.float64)
    largest, smallest = x
    paper = (C * largest**3 + largest) / (smallest**3 + smallest)
    torch.testing.assert_close(bound_attention_with_skip(C, *x), paper)
    torch.testing.assert_close(bound_attention_with_skip(C, *x, keys=x), paper)
    torch.testing.assert_close(bound_attention(C, *x, keys=keys), C * x.kappa * keys.kappa**2)


@st.composite
def square_ffn(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    channels = draw(sizes)
    return (
        drawn(draw, draw(sizes), channels),
        drawn(draw, channels, channels),
        drawn(draw, channels, channels),
    )


@quick
@given(case=square_ffn(), hidden=st.integers(0, 6), seed=seeds)
def test_the_feed_forward_bound_for_square_weights_and_for_a_transposed_pair(case, hidden, seed):
    x, first, last = case
    bound = bound_ffn(*(torch.tensor(kappa(w)) for w in (first, last, x)))
    assert kappa(x @ first @ last) <= bound * (1 + 1e-6)
    wide = with_singular_values(
        geometric(len(first), 5.0), len(first), len(first) + hidden, seed=seed
    ).matrix()
    bound = bound_ffn(*(torch.tensor(kappa(w)) for w in (wide, wide, x)))
    assert kappa(x @ wide @ wide.T) <= bound * (1 + 1e-6)


def same_convolution(image: Tensor, kernels: Tensor) -> Tensor:
    """Zero-padded depthwise convolution of (H, W, C) by (C, k, k), odd k, as loops."""
    height, width, _ = image.shape
    reach = kernels.shape[-1] // 2
    out = torch.zeros_like(image)
    for i in range(height):
        for j in range(width):
            for a in range(-reach, reach + 1):
                for b in range(-reach, reach + 1):
                    if 0 <= i + a < height and 0 <= j + b < width:
                        out[i, j] += kernels[:, a + reach, b + reach] * image[i + a, j + b]
    return out


@settings(quick, max_examples=15)
@given(seed=seeds, channels=st.integers(1, 5))
def test_equation_24_where_all_channels_share_the_kernel(seed, channels):
    noise = generator(seed)
    image = torch.randn(4, 3, channels, dtype=torch.float64, generator=noise)
    kernel = torch.randn(1, 3, 3, dtype=torch.float64, generator=noise)
    convolution, _ = depthwise_extremes(kernel.expand(channels, 3, 3), (4, 3))
    x = image.flatten(0, 1)
    out = same_convolution(image, kernel.expand(channels, 3, 3)).flatten(0, 1)
    assert kappa(out) <= bound_depthwise(convolution.kappa, extremes(x).kappa) * (1 + 1e-6)


# Where they fail


def test_a_wide_factor_can_vanish_on_what_the_other_gives():
    A, B = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0], [1.0]])
    assert kappa(A) == kappa(B) == 1
    assert (A @ B).abs().max() == 0  # p = 2 above m = n = 1
    assert kappa(B @ A) == math.inf  # p = 1 below m = n = 2


def test_proposition_4_1_fails_for_fewer_tokens_than_channels():
    # Orthogonal weights (C = 1) turn the row space of X, the first axis and a little of the third, nearly out
    # of itself.
    x = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    angle = math.pi / 2 - 1e-3
    turn = torch.eye(3, dtype=torch.float64)
    turn[0, 0] = turn[2, 2] = math.cos(angle)
    turn[0, 2], turn[2, 0] = -math.sin(angle), math.sin(angle)
    bound = bound_attention(torch.tensor(kappa(turn)), *extremes(x))
    assert bound == pytest.approx(1)
    assert kappa(x @ turn @ x.T @ x) > 900


def test_proposition_4_1_fails_for_one_head_even_with_many_tokens():
    # The head's keys read the first channel, its values the second, which is orthogonal to it: X W is fine.
    x = torch.cat([torch.eye(2), torch.zeros(2, 2)]).double()
    wk, wv = values(1.0, 0.0)[:, None], values(1e-3, 1.0)[:, None]
    wq = wk
    measured = (x @ wq) @ ((x @ wk).T @ (x @ wv))
    # One channel has kappa 1 whatever it is: two heads side by side show what became of the values.
    both = torch.cat([measured, x @ values(0.0, 1.0)[:, None]], 1)
    assert kappa(wq) == kappa(wk) == kappa(wv) == 1
    assert measured.norm() == pytest.approx(1e-3)
    assert kappa(both) == pytest.approx(1e3)
    # And with two channels a head, its own kappa.
    x = torch.eye(4, dtype=torch.float64)
    wk = torch.eye(4, dtype=torch.float64)[:, :2]
    wv = torch.stack([values(1.0, 0.0, 0.0, 0.0), values(0.0, 1e-3, 1.0, 0.0)], 1)
    bound = bound_attention(torch.tensor(kappa(wk) ** 2 * kappa(wv)), *extremes(x))
    assert bound < 1.001
    assert kappa((x @ wk) @ ((x @ wk).T @ (x @ wv))) == pytest.approx(1e3)


def test_proposition_4_2_fails_for_an_eigenvalue_near_minus_one():
    x = torch.eye(2, dtype=torch.float64)
    wq = torch.diag(values(-0.999, 0.999))
    bound = bound_attention_with_skip(torch.tensor(kappa(wq)), *extremes(x))
    assert bound == 1
    assert kappa(x @ wq @ x.T @ x + x) == pytest.approx(1.999 / 0.001)


def test_proposition_4_2_fails_for_large_weights():
    # C does not see the size of the weights, M does.
    x, w = torch.diag(values(0.1, 0.01)), 100.0 * torch.eye(2, dtype=torch.float64)
    bound = bound_attention_with_skip(torch.tensor(kappa(w) ** 3), *extremes(x))
    assert bound == pytest.approx(10.1, rel=1e-2)
    assert kappa(x @ w @ w.T @ x.T @ x @ w + x) > 900


def test_the_feed_forward_bound_fails_where_the_layers_do_not_fit():
    x, first = torch.eye(2, dtype=torch.float64), torch.eye(2, 4, dtype=torch.float64)
    last = torch.zeros(4, 2, dtype=torch.float64)
    last[0, 0], last[1, 1], last[2, 1] = 1, 1e-4, 1
    assert bound_ffn(*(torch.tensor(kappa(w)) for w in (first, last, x))) < 1.001
    assert kappa(x @ first @ last) == pytest.approx(1e4)


def test_equation_24_fails_for_a_kernel_of_its_own_in_each_channel():
    one, soft = torch.zeros(3, 3, dtype=torch.float64), torch.full((3, 3), 0.1, dtype=torch.float64)
    one[1, 1] = soft[1, 1] = 1
    b = torch.randn(3, 3, 1, dtype=torch.float64, generator=generator(0))
    a = same_convolution(b, soft[None])
    # Channels a = T b and b: the first is left alone, the second becomes the first.
    x = torch.cat([a, b], -1)
    convolution, _ = depthwise_extremes(torch.stack([one, soft]), (3, 3))
    bound = bound_depthwise(convolution.kappa, extremes(x.flatten(0, 1)).kappa)
    assert bound < 100
    assert kappa(same_convolution(x, torch.stack([one, soft])).flatten(0, 1)) > 1e12


# Singular values and verdicts


@pytest.mark.parametrize("size", [1, 3, 5])
def test_dense_values_of_a_convolution(size):
    kernels = torch.randn(3, size, size, dtype=torch.float64, generator=generator(1))
    height, width = 4, 5
    found, how = depthwise_extremes(kernels, (height, width))
    assert how == "dense matrix of each channel"
    s = []
    for kernel in kernels:
        basis = torch.eye(height * width, dtype=torch.float64).reshape(-1, height, width, 1)
        T = torch.stack([same_convolution(pixel, kernel[None]).flatten() for pixel in basis], 1)
        s.append(np.linalg.svd(T.numpy(), compute_uv=False))
    assert float(found.largest) == pytest.approx(np.max(s), rel=1e-9)
    assert float(found.smallest) == pytest.approx(np.min(s), rel=1e-9)


def test_dilated_kernels():
    kernels = torch.randn(2, 3, 3, dtype=torch.float64, generator=generator(2))
    spread = torch.zeros(2, 5, 3, dtype=torch.float64)
    spread[:, ::2] = kernels
    for dense in (True, False):
        dilated, _ = depthwise_extremes(kernels, (6, 7), dilation=(2, 1), dense=dense)
        torch.testing.assert_close(dilated, depthwise_extremes(spread, (6, 7), dense=dense)[0])


@pytest.mark.parametrize("grid", [(6, 7), (2, 2)], ids=["wide enough", "smaller than the kernel"])
def test_symbol_of_a_convolution(grid):
    kernels = torch.randn(2, 3, 3, dtype=torch.float64, generator=generator(3))
    found, how = depthwise_extremes(kernels, grid, dense=False)
    assert "circular" in how
    s = []
    for kernel in kernels.numpy():
        T = np.zeros((grid[0] * grid[1],) * 2)
        for i, j, a, b in np.ndindex(*grid, 3, 3):
            T[i * grid[1] + j, (i + a - 1) % grid[0] * grid[1] + (j + b - 1) % grid[1]] += kernel[a, b]
        s.append(np.linalg.svd(T, compute_uv=False))
    assert float(found.largest) == pytest.approx(np.max(s))
    assert float(found.smallest) == pytest.approx(np.min(s))


def test_large_convolutions_go_by_the_symbol():
    kernels = torch.zeros(2, 3, 3)
    kernels[:, 1, 1] = 1
    assert "circular" in depthwise_extremes(kernels, (48, 48))[1]
    assert "dense" in depthwise_extremes(kernels, (8, 8))[1]


def test_a_singular_convolution_has_an_infinite_kappa():
    shift = torch.zeros(1, 3, 3)
    shift[0, 0, 1] = 1  # a row is pushed out of the image
    assert depthwise_extremes(shift, (4, 4))[0].kappa == math.inf


def test_extremes_of_tokens_without_full_rank():
    x = torch.stack([torch.diag(values(2.0, 1.0)), torch.ones(2, 2), torch.zeros(2, 2)]).double()
    found = extremes(x)
    assert found.smallest.tolist() == [1, 0, 0]
    assert found.kappa.tolist() == [2, math.inf, math.inf]
    assert bound_attention(torch.tensor(1.0), *found).tolist() == [
        8,
        math.inf,
        pytest.approx(math.nan, nan_ok=True),
    ]


def test_kappa_of_products_goes_beyond_that_of_tokens():
    x = torch.diag(values(1.0, 1e-3))
    cubed = torch.stack([x @ x @ x, x @ x @ x @ x @ x])
    found = product_condition_number(cubed, torch.ones(2).double())
    assert found.kappa[0] == pytest.approx(1e9, rel=1e-3)
    assert found.at_least.tolist() == [False, True]
    assert 1e11 < found.kappa[1] < 1e13
    nothing = product_condition_number(torch.zeros(1, 2, 2).double(), torch.ones(1).double())
    assert nothing.at_least.all()
    assert nothing.kappa.isfinite().all()


def compared(kappas: list[float], at_least: list[bool], limits: list[float]) -> Comparison:
    return compare(ConditionNumber(values(*kappas), torch.tensor(at_least)), values(*limits))


def test_verdicts():
    inf, nan = math.inf, math.nan
    assert compared([2, 4.0001], [False, False], [4, 4]).counts == (2, 0, 0, 0)  # within the slack
    assert compared([5, 5], [False, True], [4, 4]).counts == (0, 0, 2, 0)  # a lower bound above is enough
    assert compared([2, nan, 2], [True, False, False], [4, 4, nan]).counts == (0, 0, 0, 3)
    assert compared([2, 2], [True, False], [inf, inf]).counts == (0, 2, 0, 0)
    mixed = compared([2, 8, 1, 1], [False, False, True, False], [4, 4, 9, inf])
    assert mixed.counts == (1, 1, 1, 1)
    assert (mixed.margin, mixed.smallest) == (1.25, 0.5)
