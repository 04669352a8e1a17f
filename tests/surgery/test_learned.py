"""What an edit learns after the optimizer or DDP was made: a warning, an error, with the remedy."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wellposed as wp
from wellposed.surgery import learned
from zoo import BY_NAME

VIT = BY_NAME["timm vit"]
LEARN = {
    "cb_s": lambda model: wp.broadcast_context(model, scaled=True),
    "featscale": lambda model: wp.broadcast_context(model, mean=1.0, difference=1.0, learned=True),
    "sigma": wp.normalise_spectrum,
}
each_edit = pytest.mark.parametrize("edit", LEARN.values(), ids=LEARN.keys())


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def steps(model: nn.Module, *optimizers: torch.optim.Optimizer, count: int = 3) -> None:
    for _ in range(count):
        model.zero_grad()
        model(VIT.input(2)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


@each_edit
def test_an_optimizer_of_before_is_warned_of_once(edit) -> None:
    model = VIT.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    edit(model)
    with pytest.warns(
        UserWarning, match=r"is in no optimizer that steps .*make the optimizer after the edit"
    ) as told:
        steps(model, optimizer)
    assert len(told) == 1
    assert not learned._followed
    assert not learned._hooked


@each_edit
def test_no_warning_where_it_is_trained(edit) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = VIT.model()
        edit(model)
        steps(model, torch.optim.SGD(model.parameters(), lr=0.01))
        assert not learned._followed

        model = VIT.model()
        first = torch.optim.SGD(model.parameters(), lr=0.01)
        edit(model)
        known = {id(p) for group in first.param_groups for p in group["params"]}
        own = [p for p in model.parameters() if id(p) not in known]
        steps(model, first, torch.optim.AdamW(own))  # two optimizers share the work
        assert not learned._followed

        model = VIT.model()
        late = torch.optim.SGD(model.parameters(), lr=0.01)
        edit(model)
        wp.restore(model)
        steps(model, late)
        assert not learned._followed


def test_an_optimizer_of_another_model_is_not_meant() -> None:
    model, other = VIT.model(), VIT.model()
    wp.broadcast_context(model, scaled=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(other, torch.optim.SGD(other.parameters(), lr=0.01))
    assert learned._followed
    del model
    steps(other, torch.optim.SGD(other.parameters(), lr=0.01), count=1)
    assert not learned._followed


@each_edit
def test_what_ddp_would_not_synchronise_is_refused(edit, one_process) -> None:
    model = VIT.model()
    replicated = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(
        wp.WrappedModelError, match=r"would not synchronise .*edit the model first, then wrap"
    ):
        edit(replicated.module)
    assert not wp.edits(model)
    wp.broadcast_context(model)  # nothing is learned: nothing to synchronise
    del replicated
    wp.restore(model)
    edit(copy.deepcopy(model))
