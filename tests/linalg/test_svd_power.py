"""The gradient of svd_power against finite differences, where autograd through an SVD breaks too.

The values of the map are tested through ``gray`` in ``tests/nn/test_gray.py``.
"""

from collections.abc import Callable

import pytest
import scipy.special
import torch
from torch import Tensor

from reference.spectra import (
    Factored,
    clustered,
    generator,
    geometric,
    power_law,
    rank_deficient,
    repeated,
    values,
    with_singular_values,
)
from wellposed.linalg import svd_power
from wellposed.linalg.svd_power import exprel

SHAPES = {
    "wide": (4, 6),
    "tall": (6, 4),
    "square": (4, 4),
    "one token": (1, 5),
    "one channel": (5, 1),
}
MATRIX_SHAPES = {name: shape for name, shape in SHAPES.items() if min(shape) > 1}


def float32_gradient_bound(kappa: float) -> float:
    """The float32 gradient against the float64 one at the same point, relative in the Frobenius norm.

    The rule of the values themselves: eps32 * s_max / s_min. The gap between values does not enter.
    Seen: 0.17 of this at gaps of 0, 1e-7 and 1e-6 (kappa 2e3), 0.33 of it at kappa 10.
    """
    return torch.finfo(torch.float32).eps * kappa


def over(shapes: dict[str, tuple[int, int]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("tokens", "channels"), shapes.values(), ids=shapes.keys())


both_scales = pytest.mark.parametrize("rescale", [True, False], ids=["rescaled", "literal"])


def assert_gradient_by_finite_differences(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    # Central differences with this step are good to about 1e-9 for the mild spectra used here.
    assert torch.autograd.gradcheck(function, x.requires_grad_(), eps=1e-6, atol=1e-7, rtol=1e-6)


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (out,) = torch.autograd.grad((function(x) * weight).sum(), x)
    return out


def random(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def autograd_svd_power(x: Tensor, eps: float) -> Tensor:
    """The same map as anyone would write it, with the gradient that torch.linalg.svd brings."""
    U, s, Vh = torch.linalg.svd(x, full_matrices=False)
    s_max = s[..., :1]
    return (U * (s_max * (s / s_max) ** eps)[..., None, :]) @ Vh


@pytest.mark.pairwise
@both_scales
@over(SHAPES)
@pytest.mark.parametrize("eps", [0.2, 0.7, 1.0])
def test_gradient_at_distinct_values(tokens, channels, eps, rescale):
    x = with_singular_values(geometric(min(tokens, channels), 10, largest=3), tokens, channels).matrix()
    assert_gradient_by_finite_differences(lambda x: svd_power(x, eps, rescale=rescale), x)


@both_scales
def test_gradient_of_a_batch(rescale):
    x = with_singular_values(power_law(3, 1.5, largest=2), 3, 4, batch=(2, 2)).matrix()
    assert_gradient_by_finite_differences(lambda x: svd_power(x, 0.5, rescale=rescale), x)


@both_scales
@over(MATRIX_SHAPES)
def test_gradient_where_small_values_repeat(tokens, channels, rescale):
    s = values(3.0, 1.0, 1.0, 1.0)
    x = with_singular_values(s, tokens, channels).matrix()
    assert_gradient_by_finite_differences(lambda x: svd_power(x, 0.5, rescale=rescale), x)


@both_scales
@over(MATRIX_SHAPES)
def test_gradient_where_the_largest_pair_repeats(tokens, channels, rescale):
    # The largest value has a kink here. Central differences see the mean over the pair, and so do we.
    x = with_singular_values(repeated(geometric(2, 3, largest=3)), tokens, channels).matrix()
    assert_gradient_by_finite_differences(lambda x: svd_power(x, 0.5, rescale=rescale), x)


@both_scales
def test_gradient_at_exactly_equal_values(rescale):
    # A diagonal matrix: the SVD finds the repeated values equal to the last bit.
    x = torch.diag(values(2.0, 2.0, 1.0, 1.0, 1.0))
    assert_gradient_by_finite_differences(lambda x: svd_power(x, 0.5, rescale=rescale), x)


@pytest.mark.pairwise
@both_scales
@over(MATRIX_SHAPES)
@pytest.mark.parametrize("gap", [1e-7, 1e-12])
def test_gradient_at_clustered_values(tokens, channels, gap, rescale):
    s = torch.cat((values(3.0, 2.0), clustered(values(1.0), gap)))
    x = with_singular_values(s, tokens, channels).matrix()
    assert_gradient_by_finite_differences(lambda x: svd_power(x, 0.5, rescale=rescale), x)


def _clustered_below_the_largest(gap: float) -> Tensor:
    """A largest value on its own, and four pairs down to 1/2000 of it."""
    pairs = geometric(4, 1e3, largest=3)
    return torch.cat((2 * pairs[:1], clustered(pairs, gap)))


@pytest.mark.pairwise
@both_scales
@pytest.mark.parametrize("eps", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("gap", [0.0, 1e-7, 1e-6])
@pytest.mark.parametrize(("tokens", "channels"), [(9, 14), (14, 9), (9, 9)])
def test_float32_gradient_at_clustered_values(tokens, channels, gap, eps, rescale):
    narrow = with_singular_values(_clustered_below_the_largest(gap), tokens, channels).matrix().float()
    weight = random(tokens, channels)
    expected = gradient(lambda x: svd_power(x, eps, rescale=rescale), narrow.double(), weight)
    actual = gradient(lambda x: svd_power(x, eps, rescale=rescale), narrow, weight.float())
    assert (actual - expected).norm() <= float32_gradient_bound(2e3) * expected.norm()


@pytest.mark.parametrize("eps", [0.1, 0.5, 0.9])
def test_float32_gradient_at_a_clustered_largest_pair(eps):
    # Which of the two is the largest is beyond float32, and the largest value enters all others. Its
    # share of the gradient may be spread differently over the pair, but must be right in total.
    s = torch.cat((clustered(values(3.0), 1e-7), values(1.0, 0.3)))
    factors = with_singular_values(s, 6, 4)
    narrow, weight = factors.matrix().float(), random(6, 4)
    expected = gradient(lambda x: svd_power(x, eps), narrow.double(), weight)
    error = gradient(lambda x: svd_power(x, eps), narrow, weight.float()) - expected
    U, V = factors.U[:, :2], factors.V[:, :2]
    in_pair = U.mT @ error @ V
    bound = float32_gradient_bound(10) * expected.norm()
    assert (error - U @ in_pair @ V.mT).norm() <= bound
    assert in_pair.trace().abs() <= bound


def _is_wrong_or_not_finite(actual: Tensor, expected: Tensor) -> bool:
    error = (actual - expected).norm() / expected.norm()
    return not bool(error < 1e-2)


@over(MATRIX_SHAPES)
@pytest.mark.parametrize("s", [(3.0, 1.0, 1.0, 1.0), (3.0, 3.0, 1.0, 1.0)])
def test_control_autograd_through_the_svd_fails_at_repeated_values(tokens, channels, s):
    # Without this, the tests above could pass on inputs that trouble nobody.
    x = with_singular_values(values(*s), tokens, channels).matrix()
    weight = random(tokens, channels)
    right = gradient(lambda x: svd_power(x, 0.5), x, weight)
    assert _is_wrong_or_not_finite(gradient(lambda x: autograd_svd_power(x, 0.5), x, weight), right)


def test_control_autograd_through_the_svd_is_not_finite_at_exactly_equal_values():
    x = torch.diag(values(2.0, 1.0, 1.0))
    assert not gradient(lambda x: autograd_svd_power(x, 0.5), x, random(3, 3)).isfinite().all()


@pytest.mark.parametrize(("tokens", "channels"), [(9, 14), (14, 9), (9, 9)])
def test_control_autograd_through_the_svd_loses_its_digits_at_clustered_values(tokens, channels):
    narrow = with_singular_values(_clustered_below_the_largest(1e-7), tokens, channels).matrix().float()
    weight = random(tokens, channels)
    right = gradient(lambda x: svd_power(x, 0.9), narrow.double(), weight)
    assert _is_wrong_or_not_finite(
        gradient(lambda x: autograd_svd_power(x, 0.9), narrow, weight.float()), right
    )


def test_control_autograd_through_the_svd_is_the_same_gradient_elsewhere():
    x, weight = random(4, 6), random(4, 6, seed=8)
    expected = gradient(lambda x: autograd_svd_power(x, 0.5), x, weight)
    torch.testing.assert_close(gradient(lambda x: svd_power(x, 0.5), x, weight), expected)


def _rank_two(tokens: int, channels: int) -> Factored:
    s = rank_deficient(values(3.0, 1.0), zeros=min(tokens, channels) - 2)
    return with_singular_values(s, tokens, channels)


def _rank_keeping_directions(factors: Factored) -> dict[str, Tensor]:
    """Perturbations that stay inside the column space, the row space, or both: no value leaves zero."""
    U, V = factors.U[:, :2], factors.V[:, :2]
    tokens, channels = len(U), len(V)
    return {
        "both": U @ random(2, 2) @ V.mT,
        "column space": U @ random(2, channels),
        "row space": random(tokens, 2) @ V.mT,
    }


@pytest.mark.pairwise
@both_scales
@over(MATRIX_SHAPES)
@pytest.mark.parametrize("inside", ["both", "column space", "row space"])
def test_gradient_where_values_vanish_along_directions_that_keep_the_rank(tokens, channels, inside, rescale):
    factors = _rank_two(tokens, channels)
    x, weight = factors.matrix(), random(tokens, channels, seed=8)
    direction = _rank_keeping_directions(factors)[inside]

    def loss(x: Tensor) -> Tensor:
        return (svd_power(x, 0.5, rescale=rescale) * weight).sum()

    analytic = gradient(lambda x: svd_power(x, 0.5, rescale=rescale), x, weight)
    assert analytic.isfinite().all()
    step = 1e-5
    numeric = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    torch.testing.assert_close((analytic * direction).sum(), numeric, rtol=1e-6, atol=1e-6)


@both_scales
@over(MATRIX_SHAPES)
def test_gradient_where_values_vanish_along_any_direction_under_the_floor(tokens, channels, rescale):
    # As long as the step stays under the floor, values that leave zero move on the straight line.
    x = _rank_two(tokens, channels).matrix()
    assert_gradient_by_finite_differences(lambda x: svd_power(x, 0.5, rescale=rescale, floor=1e-3), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@over(MATRIX_SHAPES)
def test_gradient_where_values_vanish_is_bounded_by_the_floor(tokens, channels, dtype):
    weight = random(tokens, channels).to(dtype)
    x = _rank_two(tokens, channels).matrix().to(dtype)
    steepest = 1e-7 ** (0.5 - 1)
    # Twice: the value of s_max carries a second share, smaller than the first.
    assert gradient(lambda x: svd_power(x, 0.5), x, weight).norm() <= 2 * steepest * weight.norm()


@pytest.mark.pairwise
@both_scales
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@over(SHAPES)
def test_zero_matrix_has_a_finite_gradient(tokens, channels, dtype, rescale):
    zeros = torch.zeros(tokens, channels, dtype=dtype)
    out = gradient(lambda x: svd_power(x, 0.5, rescale=rescale), zeros, random(tokens, channels).to(dtype))
    assert out.isfinite().all()


@pytest.mark.pairwise
@both_scales
@over(MATRIX_SHAPES)
@pytest.mark.parametrize("eps", [0.2, 0.7])
def test_gradient_with_values_on_both_sides_of_a_large_floor(tokens, channels, eps, rescale):
    s = values(3.0, 2.0, 0.6, 0.3)
    x = with_singular_values(s, tokens, channels).matrix()
    assert_gradient_by_finite_differences(lambda x: svd_power(x, eps, rescale=rescale, floor=0.3), x)


@both_scales
@over(MATRIX_SHAPES)
def test_gradient_where_values_repeat_under_a_large_floor(tokens, channels, rescale):
    s = values(3.0, 2.0, 0.5, 0.5)
    x = with_singular_values(s, tokens, channels).matrix()
    assert_gradient_by_finite_differences(lambda x: svd_power(x, 0.5, rescale=rescale, floor=0.3), x)


@both_scales
@over(MATRIX_SHAPES)
def test_values_under_the_floor_are_scaled_linearly(tokens, channels, rescale):
    s = values(3.0, 2.0, 0.6, 0.3)
    factors = with_singular_values(s, tokens, channels)
    grayed = torch.linalg.svdvals(svd_power(factors.matrix(), 0.5, rescale=rescale, floor=0.3))
    slope = 0.3**-0.5 / (1 if rescale else 3)
    torch.testing.assert_close(grayed[2:], slope * s[2:], rtol=1e-13, atol=0)
    torch.testing.assert_close(grayed, factors.grayed(0.5, rescale=rescale, floor=0.3).s, rtol=1e-13, atol=0)


@over(SHAPES)
def test_floor_of_one_is_the_identity_with_its_gradient(tokens, channels):
    x, weight = random(tokens, channels), random(tokens, channels, seed=8)
    torch.testing.assert_close(svd_power(x, 0.5, floor=1.0), x)
    torch.testing.assert_close(gradient(lambda x: svd_power(x, 0.5, floor=1.0), x, weight), weight)


def test_second_derivative_is_refused_and_not_wrong():
    x = random(3, 4).requires_grad_()
    (first,) = torch.autograd.grad(svd_power(x, 0.5).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.square().sum().backward()


def test_gradient_under_vmap():
    x, weight = random(3, 4, 5), random(3, 4, 5, seed=8)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return (svd_power(x, 0.5) * weight).sum()

    each = torch.func.vmap(torch.func.grad(loss))(x, weight)
    torch.testing.assert_close(each, gradient(lambda x: svd_power(x, 0.5), x, weight))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 4e-16), (torch.float32, 4e-7)], ids=str)
def test_exprel_keeps_its_digits(dtype, bound):
    small = torch.logspace(-12, 1.2, 400, dtype=torch.float64)
    y = torch.cat([-small.flip(0), torch.zeros(1, dtype=torch.float64), small]).to(dtype)
    expected = torch.from_numpy(scipy.special.exprel(y.double().numpy()))
    assert ((exprel(y).double() - expected) / expected).abs().max() <= bound * (1 + y.abs().max())
