"""What is restored trains on bit for bit like what was saved, for any optimizer and any wrapper."""

import copy
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from accelerate import Accelerator
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from wellposed.train.checkpoint import Store
from wellposed.train.training_state import gather, gather_weights, restore, restore_weights


class Net(nn.Module):
    """Convolution, BatchNorm with its counter, a frozen part, and one that no gradient reaches."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.body = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))
        self.unused = nn.Linear(2, 3)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).mean((2, 3))
        return self.head(x + self.frozen(self.body(x)))


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, updates: Iterable[int]) -> None:
    for update in updates:
        torch.manual_seed(update)
        dtype = next(model.parameters()).dtype
        model(torch.randn(5, 3, 4, 4).to(dtype)).square().mean().backward()
        for group in optimizer.param_groups:  # a schedule
            group["lr"] = group["lr"] * 0.9
        optimizer.step()
        optimizer.zero_grad()


def same(a: Any, b: Any) -> bool:
    """Equal in type and, for tensors, dtype, strides and bits."""
    if type(a) is not type(b):
        return False
    match a:
        case Tensor():
            return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) and torch.equal(a, b)
        case dict():
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        case list() | tuple():
            return len(a) == len(b) and all(map(same, a, b))
        case _:
            return bool(a == b)


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict, dict]:
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))


class Odd(torch.optim.Optimizer):
    """State of all kinds, some of which load_state_dict would change."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.1), "dtype": torch.bfloat16, "betas": (0.9, 0.99)})
        self.draws = 0

    @torch.no_grad()
    def step(self) -> None:
        self.draws += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(
                        average=torch.zeros_like(p, dtype=torch.float64),
                        phase="warm",
                        nothing=None,
                        step=0,
                        ratio=0.1,
                        mask=torch.zeros(3, dtype=torch.bool),
                        factors={0: torch.zeros(2), "rows": [torch.zeros(1), (torch.tensor(1), 2.5)]},
                    )
                state["step"] += 1
                state["ratio"] /= 3
                state["factors"][0] += state["ratio"]
                state["average"].lerp_(p.grad.double(), state["ratio"])
                p.sub_((state["average"] * group["lr"] + self.draws * 1e-3).to(p.dtype))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "draws": (self.draws, None)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.draws = state_dict["draws"][0]
        super().load_state_dict(state_dict)


TIMM = ("adamw", "lamb", "lion", "muon", "adafactor", "adafactorbv", "adopt", "nadamw", "lookahead_adamw")
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
    "torch adamw fused": lambda model: torch.optim.AdamW(model.parameters(), 0.01, fused=True, amsgrad=True),
    "torch sgd": lambda model: torch.optim.SGD(model.parameters(), 0.01),
    "torch sgd by name": lambda model: torch.optim.SGD(model.named_parameters(), 0.01, momentum=0.9),
    "torch rprop": lambda model: torch.optim.Rprop(model.parameters(), 0.01),
    "odd": lambda model: Odd(model.parameters()),
    **{
        f"timm {name}": lambda model, name=name: create_optimizer_v2(model, name, 0.01, weight_decay=0.05)
        for name in TIMM
    },
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    make = OPTIMIZERS[name]
    model = net()
    optimizer = make(model)
    train(model, optimizer, range(3))
    before, generator = content(model, optimizer), torch.get_rng_state()
    store = Store(tmp_path)
    store.save(3, *gather(model, optimizer))
    assert same(content(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), generator)

    again = net(seed=1)
    other = make(again)
    state = restore(again, other, store.newest())
    assert state == store.newest().state
    assert same(content(again, other), before)
    train(model, optimizer, range(3, 6))
    train(again, other, range(3, 6))
    assert same(content(again, other), content(model, optimizer))
    assert not same(content(model, optimizer)[0], before[0])


def test_states_of_another_dtype_than_the_parameters_stay_exact(tmp_path: Path) -> None:
    model = net().bfloat16()
    optimizer = Odd(model.parameters())
    train(model, optimizer, range(2))
    store = Store(tmp_path)
    store.save(2, *gather(model, optimizer))
    again = net(seed=1).bfloat16()
    other = Odd(again.parameters())
    restore(again, other, store.newest())
    assert other.state[again.head.weight]["average"].dtype == torch.float64
    assert same(content(again, other), content(model, optimizer))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_has_not_stepped_stays_so(tmp_path: Path, name: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model)
    before, generator = content(model, optimizer), torch.get_rng_state()
    store = Store(tmp_path)
    store.save(0, *gather(model, optimizer))
    assert same(content(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())

    again = net(seed=1)
    other = OPTIMIZERS[name](again)
    train(again, other, range(2))
    restore(again, other, store.newest())
    assert same(content(again, other), before)


def test_gathered_tensors_are_copies() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    files, _ = gather(model, optimizer)
    kept = copy.deepcopy(files)
    train(model, optimizer, range(1, 2))
    assert same(files, kept)


def test_names_and_values_are_readable_in_the_files() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    files, state = gather(model, optimizer)
    assert files["model"].keys() == model.state_dict().keys()
    assert files["model"]["norm.num_batches_tracked"].item() == 1
    assert "body.0.weight/exp_avg" in files["optimizer"]
    assert not any(name.startswith(("unused", "frozen")) for name in files["optimizer"])
    assert state["optimizer"]["kind"] == "AdamW"
    assert state["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "compiled in place": lambda model: model.compile() or model,
    "compiled": lambda model: torch.compile(model),
    "a part compiled": lambda model: setattr(model, "body", torch.compile(model.body)) or model,
}


@pytest.mark.parametrize("second", WRAPPERS)
@pytest.mark.parametrize("first", WRAPPERS)
def test_compiled_models_have_the_names_of_plain_ones(tmp_path: Path, first: str, second: str) -> None:
    inner = net()
    optimizer = torch.optim.AdamW(inner.parameters())
    train(inner, optimizer, range(1))
    plain_names = inner.state_dict().keys()
    files, state = gather(WRAPPERS[first](inner), optimizer)
    assert files["model"].keys() == plain_names
    store = Store(tmp_path)
    store.save(1, files, state)

    again = net(seed=1)
    other = torch.optim.AdamW(again.parameters())
    wrapped = WRAPPERS[second](again)
    restore(wrapped, other, store.newest())
    assert same(gather(wrapped, other), (files, state))


def test_timm_groups_tied_weights_and_an_average(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = timm.create_model("test_vit", num_classes=4, img_size=32)
        model.head.weight = nn.Parameter(model.head.weight.detach())
        model.tied = nn.Linear(64, 4)
        model.tied.weight = model.head.weight
        groups = create_optimizer_v2(model, "adamw", 1e-3, weight_decay=0.05, layer_decay=0.7)
        for group in groups.param_groups:
            group["initial_lr"] = group["lr"]
        return model, groups

    model, optimizer = make(0)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    average = copy.deepcopy(model)
    with torch.no_grad():
        average.head.bias += 1
    files, state = gather(model, optimizer)
    store = Store(tmp_path)
    store.save(1, {**files, "ema": gather_weights(average)}, {**state, "epoch": 7})

    again, other = make(1)
    assert restore(again, other, store.newest())["epoch"] == 7
    assert again.tied.weight is again.head.weight
    assert len({group["lr_scale"] for group in other.param_groups}) > 2
    assert same(content(again, other), content(model, optimizer))
    restore_weights(again, store.newest(), "ema")
    assert same(dict(again.state_dict()), dict(average.state_dict()))


def test_states_follow_the_layout_of_their_parameters(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net(seed).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make(0)
    train(model, optimizer, range(1))
    store = Store(tmp_path)
    store.save(1, *gather(model, optimizer))
    again, other = make(1)
    restore(again, other, store.newest())
    assert other.state[again.stem.weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    assert same(content(again, other), content(model, optimizer))


def test_how_the_optimizer_computes_is_the_new_ones_choice(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    train(model, optimizer, range(2))
    store = Store(tmp_path)
    store.save(2, *gather(model, optimizer))
    other = torch.optim.AdamW(model.parameters(), lr=5.0, fused=True)
    restore(model, other, store.newest())
    assert other.param_groups[0]["fused"] is True
    assert other.param_groups[0]["foreach"] is None
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    train(model, other, range(1))


def test_accelerates_optimizer_is_the_one_inside(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    plain = net()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))
    train(model, optimizer, range(2))
    store = Store(tmp_path)
    store.save(2, *gather(model, optimizer))
    again = net(seed=1)
    other = torch.optim.AdamW(again.parameters())
    restore(again, other, store.newest())
    assert same(content(again, other), content(model, optimizer))
    restore(model, optimizer, store.newest())


def saved(folder: Path) -> Store:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    store = Store(folder)
    store.save(1, *gather(model, optimizer))
    return store


def without_head() -> nn.Module:
    model = net(seed=1)
    del model.head
    return model


def with_more() -> nn.Module:
    model = net(seed=1)
    model.more = nn.Linear(1, 1)
    return model


ADAMW = torch.optim.AdamW
MISFITS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer], list[str]]
] = {
    "unexpected": (
        without_head,
        lambda model: ADAMW(model.parameters()),
        ["2 unexpected (head.bias, head.weight)", "other parameters (head.bias, head.weight)"],
    ),
    "missing": (with_more, lambda model: ADAMW(model.parameters()), ["2 missing (more.weight, more.bias)"]),
    "reshaped": (
        lambda: net(width=7),
        lambda model: ADAMW(model.parameters()),
        [
            "stem.weight: float32 (6, 3, 3, 3) in the checkpoint, float32 (7, 3, 3, 3) in the model",
            "and 8 more",
        ],
    ),
    "dtype": (
        lambda: net(seed=1).double(),
        lambda model: ADAMW(model.parameters()),
        ["of another shape or dtype (stem.weight: float32 (6, 3, 3, 3) in the checkpoint, float64"],
    ),
    "optimizer": (
        lambda: net(seed=1),
        lambda model: torch.optim.SGD(model.parameters()),
        ["it holds the state of AdamW, the optimizer is SGD"],
    ),
    "groups": (
        lambda: net(seed=1),
        lambda model: ADAMW([{"params": model.stem.parameters()}, {"params": model.norm.parameters()}]),
        ["it holds 1 groups of parameters, the optimizer has 2"],
    ),
    "parameters": (
        lambda: net(seed=1),
        lambda model: ADAMW(model.head.parameters()),
        ["group 0 of the optimizer has other parameters (body.0.bias, "],
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_checkpoint_of_something_else_is_refused_whole(tmp_path: Path, name: str) -> None:
    store = saved(tmp_path)
    build, make, words = MISFITS[name]
    model = build()
    optimizer = make(model)
    before = content(model, optimizer)
    with pytest.raises(ValueError, match="does not fit this Net or its optimizer") as error:
        restore(model, optimizer, store.newest())
    for part in (*words, str(tmp_path / "update-00000001"), "Nothing was loaded"):
        assert part in str(error.value)
    assert same(content(model, optimizer), before)


def test_an_average_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("2 missing (more.weight, more.bias)")):
        restore_weights(with_more(), saved(tmp_path).newest())


def test_no_checkpoint_is_an_error() -> None:
    model = net()
    with pytest.raises(ValueError, match="expected a checkpoint on the first process, got None"):
        restore(model, torch.optim.SGD(model.parameters()), None)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter of shape \(6, 3, 3, 3\) that the model does not have"):
        gather(net(), torch.optim.SGD(net().parameters()))


def test_a_state_without_a_parameter_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["all"] = {"step": 1}
    with pytest.raises(TypeError, match="expected a state for each parameter, SGD has one for 'all' too"):
        gather(model, optimizer)
