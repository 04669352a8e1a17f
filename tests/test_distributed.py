"""Edited models on two processes equal one process at the same global batch."""

import multiprocessing
import os
from multiprocessing.synchronize import Barrier

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wellposed as wp
from wellposed.probes import Monitor
from zoo import BY_NAME, output

FAMILIES = ("timm vit", "timm swinv2", "timm cait", "hf vit", "torchvision vit")
METHODS = {"timm vit": "svd", "timm cait": "spectral"}
BATCH = 4


def edited(name: str) -> nn.Module:
    model = BY_NAME[name].model()
    wp.gray_tokens(model, 0.6, METHODS.get(name, "dct"))
    wp.broadcast_context(model, scaled=True)
    wp.remove_skips(model, "attention", blocks=0)
    return model


def train_step(model: nn.Module, x: Tensor) -> float:
    """One step of plain SGD, so that the weights show the gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = output(model, x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): getattr(value, "full_tensor", lambda value=value: value)()
        .detach()
        .clone()
        for name, value in model.named_parameters()
    }


def shard(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2,))
    for block in wp.anatomy.blocks(model):
        fully_shard(block.module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def worker(rank: int, store: str, results: "multiprocessing.Queue[object]", end: Barrier) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for name in FAMILIES:
            x = BY_NAME[name].input(BATCH)[rank::2]
            for how, wrap in (("ddp", nn.parallel.DistributedDataParallel), ("fsdp2", shard)):
                model = wrap(edited(name))
                scalars = Monitor(model, BY_NAME[name].input(2)).measure()
                train_step(model, x)
                state = weights(model)
                if rank == 0:
                    values = {key: value.numpy() for key, value in state.items()}
                    results.put((name, how, values, scalars))
        results.put(rank)
        end.wait(120)  # who leaves first closes connections that the other may still read from
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> dict[tuple[str, str], tuple[dict[str, Tensor], dict[str, float]]]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    results, end = context.Queue(), context.Barrier(2)
    store = str(tmp_path_factory.mktemp("store") / "file")
    processes = [
        context.Process(target=worker, args=(rank, store, results, end), daemon=True) for rank in range(2)
    ]
    for process in processes:
        process.start()
    got, done = {}, set()
    while len(done) < 2:
        item = results.get(timeout=240)
        if isinstance(item, int):
            done.add(item)
        else:
            name, how, values, scalars = item
            got[name, how] = {key: torch.from_numpy(value) for key, value in values.items()}, scalars
    for process in processes:
        process.join(60)  # without its exit code: one has aborted in torch after all had come
    return got


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_processes_equal_one(two_processes, name: str, how: str) -> None:
    model = edited(name)
    before = weights(model)
    train_step(model, BY_NAME[name].input(BATCH))
    expected, (got, _) = weights(model), two_processes[name, how]
    assert got.keys() == expected.keys()
    assert any(key.endswith("op.scale") for key in got)
    moved = 0
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-6)
        moved += not torch.equal(value, before[key])
    assert moved > len(expected) / 2


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_monitor_sees_what_one_process_has(two_processes, name: str, how: str) -> None:
    expected = Monitor(edited(name), BY_NAME[name].input(2)).measure()
    _, got = two_processes[name, how]
    assert got == pytest.approx(expected, rel=1e-3)
