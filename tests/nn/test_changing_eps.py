"""A power that changes during training."""

import pytest
import torch

from wellposed.nn import TokenGraying, functional


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize(("method", "bound"), [("svd", 1e-13), ("dct", 1e-13), ("spectral", 1e-2)])
def test_eps_may_be_a_tensor(method, bound, rescale) -> None:
    x = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for eps in (0.6, torch.tensor(0.6, dtype=torch.float64)):
        leaf = x.clone().requires_grad_()
        out = functional.gray(leaf, eps, method, rescale=rescale)
        (gradient,) = torch.autograd.grad(out.square().sum(), leaf)
        results.append((out, gradient))
    for as_number, as_tensor in zip(*results, strict=True):  # of "spectral" the two are fitted apart
        assert (as_number - as_tensor).norm() <= bound * as_number.norm()


@pytest.mark.parametrize("method", ["svd", "dct"])
def test_eps_may_not_be_several_numbers(method) -> None:
    with pytest.raises(ValueError, match=r"one number, got a tensor of shape \(2,\)"):
        functional.gray(torch.ones(2, 7, 5), torch.tensor([0.6, 0.7]), method)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["svd", "dct", "spectral"])
def test_a_tensor_changes_without_compiling_again(method) -> None:
    torch._dynamo.reset()
    module = TokenGraying(0.9, method)
    module.eps = torch.tensor(0.9, dtype=torch.float64)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for eps in (0.9, 0.8, 0.7, 0.5):
            module.eps.fill_(eps)
            torch.testing.assert_close(compiled(x), functional.gray(x, module.eps, method))
            compiled(x).sum().backward()
    assert repr(module) == f"TokenGraying(eps=0.5, method='{method}')"
