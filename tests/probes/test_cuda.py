"""The same measurements on a GPU as on the CPU."""

import pytest
import torch

import wellposed as wp
import zoo
from reference.spectra import geometric, rank_deficient, with_singular_values
from untouched import assert_same, fingerprint
from wellposed.linalg import KAPPA_LIMIT, condition_number, singular_values
from wellposed.probes import Monitor, bounds, jacobian_spectrum, ntk

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SOME = ("timm vit", "timm swin", "timm cait", "timm pvt_v2", "hf vit", "torchvision vit", "timm convmixer")


@pytest.mark.parametrize("kappa", [1.001, 10.0, 1e4, 1e6, 2.9e7])
@pytest.mark.parametrize("shape", [(3, 5), (64, 32), (197, 192)])
def test_prescribed_spectra(shape: tuple[int, int], kappa: float) -> None:
    values = geometric(min(shape), kappa)
    x = with_singular_values(values, *shape, batch=(3,)).matrix().cuda()
    found = condition_number(x)
    assert not found.at_least.any()
    assert torch.allclose(found.kappa.cpu(), torch.tensor(kappa, dtype=torch.float64), rtol=6e-3)
    assert torch.allclose(singular_values(x).cpu(), values, rtol=1e-4 if kappa <= 1e6 else 1e-2)


def test_rank_deficient_and_bad_matrices() -> None:
    x = with_singular_values(rank_deficient(geometric(9, 10.0), 1), 10, 30, batch=(3,)).matrix().cuda()
    x[1, 0, 0] = torch.nan
    x[2] = 0
    kappa, at_least = condition_number(x)
    assert at_least.tolist() == [True, False, True]
    assert kappa[0] == kappa[2] == KAPPA_LIMIT
    assert kappa[1].isnan()


@zoo.families(*SOME)
def test_diagnose_agrees_with_the_cpu(case: zoo.Case) -> None:
    model, x = case.model(), case.input(3)
    expected = {record.key: record for record in wp.diagnose(model, x, batch_size=2).records}
    model = model.cuda()
    before, state = fingerprint(model), torch.cuda.get_rng_state()
    diagnosis = wp.diagnose(model, x, batch_size=2)
    assert_same(before, fingerprint(model))
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert expected.keys() == {record.key for record in diagnosis.records}
    for record in diagnosis.records:
        other = expected[record.key]
        assert record.status == other.status
        if record.value is not None:
            assert record.value == pytest.approx(other.value, rel=3e-2, abs=1e-4), record
    assert {record.estimator for record in diagnosis.select("kappa", status="ok")} == {
        "float64 Gram matrix, values read off the tokens"
    }


def test_autocast_and_half_precision() -> None:
    case = zoo.BY_NAME["timm vit"]
    model, x = case.model().cuda(), case.input(2)
    with torch.autocast("cuda", torch.bfloat16):
        diagnosis = wp.diagnose(model, x)
    assert diagnosis.select("kappa", position="attention.branch")[0].dtype == "bfloat16"
    assert wp.diagnose(model.bfloat16(), x).select("kappa")[0].dtype == "bfloat16"


def test_monitor_of_a_compiled_model() -> None:
    case = zoo.BY_NAME["timm vit"]
    model, x = case.model().cuda(), case.input(4).cuda()
    monitor = Monitor(model, x, every=1)
    expected = monitor.measure()
    compiled = torch.compile(model)
    compiled(x).sum().backward()
    watching = Monitor(compiled, x, every=1)
    assert watching(0) == pytest.approx(expected)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(x).sum().backward()


@pytest.mark.parametrize("skip", [False, True])
def test_jacobian(skip: bool) -> None:
    case = zoo.BY_NAME["timm vit"]
    model, x = case.model(), case.input(1)
    exact = jacobian_spectrum(model, x, skip=skip, method="dense")
    options = {"method": "matrix-free", "max_steps": 544, "dtype": torch.float64}
    found = jacobian_spectrum(model.cuda(), x, skip=skip, **options)
    assert found.sigma_max.value == pytest.approx(exact.sigma_max.value, rel=1e-2)
    if skip:
        assert found.sigma_min.value == pytest.approx(exact.sigma_min.value, rel=1e-2)


def test_ntk_and_bounds() -> None:
    case = zoo.BY_NAME["timm vit"]
    model, x = case.model(), case.input(3)
    kernel, limits = ntk(model, x).kernel, bounds(model, x)
    model = model.cuda()
    assert torch.allclose(ntk(model, x).kernel.cpu(), kernel, rtol=1e-3)
    for record, other in zip(bounds(model, x), limits, strict=True):
        assert record.value == pytest.approx(other.value, rel=3e-2)
        assert record.bound == pytest.approx(other.bound, rel=3e-2)
