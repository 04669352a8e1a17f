"""The least times: formulas against numbers worked out by hand."""

import pytest

from benchmarks.floors import (
    Chain,
    Peaks,
    Work,
    broadcast_work,
    chain_of,
    dct_work,
    eigh_work,
    floor_of,
    peaks_of,
    spectral_work,
    svd_work,
    work_of,
)
from benchmarks.graying_steps import EDITS, added_work, model_size, plain_work, step_floors
from wellposed.train.recipe import Recipe

PEAKS = Peaks(1e12, {"fp64": 1e12, "fp32": 1e12, "half": 1e12})


def test_spectral_forward_by_hand() -> None:
    # n = 10, d = 20, three squarings of which one is in float64
    work = spectral_work(10, 20, Chain(3, 1), backward=False)
    assert work.bytes == 2 * 200 * 4
    assert work.operations == {"fp64": 2000 + 1000 + 2 * 2000, "half": 3 * 2 * 1000}


def test_spectral_backward_by_hand() -> None:
    chain = Chain(3, 1)
    forward, both = (spectral_work(10, 20, chain, backward=back) for back in (False, True))
    assert both.bytes - forward.bytes == 3 * 200 * 4 + 2 * 3 * 100 * 4
    assert both.operations["half"] - forward.operations["half"] == 3 * 6 * 1000
    assert both.operations["fp64"] - forward.operations["fp64"] == 6 * 2000


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("method", ["spectral", "dct", "svd", "svd-gesvda", "eigh", "dct-compiled"])
def test_the_side_does_not_matter_and_more_costs_more(method, backward) -> None:
    def seconds(tokens: int, channels: int) -> float:
        work = work_of(method, tokens, channels, backward=backward, eps=0.7)
        assert work is not None
        return floor_of(work, PEAKS).seconds

    assert seconds(12, 30) == pytest.approx(seconds(30, 12))
    assert seconds(12, 30) < seconds(13, 30) < seconds(13, 31)


def test_backward_costs_more_than_forward() -> None:
    for work in (dct_work, svd_work, eigh_work):
        forward, both = (floor_of(work(50, 80, backward=back), PEAKS) for back in (False, True))
        assert both.moving > forward.moving
        assert both.computing > forward.computing


def test_the_slower_of_bytes_and_operations_counts() -> None:
    work = Work(3e12, {"fp64": 1e12, "half": 1e12})
    assert floor_of(work, PEAKS).seconds == 3
    assert floor_of(work, Peaks(1e13, PEAKS.operations)).seconds == 2


def test_devices_that_are_not_known_have_no_floor() -> None:
    assert peaks_of("NVIDIA H200") is not None
    assert [peaks_of(name) for name in ("CPU", "NVIDIA GeForce RTX 4090", "")] == [None] * 3
    assert work_of("unheard of", 10, 10, backward=False, eps=0.5) is None


def test_the_chain_is_the_one_that_is_fitted() -> None:
    chain = chain_of(0.7)
    assert 10 < chain.steps < 30
    assert 0 < chain.wide < chain.steps


def test_floors_of_a_step() -> None:
    recipe = Recipe(model="test_vit", image_size=32, batch_size=4, precision="bf16")
    size = model_size(recipe)
    assert size.patches == (4, 3 * 16 * 16)
    assert size.embedded == (4, 64)
    assert size.block_tokens == [(5, 64)] * len(size.block_tokens)
    assert plain_work(size, 4, "bf16").operations == {"half": 12 * size.operations}
    assert plain_work(size, 4, "fp32").operations.keys() == {"fp32"}
    blocks = len(size.block_tokens)
    assert added_work("cb", size, "bf16") == broadcast_work(5, 64, scaled=False, itemsize=2) * blocks
    assert added_work("cb_s", size, "bf16").bytes == 1.5 * added_work("cb", size, "bf16").bytes
    assert added_work("dct-pixels", size, "bf16") == dct_work(*size.patches, backward=False)
    assert added_work("dct-embedding", size, "bf16") == dct_work(*size.embedded, backward=True, itemsize=2)
    floors = step_floors(recipe, list(EDITS), PEAKS)
    assert floors.keys() == {"plain", *EDITS}
    assert all(value > 0 for value in floors.values())
