"""What the trainer decides by itself: sizes, steps, pace, folders."""

import pytest
import timm
import torch

from benchmarks.trainer import run as bench
from short_runs import recipe
from wellposed.train import Recipe
from wellposed.train.data import open_data
from wellposed.train.fitting import default_folder, from_model, own_patch
from wellposed.train.fitting import from_data as resolve
from wellposed.train.loop import PacedMonitor
from wellposed.train.optimizer import SCHEDULES, make_schedule
from wellposed.train.recipe import decisive


class Clock:
    """A monitor whose measurements take a given time of a clock that the test moves."""

    def __init__(self, monkeypatch, cost: float) -> None:
        self.now, self.cost = 0.0, cost
        monkeypatch.setattr("wellposed.train.loop.time.monotonic", lambda: self.now)

    def measure(self, step: int | None = None) -> dict[str, float]:
        self.now += self.cost
        return {}


@pytest.mark.parametrize(("cost", "every"), [(0.5, 100), (1.0, 100), (1.5, 200), (9.0, 900)])
def test_the_monitor_keeps_to_its_share(monkeypatch, cost, every) -> None:
    clock = Clock(monkeypatch, cost)
    paced = PacedMonitor(clock, None)
    assert paced.is_due(0)
    paced.measure(0)
    assert paced.every is None
    clock.now += 100 * 1.0  # so many updates of a second
    assert paced.is_due(100)
    paced.measure(100)
    assert paced.every == every
    assert cost / every <= 0.01
    fixed = PacedMonitor(clock, 7)
    fixed.measure(0)
    clock.now += 7
    fixed.measure(7)
    assert fixed.every == 7


def test_patches_follow_the_images() -> None:
    assert own_patch("vit_tiny_patch16_224") == 16
    assert own_patch("swin_tiny_patch4_window7_224") == 4
    assert own_patch("convmixer_768_32") is None
    data = open_data("digits")
    for size, patch in ((8, 2), (12, 3), (28, 4), (32, 4), (64, 8), (112, None), (224, None)):
        chosen = resolve(Recipe(model="vit_tiny_patch16_224", image_size=size), data)
        assert chosen.patch_size == patch, size
    assert resolve(Recipe(model="swin_tiny_patch4_window7_224", image_size=32), data).patch_size is None
    assert resolve(Recipe(patch_size=1), data).patch_size == 1


def test_what_is_resolved_stays_so() -> None:
    data = open_data("digits")
    for given in (
        Recipe(),
        Recipe(task="mae"),
        Recipe(edits=["gray_tokens method=svd"], image_size=32),
        Recipe(mixup=0.0),
    ):
        once = resolve(given, data)
        assert resolve(once, data) == once
    assert (once.mixup, resolve(Recipe(task="mae"), data).mixup) == (0.0, 0.0)
    assert resolve(Recipe(epochs=20), data).warmup_epochs == 2


def test_wider_models_learn_with_smaller_steps() -> None:
    for name, lr in (("test_vit", 3e-3), ("vit_tiny_patch16_224", 0.2 / 192)):
        assert from_model(Recipe(), timm.create_model(name))[0].lr == pytest.approx(lr)
    assert from_model(Recipe(lr=0.5, monitor_every=0), torch.nn.Identity())[0].lr == 0.5
    with pytest.raises(ValueError, match="set lr"):
        from_model(Recipe(), torch.nn.Identity())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_go_from_lr_to_min_lr_and_not_below(schedule) -> None:
    recipe = Recipe(schedule=schedule, epochs=30, lr=1e-3, min_lr=1e-5, warmup_epochs=0.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    plan = make_schedule(optimizer, recipe, updates_per_epoch=10)
    rates = []
    for update in range(300):
        plan.step_update(update)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(1e-3)
    assert rates == sorted(rates, reverse=True)
    assert 1e-5 <= rates[-1] < 2e-5
    if schedule == "poly":
        assert rates[150] == pytest.approx(1e-5 + 99e-5 * 0.5**0.9)


def test_steps_of_a_warm_up_start_low() -> None:
    recipe = Recipe(schedule="step", epochs=30, lr=1e-3, min_lr=1e-4, warmup_epochs=3.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    plan = make_schedule(optimizer, recipe, updates_per_epoch=10)
    for update, rate in ((0, 1e-6), (30, 1e-3), (299, 1e-4)):
        plan.step_update(update)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


@pytest.mark.parametrize("epochs", [1, 3])
def test_milestones_are_half_and_three_quarters_of_the_updates(epochs) -> None:
    recipe = Recipe(schedule="multistep", epochs=epochs, lr=1e-3, min_lr=1e-5, warmup_epochs=0.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    plan = make_schedule(optimizer, recipe, updates_per_epoch=20)
    for share, rate in ((0, 1e-3), (0.4, 1e-3), (0.6, 1e-4), (0.9, 1e-5)):
        plan.step_update(int(share * 20 * epochs))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_the_folder_hangs_on_what_decides() -> None:
    usual = default_folder(Recipe())
    assert usual.parts[0] == "runs"
    assert usual.name.startswith("digits-test_vit-")
    assert default_folder(Recipe(keep=5, trackers=(), monitor_every=3, workers=0)) == usual
    assert default_folder(Recipe(seed=1)) != usual
    assert default_folder(Recipe(data="packed:/some/where/cifar10.npz")).name.startswith("cifar10-")
    assert default_folder(Recipe(data="cifar10:/data")).name.startswith("cifar10-")
    assert "checkpoint_every" not in decisive(Recipe(checkpoint_every=5))


def test_the_bench_tells_both_steps() -> None:
    result = bench(recipe(image_size=16, limit=None, batch_size=4), updates=2, rounds=2)
    values = result.to_mapping()
    assert len(values["bare_seconds"]) == len(values["train_seconds"]) == 2
    assert values["ratio"] > 0
    assert values["images_per_second"] == pytest.approx(4 / (sum(values["train_seconds"]) / 2))
    assert 0 < values["monitor_share"] <= 0.01
    assert "ratio" in result.table()
