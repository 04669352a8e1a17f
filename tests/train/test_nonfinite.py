"""A loss or gradient that is not finite never reaches the weights, and is explained."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from short_runs import assert_bitwise, run, weights
from wellposed.run_records import read_run
from wellposed.train.loop import Loop
from wellposed.train.model import Task
from wellposed.train.optimizer import Guard, takes_flag

BAD = 6


@pytest.fixture
def bad_update(monkeypatch):
    """Makes the loss of update BAD infinite, through the logits; ``bad_update.times`` counts."""
    forward = Loop._forward

    def failing(self, module, update, number, batch):
        if update == BAD:
            failing.times += 1
            with torch.no_grad():
                batch.images[0] = float("inf")
        return forward(self, module, update, number, batch)

    failing.times = 0
    monkeypatch.setattr(Loop, "_forward", failing)
    return failing


def test_it_stops_before_the_update_and_explains(tmp_path, bad_update) -> None:
    result = run(tmp_path / "bad", monitor_every=100, ema=0.9)
    assert result.status == "nonfinite"
    assert bad_update.times == 2  # once in training, once to explain it
    bad_update.times = -1000
    folder = tmp_path / "bad" / f"nonfinite-{BAD:08d}"
    report = json.loads((folder / "report.json").read_text())
    assert report["update"] == BAD
    assert report["images_finite"] is False
    assert report["first_bad_output"] == "patch_embed.proj"
    assert report["output_norms"]["patch_embed.proj"] == "nan"
    assert report["parameters"]["head.weight"]["weight"] > 0
    assert report["measured"]["kappa/0/input"] > 1
    assert load_file(folder / "batch-0.safetensors")["images_0"].shape == (16, 1, 8, 8)
    events = {line["event"]: line for line in read_run(tmp_path / "bad")}
    assert events["nonfinite"]["update"] == BAD
    assert events["nonfinite"]["folder"] == folder.name
    assert "the images themselves are not finite" in events["nonfinite"]["text"]

    run(tmp_path / "good", checkpoint_every=1, keep=100, ema=0.9)
    newest = tmp_path / "bad" / "checkpoints" / f"update-{BAD:08d}"
    assert newest == max((tmp_path / "bad" / "checkpoints").iterdir())
    for stem in ("model", "optimizer", "ema"):
        good = tmp_path / "good" / "checkpoints" / newest.name / f"{stem}.safetensors"
        assert_bitwise(load_file(newest / f"{stem}.safetensors"), load_file(good))


def test_skip_leaves_one_update_out(tmp_path, bad_update) -> None:
    result = run(tmp_path, on_nonfinite="skip")
    assert result.status == "finished"
    assert bad_update.times == 1
    lines = read_run(tmp_path)
    (event,) = (line for line in lines if line["event"] == "nonfinite")
    assert (event["update"], event["left_out"]) == (BAD, 1)
    state = weights(tmp_path)
    assert all(value.isfinite().all() for value in state.values())
    assert state["optimizer/head.weight/step"] == 11  # of 12


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        return self.linear(self.norm(x)).square().mean()


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("goes_on", [True, False])
def test_the_guard(on_host: bool, goes_on: bool) -> None:
    """On the host and on the device alike: weights, moments, counters, running statistics."""
    torch.manual_seed(0)
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    assert takes_flag(optimizer)
    assert not takes_flag(torch.optim.SGD(model.parameters()))
    guard = Guard(model, optimizer, torch.device("cpu"), continues=goes_on, on_host=on_host)

    def step(update: int, bad: bool) -> None:
        x = torch.randn(5, 3)
        if bad:
            x[0, 0] = float("inf")
        guard.begin()
        loss = model(x)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        guard.step(update, loss.detach(), norm)
        optimizer.zero_grad()

    def state() -> dict[str, torch.Tensor]:
        moments = {
            f"{index}/{key}": value.clone()
            for index, values in optimizer.state_dict()["state"].items()
            for key, value in values.items()
        }
        return {key: value.clone() for key, value in model.state_dict().items()} | moments

    step(0, bad=False)
    assert guard.read() == (0, None)
    before = state()
    step(1, bad=True)
    assert_bitwise(state(), before)
    assert guard.read() == (1, 1)
    step(2, bad=False)
    moved = any(not torch.equal(value, before[key]) for key, value in state().items())
    assert moved == goes_on
    assert guard.read() == ((1, 1) if goes_on else (2, 1))
    guard.reset()
    step(3, bad=False)
    assert guard.read() == (0, None)
    assert not torch.equal(model.linear.weight, before["linear.weight"])


@pytest.mark.parametrize("whole", [False, True])
def test_test_images_without_scores_are_counted_and_told(whole, tmp_path, monkeypatch) -> None:
    scores = Task.scores

    def broken(self, output, batch):
        rows = torch.arange(len(output)) if whole else torch.tensor([1])
        return scores(self, output.index_fill(0, rows, float("nan")), batch)

    monkeypatch.setattr(Task, "scores", broken)
    run(tmp_path, epochs=1)
    lines = read_run(tmp_path)
    (test,) = [line for line in lines if line["event"] == "test"]
    (warning,) = [line for line in lines if line["event"] == "warning"]
    if whole:
        # The largest of ten NaN is the first, which is the class of a tenth of the images.
        assert (test["nonfinite"], test["accuracy"]) == (400, 0.0)
    else:
        assert 0 < test["nonfinite"] < 400
    assert f"the scores of {test['nonfinite']} of " in warning["text"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["test"]["nonfinite"] == test["nonfinite"]


def test_a_whole_test_says_nothing(tmp_path) -> None:
    run(tmp_path, epochs=1)
    (test,) = [line for line in read_run(tmp_path) if line["event"] == "test"]
    assert "nonfinite" not in test
