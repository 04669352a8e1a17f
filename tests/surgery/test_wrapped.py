"""Models that are wrapped already are refused, with the remedy, and stay as they were."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils.parametrizations import spectral_norm

import wellposed as wp
from zoo import BY_NAME

EVERY_EDIT = (
    wp.gray_tokens,
    wp.broadcast_context,
    wp.remove_skips,
    wp.uniform_heads,
    wp.restore,
    wp.anatomy.verify,
)
every_edit = pytest.mark.parametrize("edit", EVERY_EDIT, ids=lambda edit: edit.__name__)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@every_edit
def test_compiled(edit) -> None:
    with pytest.raises(wp.WrappedModelError, match=r"compiled; edit it before torch\.compile"):
        edit(torch.compile(BY_NAME["timm vit"].model()))


@every_edit
def test_compiled_in_place(edit) -> None:
    model = BY_NAME["timm vit"].model()
    model.blocks[1].compile()
    with pytest.raises(wp.WrappedModelError, match=r"part 'blocks\.1' is compiled"):
        edit(model)


@every_edit
def test_replicated(edit, one_process) -> None:
    wrapped = nn.parallel.DistributedDataParallel(BY_NAME["timm vit"].model())
    with pytest.raises(wp.WrappedModelError, match=r"DistributedDataParallel; make the edit first and wrap"):
        edit(wrapped)


@every_edit
def test_data_parallel(edit) -> None:
    with pytest.raises(wp.WrappedModelError, match=r"DataParallel; make the edit first and wrap"):
        edit(nn.DataParallel(BY_NAME["timm vit"].model()))


@every_edit
def test_sharded(edit, one_process) -> None:
    model = BY_NAME["timm vit"].model()
    mesh = dist.init_device_mesh("cpu", (1,))
    fully_shard(model.blocks[0], mesh=mesh)
    with pytest.raises(wp.WrappedModelError, match=r"'blocks\.0' is sharded by fully_shard; edit it before"):
        edit(model)


@every_edit
def test_no_module(edit) -> None:
    with pytest.raises(TypeError, match="got dict"):
        edit({})


def test_edits_may_be_read_off_a_wrapped_model() -> None:
    model = BY_NAME["timm vit"].model()
    wp.remove_skips(model, "attention", blocks=0)
    (edit,) = wp.edits(nn.DataParallel(model))
    assert (edit.block, edit.module) == (0, "module.blocks.0.join_attention")


def test_a_monitor_leaves_what_is_wrapped_over_an_edit(one_process) -> None:
    mesh = dist.init_device_mesh("cpu", (1,))
    model = BY_NAME["timm vit"].model()
    wp.gray_tokens(model, 0.7, where="blocks", blocks=0)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    wp.probes.Monitor(model, BY_NAME["timm vit"].input(), every=1)(0)
    assert all(isinstance(block, FSDPModule) for block in model.blocks)
    model.set_requires_gradient_sync(False)


def test_what_is_parametrized_after_an_edit_can_be_restored() -> None:
    case = BY_NAME["timm vit"]
    model = case.model().eval()
    x = case.input()
    wp.broadcast_context(model, "mlp.middle")
    spectral_norm(model.blocks[0].mlp.fc2)
    wp.restore(model)
    after = model(x)
    plain = case.model().eval()
    spectral_norm(plain.blocks[0].mlp.fc2)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(after, plain(x))
    torch.testing.assert_close(copy.deepcopy(model)(x), after)
