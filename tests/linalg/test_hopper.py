"""The kernels for Hopper GPUs: interpreted on a CPU, and as they are where there is such a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

import wellposed
from wellposed.compiling import fix_inductor
from wellposed.linalg import spectral_plan, spectral_power
from wellposed.linalg.svd_power import _adjoint
from wellposed.nn.functional import gray

pytest.importorskip("triton")
NUMPY = tuple(int(part) for part in np.__version__.split(".")[:2])


@pytest.mark.slow
def test_interpreted() -> None:
    # In one process: the start of each takes longer than what it tests.
    done = interpreted(
        "test_shapes",
        "test_each_image_has_its_own_power",
        "test_bad_images_stay_alone",
        "test_no_matrix_is_orthogonal_to_the_start",
    )
    # The Triton of torch 2.11 converts arrays in a way that NumPy 2.5 refuses; newer ones do not.
    if done.returncode and NUMPY >= (2, 5) and interpreted("loop_up_to_an_argument").returncode:
        pytest.skip("under this NumPy, this Triton's interpreter cannot run a loop at all")
    assert done.returncode == 0, done.stdout + done.stderr


def interpreted(*names: str) -> "subprocess.CompletedProcess[str]":
    script = Path(__file__).with_name("interpreted_chain.py")
    return subprocess.run(
        [sys.executable, str(script), *names],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


on_hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)),
    reason="needs a Hopper GPU",
)
SPECTRA = {
    "geometric": torch.logspace(0, -4, 196),
    "power law": torch.arange(1.0, 197) ** -1.74,
    "clustered": torch.cat([torch.ones(1), torch.linspace(0.0100, 0.0101, 100), torch.full((95,), 1.1e-4)]),
    "repeated": torch.cat([torch.ones(20), torch.full((176,), 1e-3)]),
}


def tokens(spectrum: torch.Tensor, channels: int, images: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    n = len(spectrum)
    U = torch.linalg.qr(torch.randn(images, n, n, generator=generator, dtype=torch.float64))[0]
    V = torch.linalg.qr(torch.randn(images, channels, n, generator=generator, dtype=torch.float64))[0]
    return ((U * spectrum.double()) @ V.mT).float().cuda()


@pytest.mark.every_value
@on_hopper
@pytest.mark.parametrize("eps", [0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("name", [*SPECTRA, "Gaussian", "tall", "many"])
def test_singular_values_and_gradient(name: str, eps: float) -> None:
    if name == "Gaussian":
        x = torch.randn(2, 196, 768, generator=torch.Generator().manual_seed(0)).cuda()
    elif name == "many":
        x = tokens(torch.logspace(0, -3, 600), 800, images=1)
    elif name == "tall":
        x = tokens(SPECTRA["geometric"][::2], 150).mT.contiguous()
    else:
        x = tokens(SPECTRA[name], 768)
    assert spectral_plan(x).engine == "hopper"
    x.requires_grad_()
    y = spectral_power(x, eps)
    U, s, Vh = torch.linalg.svd(x.detach().double(), full_matrices=False)
    expected = s[:, :1] * (s / s[:, :1]) ** eps
    got = torch.linalg.svdvals(y.detach().double())
    assert ((got - expected) / expected).abs()[s >= 0.99e-4 * s[:, :1]].max() <= 1e-3
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).cuda()
    y.backward(grad)
    slope = _adjoint(U, s, Vh.mT, grad.double(), eps, 1e-7, True)
    error = (x.grad - slope).norm(dim=(1, 2)) / slope.norm(dim=(1, 2))
    # Twenty equal largest values: s_max has no derivative there, and each method chooses one.
    assert error.max() <= (0.05 if name == "repeated" else 0.01)


@on_hopper
def test_compiled_recorded_mapped_and_again() -> None:
    x = tokens(SPECTRA["geometric"], 768)
    expected = spectral_power(x, 0.7)
    assert torch.equal(expected, spectral_power(x, 0.7))
    assert torch.equal(expected, torch.compile(lambda x: spectral_power(x, 0.7), fullgraph=True)(x))
    assert torch.equal(expected, torch.vmap(lambda x: spectral_power(x, 0.7))(x[:, None])[:, 0])
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        out = spectral_power(x, 0.7)
    out.zero_()
    recorded.replay()
    assert torch.equal(expected, out)


@on_hopper
def test_a_model_trains_with_it_compiled_under_autocast() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=3, depth=2).cuda()
    wellposed.gray_tokens(model, where="embedding")
    wellposed.gray_tokens(model, where="pixels")
    fix_inductor()
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    images = torch.rand(8, 3, 64, 64, device="cuda")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(step(images).float(), torch.arange(8, device="cuda") % 3)
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
    assert all(grad.isfinite().all() for grad in grads)


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zero_and_bad_images(dtype: torch.dtype) -> None:
    good = tokens(SPECTRA["geometric"][:40], 64, images=1)
    x = torch.cat([good, torch.zeros_like(good), good * torch.nan]).to(dtype).requires_grad_()
    y = spectral_power(x, 0.7)
    assert y.dtype == dtype
    assert torch.equal(y[0], spectral_power(x[:1], 0.7)[0])
    assert (y[1] == 0).all()
    assert y[2].isnan().all()
    y.backward(torch.ones_like(y))
    assert x.grad[0].isfinite().all()
    assert (x.grad[1] == 1).all()
    assert (x.grad[2] == 0).all()


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_a_gpu
@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "float32"), (torch.float64, "float64")])
def test_the_portable_engine_on_a_gpu(dtype: torch.dtype, precision: str) -> None:
    x = tokens(SPECTRA["geometric"], 768).to(dtype).requires_grad_()
    plan = spectral_plan(x, precision=precision)
    assert plan.engine == "portable"
    y = spectral_power(x, 0.7, precision=precision)
    s = torch.linalg.svdvals(x.detach().double())
    expected = s[:, :1] * (s / s[:, :1]) ** 0.7
    error = ((torch.linalg.svdvals(y.detach().double()) - expected) / expected).abs()
    assert error[s >= plan.floor * s[:, :1]].max() <= plan.error
    y.sum().backward()
    assert x.grad.isfinite().all()


@on_a_gpu
def test_the_dct_under_autocast_on_a_gpu() -> None:
    x = tokens(SPECTRA["power law"], 768).requires_grad_()
    exact = gray(x, 0.95, "dct")
    (slope,) = torch.autograd.grad(exact, x, x.detach())
    with torch.autocast("cuda", torch.bfloat16):
        low = gray(x, 0.95, "dct")
    (low_slope,) = torch.autograd.grad(low, x, x.detach())
    assert low.dtype == exact.dtype
    assert 0 < (low - exact).norm() / exact.norm() <= 3e-3
    assert (low_slope - slope).norm() / slope.norm() <= 1e-2


@on_hopper
@pytest.mark.parametrize("where", ["pixels", "embedding"])
def test_recorded_tests_between_recorded_updates(where) -> None:
    """As the trainer could have them: both live in one pool of memory, and take turns."""
    torch.manual_seed(0)
    smooth = torch.randn(2560, 3, 64, 64, device="cuda").cumsum(-1).cumsum(-2)
    images = smooth / smooth.std((1, 2, 3), keepdim=True)
    labels = torch.arange(2560, device="cuda") % 50
    options = {"img_size": 64, "patch_size": 8, "class_token": False, "global_pool": "avg", "depth": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=50, **options).cuda()
    wellposed.gray_tokens(model, 0.7, where=where)
    fix_inductor()
    compiled = torch.compile(model, mode="reduce-overhead")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(4):
        model.train()
        for batch, wanted in zip(images.split(256), labels.split(256), strict=True):
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(compiled(batch).float(), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            found = torch.cat([compiled(batch).float() for batch in images.split(256)])
            expected = torch.cat([model(batch).float() for batch in images.split(256)])
        assert found.isfinite().all()
        assert (found - expected).abs().max() <= 0.05 * expected.abs().max()
