"""Models whose blocks are compiled one by one: equal ones share a program, edited ones do not."""

import pytest
import timm
import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.utils import counters

from short_runs import run, weights
from wellposed.run_records import read_run
from wellposed.train.parallel import room_for_programs
from wellposed.train.recipe import Recipe

pytestmark = pytest.mark.usefixtures("without_kernels")
ONE_BLOCK = {"graying": "dct", "eps": 0.5, "gray_where": "blocks", "gray_blocks": "0"}


@pytest.fixture
def without_kernels(monkeypatch) -> None:
    """Traced as ever, but run by torch's own operations: making kernels takes half a minute."""
    compile_ = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_(self, backend="aot_eager"))


def test_a_run_is_that_of_the_uncompiled_model(tmp_path) -> None:
    for name, fields in {"plain": {"compile": False}, "blocks": {"compile": True}}.items():
        run(tmp_path / name, **ONE_BLOCK | fields, compile_blocks=True, epochs=1, monitor_every=2)
    found, expected = weights(tmp_path / "blocks"), weights(tmp_path / "plain")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-4), name  # an FFT against two products
    measured = [
        [line for line in read_run(tmp_path / name) if line["event"] == "monitor"]
        for name in ("plain", "blocks")
    ]
    assert len(measured[0]) == len(measured[1]) > 1


def test_equal_blocks_are_compiled_once(tmp_path) -> None:
    torch._dynamo.reset()
    counters.clear()
    options = {"depth": 5, "embed_dim": 32, "num_heads": 2}
    run(tmp_path, compile=True, compile_blocks=True, epochs=1, model_options=options)
    assert counters["stats"]["unique_graphs"] == 2  # training and tests


def test_there_is_room_for_a_program_of_every_block() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=3, embed_dim=12, num_heads=1)
    with config.patch(recompile_limit=8):  # timm's optimizers raise it to a million
        with room_for_programs(Recipe(compile=True, compile_blocks=True), model):
            assert config.recompile_limit == 12
        assert config.recompile_limit == 8
        with room_for_programs(Recipe(compile=True), model):
            assert config.recompile_limit == 8
