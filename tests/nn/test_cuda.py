"""The same numbers on a GPU as on the CPU, also compiled and under autocast."""

import pytest
import torch

from wellposed.nn import ContextBroadcast, TokenGraying
from wellposed.nn.functional import gray

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def tokens(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    decay = torch.logspace(0, -3, 48, dtype=torch.float64)
    x = torch.randn(5, 48, 96, generator=generator, dtype=torch.float64)
    return (decay[:, None] * x).to(dtype)


def value_and_gradient(function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    y = function(x)
    (y.float() * torch.linspace(-1, 1, y.numel(), device=x.device).reshape(y.shape)).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("method", ["svd", "dct"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 2e-3)])
def test_gray_equals_the_cpu_in_float64(method: str, dtype: torch.dtype, bound: float) -> None:
    expected = value_and_gradient(lambda x: gray(x, 0.6, method), tokens(torch.float64))
    got = value_and_gradient(lambda x: gray(x, 0.6, method), tokens(dtype).cuda())
    for a, b in zip(got, expected, strict=True):
        assert (a.cpu().double() - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("method", ["svd", "dct"])
def test_a_bad_image_stays_alone(method: str) -> None:
    x = tokens().cuda()
    clean = gray(x, 0.6, method)
    x[2, 3, 4] = torch.inf
    out = gray(x, 0.6, method)
    assert not out[2].isfinite().any()
    others = [0, 1, 3, 4]
    torch.testing.assert_close(out[others], clean[others])


GRAPHABLE = (TokenGraying(0.6, "dct"), ContextBroadcast(96))


@pytest.mark.parametrize(
    ("op", "mode"),
    [
        # cuSOLVER's SVD cannot be captured in a CUDA graph
        (TokenGraying(0.6, "svd"), "default"),
        *((op, mode) for op in GRAPHABLE for mode in ("default", "reduce-overhead")),
    ],
    ids=str,
)
def test_compiles(op: torch.nn.Module, mode: str) -> None:
    torch._dynamo.reset()
    op = op.cuda()
    expected = value_and_gradient(op, tokens().cuda())
    compiled = torch.compile(op, fullgraph=True, mode=mode)
    for _ in range(3):
        got = value_and_gradient(compiled, tokens().cuda())
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.parametrize("method", ["svd", "dct"])
def test_autocast_leaves_the_digits(method: str) -> None:
    expected = gray(tokens().cuda(), 0.6, method)
    with torch.autocast("cuda", torch.bfloat16):
        torch.testing.assert_close(gray(tokens().cuda(), 0.6, method), expected)
        assert gray(tokens(torch.bfloat16).cuda(), 0.6, method).dtype == torch.bfloat16
