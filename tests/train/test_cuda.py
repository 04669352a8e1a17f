"""Runs on a GPU: compiled, as CUDA graphs where that can be, with the guard on the device."""

import signal

import pytest
import torch
from safetensors.torch import load_file

from short_runs import run, signal_at, weights
from wellposed.run_records import read_run
from wellposed.train import loop as loop_module
from wellposed.train.loop import Loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ON_GPU = {"device": "cuda", "limit": 512, "batch_size": 64, "precision": "bf16"}
BAD = 6


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "fp32", "compile": False},
        {"graying": "dct", "eps": 0.6, "eps_end": 1.0, "broadcast": "cb_s"},
        {"graying": "svd", "remove_skips": "attention", "skip_blocks": "0", "init": "xavier"},
        {"graying": "spectral"},
        {"graying": "spectral", "eps": 0.6, "eps_end": 1.0},
        {"graying": "spectral", "target_kappa": 10.0},
        {"graying": "condition", "gray_where": "blocks"},
        {"ema": 0.9, "accumulate": 2, "optimizer": "lamb", "drop_path": 0.2},
        {"mixup": 0.3, "cutmix": 1.0, "erase": 0.3, "flip": 0.5, "color_jitter": 0.2, "crop_scale": 0.5},
        {"placement": "stream", "workers": 2},
        {"compile_blocks": True, "graying": "spectral"},
        {"compile_blocks": True, "graying": "spectral", "eps": 0.6, "eps_end": 1.0, "broadcast": "cb_s"},
    ],
    ids=lambda fields: ",".join(fields) or "plain",
)
def test_runs_finish_with_finite_weights(fields, tmp_path) -> None:
    result = run(tmp_path, **ON_GPU | fields)
    assert result.status == "finished"
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


@pytest.mark.parametrize("where", ["pixels", "embedding"])
def test_all_test_images_are_scored(where, tmp_path) -> None:
    """Between updates that are recorded as CUDA graphs."""
    run(tmp_path, **ON_GPU | {"epochs": 6, "graying": "spectral", "gray_where": where})
    tests = [line for line in read_run(tmp_path) if line["event"] == "test"]
    assert len(tests) == 6
    assert all(isinstance(test["loss"], float) and "nonfinite" not in test for test in tests)


@pytest.mark.parametrize(("goes_on", "steps"), [("stop", BAD), ("skip", 23)])
def test_a_bad_update_is_left_out_on_the_device(goes_on, steps, tmp_path, monkeypatch) -> None:
    forward = Loop._forward

    def failing(self, module, update, number, batch):
        assert not self.guard.on_host
        loss, correct = forward(self, module, update, number, batch)
        return (loss * float("nan") if update == BAD else loss), correct

    monkeypatch.setattr(Loop, "_forward", failing)
    result = run(tmp_path, **ON_GPU, on_nonfinite=goes_on)
    assert result.status == ("nonfinite" if goes_on == "stop" else "finished")
    state = weights(tmp_path)
    assert all(value.isfinite().all() for value in state.values())
    assert state["optimizer/head.weight/step"] == steps


def test_pretraining_fine_tuning_and_a_probe(tmp_path) -> None:
    assert run(tmp_path / "mae", **ON_GPU, task="mae", mask_ratio=0.5).status == "finished"
    start = str(tmp_path / "mae")
    assert run(tmp_path / "tuned", **ON_GPU, start_from=start, layer_decay=0.7).status == "finished"
    assert run(tmp_path / "probe", **ON_GPU, task="probe", start_from=start).status == "finished"
    encoder = load_file(tmp_path / "mae" / "best" / "model.safetensors")
    probed = load_file(tmp_path / "probe" / "last" / "model.safetensors")
    assert torch.equal(probed["blocks.0.attn.qkv.weight"], encoder["blocks.0.attn.qkv.weight"])


@pytest.mark.parametrize(
    "fields",
    [
        {"drop_path": 0.3, "mixup": 0.3},
        {"task": "mae", "mask_ratio": 0.5},
        {"model": "convmixer_256_8", "model_options": {"dim": 32, "depth": 2, "kernel_size": 3}},
    ],
    ids=["vit", "mae", "batch norm"],
)
def test_recorded_updates_are_those_that_are_launched(fields, tmp_path, monkeypatch) -> None:
    """The same programs, once replayed and once launched one by one: masks and dropped paths too."""
    fields = ON_GPU | {"compile_blocks": True, "precision": "fp32", "epochs": 2, "log_every": 1} | fields
    run(tmp_path / "recorded", **fields)
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "is_recorded_here", lambda recipe, device: False)
        run(tmp_path / "launched", **fields)
    found, expected = (
        [
            (line["event"], line["loss"])
            for line in read_run(tmp_path / name)
            if line["event"] in ("train", "test")
        ]
        for name in ("recorded", "launched")
    )
    assert [event for event, _ in found] == [event for event, _ in expected]
    # Not the weights: a key's bias has a gradient that is rounding, which AdamW enlarges.
    losses = [torch.tensor([loss for _, loss in lines]) for lines in (found, expected)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=0.0)


def test_terminated_and_resumed(tmp_path, monkeypatch) -> None:
    signal_at(monkeypatch, 11, signal.SIGTERM)
    assert run(tmp_path, **ON_GPU).status == "terminated"
    assert run(tmp_path, **ON_GPU).status == "finished"
    starts = [line["update"] for line in read_run(tmp_path) if line["event"] == "resume"]
    assert len(starts) == 1
    assert 11 <= starts[0] < 24
    assert weights(tmp_path)["optimizer/head.weight/step"] == 24
