"""The monitor in a training loop."""

import pytest
import torch
from torch import nn

import wellposed as wp
import zoo
from untouched import assert_same, fingerprint
from wellposed.probes import Monitor

VIT = zoo.BY_NAME["timm vit"]


def test_every_k_steps() -> None:
    monitor = Monitor(VIT.model(), VIT.input(4), every=3)
    assert [bool(monitor(step)) for step in range(7)] == [True, False, False, True, False, False, True]


def test_the_numbers_are_those_of_the_diagnosis() -> None:
    model, x = VIT.model(), VIT.input(4)
    scalars = Monitor(model, x, attention_images=4)(0)
    diagnosis = wp.diagnose(model, x)
    for record in diagnosis.select("kappa"):
        if record.position in ("input", "attention.branch", "ffn.branch"):
            assert scalars[f"kappa/{record.block}/{record.position}"] == record.value
    entropies = [record.value for record in diagnosis.select("entropy", head=None)]
    assert [scalars["entropy/0"], scalars["entropy/1"]] == entropies
    assert scalars["entropy/mean"] == pytest.approx(sum(entropies) / 2)
    branch = [record.value for record in diagnosis.select("kappa", position="attention.branch")]
    assert scalars["kappa/attention.branch/worst"] == max(branch)
    assert all(isinstance(value, float) for value in scalars.values())


def train(model: nn.Module, monitor: Monitor | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train()
    for step in range(4):
        x, y = torch.randn(4, 3, 32, 32), torch.randint(5, (4,))
        loss = nn.functional.cross_entropy(nn.functional.dropout(model(x), 0.1), y)
        optimizer.zero_grad()
        loss.backward()
        if monitor is not None:
            assert monitor(step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_training_does_not_notice() -> None:
    plain = train(VIT.model(), None)
    model = VIT.model()
    watched = train(model, Monitor(model, VIT.input(2), every=1))
    assert all(map(torch.equal, plain, watched))


def test_it_sees_the_model_change() -> None:
    model = VIT.model()
    monitor = Monitor(model, VIT.input(2))
    before = monitor.measure()
    with torch.no_grad():
        model.patch_embed.proj.weight.mul_(3)
    assert monitor.measure()["kappa/0/input"] != before["kappa/0/input"]


@zoo.families("timm mixer", "timm convmixer", "timm xcit", "timm cait", "torch encoder pre-norm")
def test_families_that_lack_something(case: zoo.Case) -> None:
    model = case.model()
    before = fingerprint(model)
    scalars = Monitor(model, case.input(2)).measure()
    assert_same(before, fingerprint(model))
    assert ("entropy/mean" in scalars) == case.has_attention
    assert any(name.startswith("kappa/0/") for name in scalars)


def test_blocks_and_bad_settings() -> None:
    scalars = Monitor(VIT.model(), VIT.input(2), blocks=[1]).measure()
    assert not any("/0" in name for name in scalars)
    with pytest.raises(ValueError, match="every must be at least 1"):
        Monitor(VIT.model(), VIT.input(2), every=0)
    with pytest.raises(ValueError, match="32 x 32, got 16 x 16"):
        Monitor(VIT.model(), torch.randn(2, 3, 16, 16))


def test_compiled_model_in_training() -> None:
    model = VIT.model()
    compiled = torch.compile(model, backend="eager")
    monitor = Monitor(compiled, VIT.input(2), every=1)
    x = VIT.input(2)
    compiled(x).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert monitor(0)
        compiled(x).sum().backward()


def rank_deficient() -> nn.Module:
    """Its last block writes the same to every token, so that what enters no block tells a kappa apart."""
    model = VIT.model()
    with torch.no_grad():
        for parameter in model.blocks[0].attn.parameters():
            parameter.zero_()
    return model


def test_a_bound_says_that_it_is_one() -> None:
    model, x = rank_deficient(), VIT.input(4)
    numbers = Monitor(model, x, attention_images=4).measure()
    records = wp.diagnose(model, x).select("kappa")
    bounds = {
        f"kappa/{record.block}/{record.position}" for record in records if record.status == "at least"
    } & numbers.keys()
    assert "kappa/0/attention.branch" in bounds
    assert bounds < {key for key in numbers if key.startswith("kappa/") and "worst" not in key}
    said = {key.removesuffix("/at_least") for key in numbers if key.endswith("/at_least")}
    assert said == bounds | {"kappa/attention.branch/worst"}
    for key in said:
        assert Monitor.text(numbers, key).startswith("≥ ")
    assert not Monitor.text(numbers, "kappa/0/input").startswith("≥")
