"""Two processes, replicated (DDP) or sharded (FSDP2), save and restore like one, bit for bit.

The file is also the program of the two processes: each writes what it found to a JSON file.
"""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from wellposed.train.checkpoint import Store
from wellposed.train.training_state import gather, gather_weights, restore, restore_weights

Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.01),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), 0.01, fused=True),
    **{
        name: lambda model, name=name: create_optimizer_v2(model, name, 0.01, weight_decay=0.05)
        for name in ("adamw", "momentum", "adafactor", "lamb", "muon")
    },
}
HOW = ("ddp", "fsdp2", "fsdp2 compiled")


class Net(nn.Module):
    """Rows that two processes cannot share evenly, a bias of which one gets nothing, a buffer."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.LayerNorm(width))
        self.unused = nn.Linear(2, 3)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 1)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.head(self.frozen(self.body(x)))


def net(seed: int, how: str = "plain", **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = Net(**options)
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if how.startswith("fsdp2"):
        mesh = dist.init_device_mesh("cpu", (2,))
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return torch.compile(model, backend="eager") if how.endswith("compiled") else model


def train(model: nn.Module, optimizer: Optimizer, updates: Iterable[int], rank: int = 0) -> None:
    for update in updates:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(update))
        model(x[rank::2]).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
        optimizer.zero_grad()


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    match a:
        case Tensor():
            return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)
        case dict():
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        case list() | tuple():
            return len(a) == len(b) and all(map(same, a, b))
        case _:
            return bool(a == b)


def whole(store: Store) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    checkpoint = store.newest()
    return {stem: checkpoint.tensors(stem) for stem in checkpoint.stems}, checkpoint.state


def local(model: nn.Module, optimizer: Optimizer) -> Any:
    """What this process has, with its parts of what is sharded."""

    def part(value: Any) -> Any:
        match value:
            case DTensor():
                return part(value.to_local())
            case Tensor():
                return value.detach().clone()
            case dict():
                return {key: part(item) for key, item in value.items()}
            case list() | tuple():
                return [part(item) for item in value]
            case _:
                return copy.deepcopy(value)

    return part(dict(model.state_dict())), part(optimizer.state_dict())


def goes_on(folder: Path, how: str, name: str, rank: int) -> dict[str, bool]:
    """Save and restore among the two, and restore what one plain process saved."""
    make = OPTIMIZERS[name]
    model = net(0, how)
    optimizer = make(model)
    train(model, optimizer, range(3), rank)
    before, generator = local(model, optimizer), torch.get_rng_state()
    files, state = gather(model, optimizer)
    found = {"gather changes nothing": same(local(model, optimizer), before)}
    found["nor the generator"] = torch.equal(torch.get_rng_state(), generator)
    found["only the first gets it"] = bool(files) == bool(state) == (rank == 0)
    store = Store(folder / f"{how} {name}")
    if rank == 0:
        store.save(3, files, state)

    again = net(1, how)
    other = make(again)
    # The second does not see the folder.
    returned = restore(again, other, store.newest() if rank == 0 else None)
    found["all know the state"] = returned["optimizer"]["kind"] == type(other).__name__
    found["each has its part"] = same(local(again, other), before)
    train(model, optimizer, range(3, 6), rank)
    train(again, other, range(3, 6), rank)
    found["goes on bit for bit"] = same(local(again, other), local(model, optimizer))
    found["and does train"] = not same(local(model, optimizer)[0], before[0])

    plain = Store(folder / f"plain {name}")
    model = net(2, how)
    optimizer = make(model)
    restore(model, optimizer, plain.newest() if rank == 0 else None)
    got = gather(model, optimizer)
    found["takes what one saved"] = rank != 0 or same(got, whole(plain))
    train(model, optimizer, range(1), rank)
    weights = net(3, how)
    restore_weights(weights, plain.newest() if rank == 0 else None)
    copies = gather_weights(weights)
    found["takes weights alone"] = same(copies, got[0]["model"]) if rank == 0 else not copies
    return found


def refuses(folder: Path, how: str, rank: int) -> dict[str, bool]:
    """All processes tell the same error, and nothing is loaded."""
    model = net(0, how, width=4)
    optimizer = OPTIMIZERS["adamw"](model)
    before = local(model, optimizer)
    try:
        restore(model, optimizer, Store(folder / "plain adamw").newest() if rank == 0 else None)
        message = ""
    except ValueError as error:
        message = str(error)
    return {
        "an error on each": "body.0.weight: float32 (5, 6) in the checkpoint, float32 (4, 6)" in message,
        "nothing loaded": same(local(model, optimizer), before),
    }


def refuses_fsdp1() -> dict[str, bool]:
    try:
        gather_weights(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
    except TypeError as error:
        return {"names the remedy": "fully_shard" in str(error)}
    return {"names the remedy": False}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    found = {}
    for how in HOW:
        names = ["adamw"] if how.endswith("compiled") else list(OPTIMIZERS)
        found |= {f"{how} {name}": goes_on(folder, how, name, rank) for name in names}
        found[f"{how} refuses"] = refuses(folder, how, rank)
    found["fsdp1 refuses"] = refuses_fsdp1()
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))


CASES = [
    *(f"{how} {name}" for how in HOW[:2] for name in OPTIMIZERS),
    "fsdp2 compiled adamw",
    *(f"{how} refuses" for how in HOW),
    "fsdp1 refuses",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process saved, and then two did."""
    folder = tmp_path_factory.mktemp("two")
    for name, make in OPTIMIZERS.items():
        model = net(5)
        optimizer = make(model)
        train(model, optimizer, range(2))
        Store(folder / f"plain {name}").save(2, *gather(model, optimizer))
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ}
    both = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=240)[1] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], "\n".join(told)
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes(folder: Path, rank: int) -> None:
    found = json.loads((folder / f"found-{rank}.json").read_text())
    assert sorted(found) == sorted(CASES)
    assert [f"{case}: {what}" for case in found for what, holds in found[case].items() if not holds] == []


@pytest.mark.parametrize("case", CASES[: 2 * len(OPTIMIZERS) + 1])
def test_one_process_takes_what_two_saved(folder: Path, case: str) -> None:
    store = Store(folder / case)
    model = net(7)
    optimizer = OPTIMIZERS[case.split()[-1]](model)
    restore(model, optimizer, store.newest())
    files, state = gather(model, optimizer)
    saved_files, saved_state = whole(store)
    assert same(files, saved_files)
    assert same(state["optimizer"]["param_groups"], saved_state["optimizer"]["param_groups"])
    assert files["model"]["seen"] == 3
    assert not any(isinstance(value, DTensor) for value in model.state_dict().values())
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(3, 4))
    assert not same(dict(model.state_dict()), dict(before))
