"""Which arithmetic is chosen, and what is refused."""

import importlib

import pytest
import torch

from wellposed.linalg import spectral_plan, spectral_power
from wellposed.linalg.spectral_plan import FLOOR_EIGEN, FLOOR_FLOAT32, FLOOR_FLOAT64

# The package has the function under the module's name.
MODULE = importlib.import_module("wellposed.linalg.spectral_plan")
NARROW = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("dtype", "settings", "precision", "floor"),
    [
        (torch.float32, {}, "float64", FLOOR_EIGEN),
        (torch.bfloat16, {}, "float64", FLOOR_EIGEN),
        (torch.float64, {}, "float64", FLOOR_EIGEN),
        (torch.float32, {"precision": "float64"}, "float64", FLOOR_EIGEN),
        (torch.float64, {"precision": "float32"}, "float32", FLOOR_FLOAT32),
        (torch.float32, {"precision": "float32"}, "float32", FLOOR_FLOAT32),
        (torch.float32, {"floor": 1e-3}, "float64", 1e-3),
        (torch.float32, {"floor": 1e-2}, "float64", 1e-2),
        (torch.float32, {"floor": 1e-2, "precision": "float64"}, "float64", 1e-2),
    ],
)
def test_on_a_cpu(dtype, settings, precision, floor):
    plan = spectral_plan(NARROW.to(dtype), **settings)
    assert (plan.engine, plan.precision, plan.floor) == ("eigen", precision, floor)


@pytest.mark.parametrize(
    ("dtype", "settings", "precision", "floor"),
    [
        (torch.float32, {}, "float32", FLOOR_FLOAT32),
        (torch.bfloat16, {}, "float32", FLOOR_FLOAT32),
        (torch.float64, {}, "float64", FLOOR_FLOAT64),
        (torch.float32, {"precision": "float64"}, "float64", FLOOR_FLOAT64),
        (torch.float64, {"precision": "float32"}, "float32", FLOOR_FLOAT32),
        (torch.float32, {"floor": 1e-3}, "float64", 1e-3),
        (torch.float32, {"floor": 1e-2}, "float32", 1e-2),
        (torch.float32, {"floor": 1e-2, "precision": "float64"}, "float64", 1e-2),
    ],
)
@pytest.mark.usefixtures("by_the_chain")
def test_where_there_is_no_eigendecomposition(dtype, settings, precision, floor):
    plan = spectral_plan(NARROW.to(dtype), **settings)
    assert (plan.engine, plan.precision, plan.floor) == ("portable", precision, floor)


def test_a_small_tolerance_raises_the_floor_of_the_eigendecomposition():
    plan = spectral_plan(NARROW, tolerance=1e-5)
    assert plan.error == pytest.approx(1e-5)
    assert 9e-6 < plan.floor < 1e-5
    with pytest.raises(ValueError, match="tolerance must be at least 1e-06, got 1e-12"):
        spectral_plan(NARROW, tolerance=1e-12)


@pytest.mark.parametrize(
    ("capability", "dtype", "precision", "engine"),
    [
        ((9, 0), torch.bfloat16, "float64", "hopper"),
        ((9, 0), torch.float64, "float64", "portable"),
        ((8, 0), torch.float32, "float64", "portable"),
        ((8, 9), torch.float32, "float32", "portable"),
        ((12, 0), torch.float32, "float32", "portable"),
    ],
)
def test_on_a_gpu(by_the_chain, monkeypatch, capability, dtype, precision, engine):
    monkeypatch.setattr(MODULE, "_capability", lambda device: capability)
    monkeypatch.setattr(MODULE, "_has_kernels", lambda device: capability == (9, 0))
    plan = spectral_plan(NARROW.to(dtype))
    assert (plan.engine, plan.precision) == (engine, precision)


@pytest.mark.usefixtures("by_the_chain")
def test_hopper_without_triton_is_portable(monkeypatch):
    monkeypatch.setattr(MODULE, "_capability", lambda device: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert spectral_plan(NARROW).engine == "portable"


@pytest.mark.usefixtures("by_the_chain")
def test_hopper_asked_for_float32_is_portable(monkeypatch):
    monkeypatch.setattr(MODULE, "_has_kernels", lambda device: True)
    assert spectral_plan(NARROW, precision="float32").engine == "portable"


def test_says_what_is_computed_how(by_the_chain):
    text = str(spectral_plan(NARROW, floor=1e-3, tolerance=2e-3))
    assert text == "portable chain in float64: 2e-03 of each singular value above 1/1000 of the largest"
    by_the_chain.undo()
    text = str(spectral_plan(NARROW, floor=1e-5))
    assert text == (
        "eigendecomposition in float64: 9e-06 of each singular value above 1/100000 of the largest"
    )


def test_float32_cannot_see_below_its_floor():
    with pytest.raises(
        ValueError, match=r"floor must be at least 1/300 .*got 0\.001: the squares of smaller"
    ):
        spectral_plan(NARROW, floor=1e-3, precision="float32")


def test_unknown_precision():
    with pytest.raises(ValueError, match="precision must be one of auto, float32, float64, got 'half'"):
        spectral_plan(NARROW, precision="half")


@pytest.fixture
def rounded_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("rounded_products")
def test_float32_products_that_may_be_rounded_are_not_used():
    assert spectral_plan(NARROW).precision == "float64"
    with pytest.raises(ValueError, match="needs products that keep float32's digits"):
        spectral_plan(NARROW, precision="float32")


@pytest.mark.parametrize("floor", [0.0, 1.0, 1e-9])
def test_floor_out_of_reach(floor):
    with pytest.raises(ValueError, match="floor must be in"):
        spectral_power(NARROW, 0.5, floor=floor)
