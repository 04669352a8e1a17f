"""Alarms: raised by what collapses, with evidence and a remedy, and not by what trains as it should."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import wellposed as wp
import zoo
from probes.test_nonfinite import Divides
from wellposed.probes import Alarm, Monitor
from wellposed.probes.alarms import KAPPA_RISE

VIT = zoo.BY_NAME["timm vit"]
SIZE = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 4, "num_classes": 4}


def vit() -> nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **SIZE)


def images(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def sharpen(model: nn.Module) -> None:
    """Scores so far apart that each row of attention sees one key."""
    for block in model.blocks[2:]:
        block.attn.qkv.weight[:96].mul_(200)


@torch.no_grad()
def lengthen(model: nn.Module) -> None:
    model.pos_embed[:, 5].mul_(2000)


@torch.no_grad()
def kill(model: nn.Module) -> None:
    for layer in (model.blocks[1].attn.proj, model.blocks[1].mlp.fc2):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


def break_off(model: nn.Module) -> None:
    model.blocks[3].mlp.act = Divides()


COLLAPSES: dict[str, tuple[Callable[[nn.Module], object], tuple[int, ...], str]] = {
    "rank collapse": (lambda model: wp.remove_skips(model, "attention"), (0, 1, 2, 3), "skips of attention"),
    "entropy collapse": (sharpen, (2, 3), "wp.normalise_spectrum(model, 'attention')"),
    "outlier tokens": (lengthen, (0, 1, 2, 3), "register tokens"),
    "dead block": (kill, (1,), "wp.initialise(model, 'timm', blocks=[1])"),
    "not finite": (break_off, (3,), "lower the learning rate"),
}


@pytest.mark.parametrize("name", COLLAPSES)
def test_what_has_collapsed(name: str) -> None:
    collapse, blocks, remedy = COLLAPSES[name]
    model, told = vit(), list[Alarm]()
    monitor = Monitor(model, images(), every=1, on_alarm=told.append)
    numbers = monitor(0)
    assert not told
    assert not any(key.startswith("alarm/") for key in numbers)
    collapse(model)
    numbers = monitor(1)
    (alarm,) = (each for each in told if each.name == name)
    assert alarm.blocks == blocks
    assert alarm.step == 1
    assert remedy in alarm.remedy
    assert str(alarm).startswith(f"{name} at step 1: {alarm.evidence}; try: ")
    assert numbers[f"alarm/{name.replace(' ', '_')}"] == len(blocks)
    assert monitor.raised == told
    monitor(2)
    assert len([each for each in told if each.name == name]) == 1, "it was there already"
    # The same in a diagnosis, which has no step.
    assert any(note.startswith(f"{name}: ") for note in wp.diagnose(model, images()).notes)


def test_an_alarm_comes_again_once_it_was_gone() -> None:
    model, told = vit(), list[Alarm]()
    monitor = Monitor(model, images(), every=1, on_alarm=told.append)
    for step in range(6):
        if step % 2:
            wp.remove_skips(model, "attention")
        else:
            wp.restore(model)
        monitor(step)
    assert [alarm.step for alarm in told if alarm.name == "rank collapse"] == [1, 3, 5]


def test_kappa_that_rises() -> None:
    model, told = vit(), list[Alarm]()
    monitor = Monitor(model, images(), every=1, on_alarm=told.append)
    first = monitor(0)["kappa/0/input"]
    with torch.no_grad():  # all positions nearly alike, and the embedding too
        model.pos_embed.copy_(model.pos_embed[:, :1] + 1e-3 * model.pos_embed)
        model.patch_embed.proj.weight.mul_(1e-3)
    numbers = monitor(1)
    assert numbers["kappa/0/input"] > KAPPA_RISE * first
    (alarm,) = (each for each in told if each.name == "kappa rising")
    assert 0 in alarm.blocks
    assert "times that of the first measurement" in alarm.evidence


def test_gradients_that_die_or_overflow() -> None:
    model, told = vit(), list[Alarm]()
    monitor = Monitor(model, images(), every=1, on_alarm=told.append)
    model(images()).square().mean().backward()
    numbers = monitor(0)
    for index, block in enumerate(model.blocks):
        squares = [parameter.grad.double().square().sum() for parameter in block.parameters()]
        assert numbers[f"gradient/{index}"] == pytest.approx(torch.stack(squares).sum().sqrt().item())
    assert not told
    for parameter in model.blocks[2].parameters():
        parameter.grad.zero_()
    monitor(1)
    assert [(alarm.name, alarm.blocks) for alarm in told] == [("dead block", (2,))]
    model.blocks[0].mlp.fc1.weight.grad[0, 0] = float("nan")
    model.blocks[1].mlp.fc1.weight.grad[0, 0] = float("nan")
    monitor(2)
    assert told[-1].name == "not finite"
    assert "first in block 1" in told[-1].evidence


def train(model: nn.Module, monitor: Monitor, lr: float, steps: int) -> None:
    """Four classes, of which each has a brightness of its own."""
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        y = torch.arange(16) % 4
        x = torch.randn(16, 3, 32, 32, generator=generator) + y[:, None, None, None]
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor(step)


def test_a_run_that_trains_raises_none() -> None:
    model, told = vit(), list[Alarm]()
    train(model, Monitor(model, images(), every=5, on_alarm=told.append), lr=0.01, steps=41)
    assert not told


def test_a_run_that_collapses() -> None:
    """The same run at 3,000 times the learning rate."""
    model, told = vit(), list[Alarm]()
    train(model, Monitor(model, images(), every=5, on_alarm=told.append), lr=30.0, steps=21)
    names = {alarm.name for alarm in told}
    assert names & {"rank collapse", "entropy collapse", "not finite", "dead block"}
    assert all(alarm.step for alarm in told)


def test_they_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = vit()
    wp.remove_skips(model, "attention")
    with caplog.at_level(logging.WARNING, "wellposed.monitor"):
        Monitor(model, images())(0)
    assert any(message.startswith("rank collapse at step 0: from block 0 on") for message in caplog.messages)


def test_in_tensorboard(tmp_path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    model = vit()
    with tensorboard.SummaryWriter(tmp_path) as writer:
        monitor = Monitor(
            model,
            images(),
            every=1,
            on_alarm=lambda alarm: writer.add_text(f"alarm/{alarm.name}", str(alarm), alarm.step),
        )
        for step in range(2):
            for name, value in monitor(step).items():
                writer.add_scalar(name, value, step)
            wp.remove_skips(model, "attention") if step == 0 else None
    events = reading.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("alarm/rank_collapse")] == [1]
    assert any("rank collapse" in tag for tag in events.Tags()["tensors"])
