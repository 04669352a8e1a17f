"""Graying timed alone: sizes, what is skipped, what fails, and that the right thing is timed."""

import time

import pytest
import torch

from benchmarks.graying_growth import (
    BOTH,
    FORWARD,
    METHODS,
    GrowthRow,
    Operation,
    Point,
    batch_within,
    crossovers,
    gray_by_eigh,
    grow,
    operation,
    points,
    power_law_tokens,
    spectral_code,
)
from benchmarks.timing import timed
from wellposed.linalg.svd_power import svd_power
from wellposed.nn import functional

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick(monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.graying_growth._BUDGET", 0.005)


def made_of(call, name: str = "made up") -> Operation:
    return Operation(name, call, 0.7, is_slow=True, is_exact=False)


def sizes(*tokens: int) -> list[Point]:
    return [Point("tokens", n, 8, 2) for n in tokens]


def test_all_sizes_hold_about_the_same_numbers() -> None:
    found = points("tokens", (4096, 64, 196), (768,), (1, 256))
    assert [(point.tokens, point.batch) for point in found] == [(64, 256), (196, 256), (4096, 12)]
    assert [point.batch for point in points("channels", (196,), (192, 1280), (1, 256))] == [256, 153]
    assert [point.size for point in points("batch", (64,), (192,), (8, 1))] == [1, 8]


def test_a_slow_method_gets_fewer_images() -> None:
    small, large = Point("tokens", 100, 800, 64), Point("tokens", 400, 800, 64)
    assert batch_within(large, small, seconds=0.1, limit=2.0) == 64
    assert batch_within(large, small, seconds=1.0, limit=2.0) == 8
    assert batch_within(large, small, seconds=1e3, limit=2.0) == 1


def test_larger_sizes_are_skipped_after_a_slow_one() -> None:
    def slow(x):
        time.sleep(0.06)
        return x * 2

    rows = list(grow(made_of(slow), sizes(4, 8, 16), CPU, limit=0.05))
    assert [(row.tokens, row.passes, row.status) for row in rows] == [
        (n, passes, "ok" if n == 4 else "skipped") for n in (4, 8, 16) for passes in (FORWARD, BOTH)
    ]
    assert rows[2].microseconds is None
    assert "tokens 4 took" in rows[2].note
    assert "limit of 0.05 s" in rows[2].note


def test_an_error_is_a_row_and_the_next_size_is_tried() -> None:
    def fails_at_eight(x):
        if x.shape[-2] == 8:
            raise torch.OutOfMemoryError("no room\nsecond line")
        return x * 2

    rows = list(grow(made_of(fails_at_eight), sizes(4, 8, 16), CPU, limit=5))
    assert [row.status for row in rows] == ["ok", "ok", "failed", "failed", "ok", "ok"]
    assert rows[2].note == "OutOfMemoryError: no room"


def test_a_backward_pass_alone_may_fail() -> None:
    rows = list(grow(made_of(lambda x: x.detach() * 2), sizes(4), CPU, limit=5))
    assert [row.status for row in rows] == ["ok", "failed"]


def test_gesvda_without_a_gpu_is_a_row() -> None:
    rows = list(grow(operation("svd-gesvda"), sizes(4), CPU, limit=5))
    assert [row.status for row in rows] == ["failed", "failed"]
    assert "NVIDIA GPU" in rows[0].note


def test_axes_that_cross_share_their_measurement() -> None:
    calls = []

    def count(x):
        calls.append(x.shape)
        return x * 2

    known: dict = {}
    (first, _), (again, _) = (
        list(grow(made_of(count), [Point(axis, 4, 8, 2)], CPU, limit=5, known=known))
        for axis in ("tokens", "batch")
    )
    made = len(calls)
    list(grow(made_of(count), [Point("channels", 4, 8, 2)], CPU, limit=5, known=known))
    assert len(calls) == made
    assert (first.axis, again.axis) == ("tokens", "batch")
    assert first.microseconds == again.microseconds


@pytest.mark.parametrize("name", [name for name in METHODS if name != "svd-gesvda"])
def test_every_method_is_measured_and_right(name) -> None:
    rows = list(grow(operation(name), sizes(4, 12), CPU, limit=5))
    assert [row.status for row in rows] == ["ok"] * 4, rows[0].note
    for row in rows:
        assert row.low <= row.microseconds <= row.high
        assert (row.floor, row.peak_mib) == (None, None)
        assert (row.error is None) == (name == "dct" or row.passes == BOTH)
        assert row.error is None or row.error < 1.1e-3


@pytest.mark.parametrize("shape", [(3, 5, 9), (3, 9, 5)])
def test_eigh_is_the_same_map(shape) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(gray_by_eigh(x, 0.6), svd_power(x, 0.6))


def test_tokens_have_the_spectrum_that_they_should() -> None:
    for tokens, channels in ((6, 10), (10, 6), (1, 4)):
        known = power_law_tokens(3, tokens, channels, CPU)
        values = torch.linalg.svdvals(known.x.double())
        torch.testing.assert_close(values, known.s.expand_as(values), rtol=1e-3, atol=0)
        assert known.error(known.x, 1.0) < 1e-3
        assert known.error(known.x * 1.01, 1.0) == pytest.approx(0.01, rel=0.1)
    assert torch.equal(power_law_tokens(2, 4, 5, CPU).x, power_law_tokens(2, 4, 5, CPU).x)


def test_the_code_behind_spectral_is_told_by_its_digits(monkeypatch) -> None:
    gray = functional.gray
    monkeypatch.setattr("benchmarks.graying_growth.gray", lambda x, eps, method: gray(x, eps, "svd"))
    assert spectral_code(CPU).startswith("the SVD")
    different = {"svd": 1.0, "spectral": 1.0001}
    monkeypatch.setattr("benchmarks.graying_growth.gray", lambda x, eps, method: x * different[method])
    assert "eigendecomposition" in spectral_code(CPU)


def test_a_slow_call_is_made_once() -> None:
    calls = []
    assert len(timed(lambda: (calls.append(1), time.sleep(0.02)), CPU, budget=0.01)) == 1
    assert len(calls) == 1
    assert len(timed(lambda: None, CPU, budget=0.01)) == 5


def test_crossovers() -> None:
    def row(method: str, tokens: int, microseconds: float | None) -> GrowthRow:
        where = {"axis": "tokens", "tokens": tokens, "channels": 8, "batch": 1, "passes": FORWARD}
        return GrowthRow(method=method, microseconds=microseconds, **where)

    own = [row("spectral", n, time) for n, time in ((4, 2.0), (8, 2.0), (16, 2.0), (32, 2.0))]
    other = [row("dct", n, time) for n, time in ((4, 1.0), (8, 3.0), (16, 1.0), (32, None))]
    (found,) = crossovers(own + other)
    assert found.sizes == (4, 8, 16)
    assert found.changes == [8, 16]
    assert str(found).endswith("dct is faster than spectral up to 4, spectral from 8 on, dct from 16 on")
    (always,) = crossovers([*own, row("svd", 4, 9.0), row("svd", 8, 9.0)])
    assert str(always).endswith("spectral is faster than svd at every size measured (4 to 8)")
    assert crossovers(own) == []
