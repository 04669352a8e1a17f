"""A second derivative that is not there is an error, not zero."""

import pytest
import torch
from torch import Tensor

from wellposed.nn.functional import gray


def cubed(method: str):
    return lambda x: gray(x, 0.6, method).pow(3).sum()


def tokens() -> Tensor:
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", ["spectral", "svd"])
def test_two_derivatives_of_torch_func_are_refused(method: str) -> None:
    slope = torch.func.grad(cubed(method))
    with pytest.raises(RuntimeError, match="method='dct' has all derivatives"):
        torch.func.grad(lambda x: slope(x).square().sum())(tokens())


@pytest.mark.parametrize("method", ["spectral", "svd", "condition"])
def test_a_gradient_penalty_is_refused_whatever_the_loss(method: str) -> None:
    # The gradient of a sum needs no gradient itself, and neither does that of what it came through.
    x = tokens().requires_grad_()
    eps = None if method == "condition" else 0.7
    (slope,) = torch.autograd.grad(gray(x, eps, method).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.square().sum().backward()


@pytest.mark.parametrize("method", ["spectral", "svd"])
def test_one_derivative_is_as_before(method: str) -> None:
    x = tokens()
    leaf = x.clone().requires_grad_()
    cubed(method)(leaf).backward()
    torch.testing.assert_close(torch.func.grad(cubed(method))(x), leaf.grad)
    several = torch.stack([x, 2 * x])
    by_image = torch.func.vmap(torch.func.grad(cubed(method)))(several)
    torch.testing.assert_close(by_image[0], leaf.grad)
    _, pull = torch.func.vjp(cubed(method), x)
    torch.testing.assert_close(pull(torch.ones((), dtype=torch.float64))[0], leaf.grad)


def test_the_dct_has_a_second_one() -> None:
    slope = torch.func.grad(cubed("dct"))

    def size(x: Tensor) -> Tensor:
        return slope(x).square().sum()

    x, step = tokens(), 1e-6
    v = torch.ones_like(x)
    by_differences = (size(x + step * v) - size(x - step * v)) / (2 * step)
    torch.testing.assert_close((torch.func.grad(size)(x) * v).sum(), by_differences, rtol=1e-6, atol=0)
