"""Other ways to gray on a CPU: the same map, measured in turns."""

import csv
import io

import pytest
import torch
from rich.console import Console

from benchmarks import graying_peers as peers
from benchmarks.graying import run


@pytest.mark.parametrize("shape", [(2, 12, 20), (2, 20, 12)])
def test_they_are_the_same_map(shape) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 0.3
    for name, reference, bound in (
        ("spectral float32", "spectral", 1e-3),
        ("chain", "spectral", 5e-3),
        ("eigh", "spectral", 1e-5),
        ("svd", "spectral", 1e-5),
        ("dct products", "dct", 1e-5),
        ("scipy eigh", "spectral", 1e-5),
        ("scipy dct", "dct", 1e-5),
    ):
        difference = peers.METHODS[name](x) - peers.METHODS[reference](x)
        assert difference.norm() <= bound * x.norm(), name
    factor = peers.polar_factor(x)
    torch.testing.assert_close(torch.linalg.svdvals(factor), torch.ones(2, 12), rtol=1e-3, atol=0)


def test_ratios_are_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(peers, "SHAPES", ((2, 6, 9),))
    monkeypatch.setattr(peers.measure_peers, "__defaults__", (((2, 6, 9),), 2))
    before = torch.get_num_threads()
    run(["peers"], device="cpu", out=tmp_path, console=Console(file=io.StringIO()))
    assert torch.get_num_threads() == before
    rows = list(csv.DictReader((tmp_path / "graying-peers.csv").open()))
    assert len(rows) == (2 * len(peers.METHODS) - len(peers.FORWARD_ONLY)) * len(peers.CLOCKS)
    assert {row["rounds"] for row in rows} == {"2"}
    for row in rows:
        assert float(row["ratio_low"]) <= float(row["ratio"]) <= float(row["ratio_high"])
        assert row["method"] != "spectral" or float(row["ratio"]) == 1
    assert (tmp_path / "graying-peers.json").exists()
