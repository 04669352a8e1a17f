"""Edited blocks of real models against the same blocks written out by hand, in float64."""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from pairwise import covering
from reference import blocks
from reference.ops import Edits
from zoo import BY_NAME, output

TOLERANCE = 1e-11
CLEARLY_DIFFERENT = 1e-3
POSITIONS = ("attention.end", "mlp.start", "mlp.middle", "mlp.end")


@dataclasses.dataclass(frozen=True)
class Subject:
    """A block of a family, the function that computes it, and what that takes from the block's call."""

    family: str
    index: int
    compute: Callable[..., Tensor]
    takes: tuple[str, ...] = ()

    @property
    def mixing_role(self) -> str:
        return BY_NAME[self.family].roles[0]

    @property
    def positions(self) -> tuple[str, ...]:
        return POSITIONS if BY_NAME[self.family].has_attention else POSITIONS[1:]


SUBJECTS = (
    Subject("timm vit", 1, blocks.timm_vit),
    Subject("timm deit3", 1, blocks.timm_deit3),
    Subject("timm dinov2 giant", 1, blocks.timm_dinov2_giant),
    Subject("timm vit post-norm", 1, blocks.timm_vit_post_norm),
    Subject("timm dinov3", 1, blocks.timm_dinov3, takes=("rope",)),
    Subject("timm eva", 1, blocks.timm_eva, takes=("rope",)),
    Subject("timm beit", 1, blocks.timm_beit),
    Subject("timm swin", 0, functools.partial(blocks.timm_swin, shift=0)),
    Subject("timm swin", 1, functools.partial(blocks.timm_swin, shift=2)),
    Subject("timm swinv2", 0, functools.partial(blocks.timm_swinv2, shift=0)),
    Subject("timm swinv2", 1, functools.partial(blocks.timm_swinv2, shift=2)),
    Subject("timm cait", 1, blocks.timm_cait),
    Subject("timm pvt_v2", 0, functools.partial(blocks.timm_pvt_v2, heads=1)),
    Subject("timm pvt_v2", 2, functools.partial(blocks.timm_pvt_v2, heads=2)),
    Subject("timm mixer", 1, blocks.timm_mixer),
    Subject("hf vit", 1, blocks.hf_vit),
    Subject("hf dinov2", 1, blocks.hf_dinov2),
    Subject("hf dinov2 swiglu", 1, blocks.hf_dinov2_swiglu),
    Subject("hf beit", 1, blocks.hf_beit),
    Subject("hf swin", 1, functools.partial(blocks.hf_swin, shift=2)),
    Subject("torchvision vit", 1, blocks.torchvision_vit),
    Subject("torchvision swin", 1, functools.partial(blocks.torchvision_swin, shift=2)),
    Subject("torchvision swin_v2", 1, functools.partial(blocks.torchvision_swin_v2, shift=2)),
    Subject("torch encoder", 1, blocks.torch_encoder),
    Subject("torch encoder pre-norm", 1, blocks.torch_encoder_pre_norm),
)


SKIPS = tuple(itertools.product((True, False), repeat=2))


def broadcasts(positions: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Nowhere, at each position alone, and everywhere."""
    return (), *((position,) for position in positions), positions


def describe(edits: Edits) -> str:
    removed = [
        name
        for name, kept in (("attention", edits.keep_attention_skip), ("ffn", edits.keep_ffn_skip))
        if not kept
    ]
    return f"without {'+'.join(removed) or 'nothing'}, CB {'+'.join(edits.broadcast) or 'nowhere'}"


COMBINATIONS = [
    (subject, skips, broadcast)
    for subject in SUBJECTS
    for skips in SKIPS
    for broadcast in broadcasts(subject.positions)
]
# Each block without each of its skips, each broadcast without each. CB_S below has each block with each.
PAIRS = [((subject, skips), (skips, broadcast)) for subject, skips, broadcast in COMBINATIONS]


@functools.cache
def _unedited(family: str) -> nn.Module:
    return BY_NAME[family].model(dtype=torch.float64)


def fresh(family: str) -> nn.Module:
    # A copy costs less than drawing the weights anew.
    return copy.deepcopy(_unedited(family))


def apply(edits: Edits, model: nn.Module, subject: Subject) -> None:
    if not edits.keep_attention_skip:
        wp.remove_skips(model, subject.mixing_role, blocks=[subject.index])
    if not edits.keep_ffn_skip:
        wp.remove_skips(model, "ffn", blocks=[subject.index])
    for where in edits.broadcast:
        wp.broadcast_context(model, where, blocks=[subject.index])


@dataclasses.dataclass
class Call:
    """What went into a block and came out of it in a run of the whole model."""

    x: Tensor
    kwargs: dict[str, Any]
    y: Tensor


def run(model: nn.Module, subject: Subject) -> Call:
    case = BY_NAME[subject.family]
    block = wp.anatomy.blocks(model)[subject.index].module
    calls: list[Call] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        calls.append(Call(args[0], kwargs, result[0] if isinstance(result, tuple) else result))

    handle = block.register_forward_hook(record, with_kwargs=True)
    with torch.no_grad():
        output(model, case.input(dtype=torch.float64))
    handle.remove()
    (call,) = calls
    return call


def weights_of(subject: Subject) -> dict[str, Tensor]:
    """By the names of the block before any edit. Buffers too: Swin V2 keeps its offsets in one."""
    block = wp.anatomy.blocks(_unedited(subject.family))[subject.index].module
    tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def expected(subject: Subject, call: Call, edits: Edits) -> Tensor:
    assert call.x.dtype == torch.float64
    extras = {name: call.kwargs[name] for name in subject.takes}
    return subject.compute(call.x, weights_of(subject), edits, **extras)


def with_one_edit_less(edits: Edits) -> Iterator[Edits]:
    if not edits.keep_attention_skip:
        yield dataclasses.replace(edits, keep_attention_skip=True)
    if not edits.keep_ffn_skip:
        yield dataclasses.replace(edits, keep_ffn_skip=True)
    for where in edits.broadcast:
        rest = tuple(other for other in edits.broadcast if other != where)
        yield dataclasses.replace(edits, broadcast=rest)


def assert_every_edit_matters(subject: Subject, call: Call, edits: Edits) -> None:
    """So that the comparison could not have passed with an edit left out."""
    y = expected(subject, call, edits)
    for fewer in with_one_edit_less(edits):
        difference = (expected(subject, call, fewer) - y).abs().max()
        assert difference > CLEARLY_DIFFERENT, f"{describe(edits)} is as {describe(fewer)}"


@pytest.mark.parametrize(
    ("subject", "edits"),
    [
        pytest.param(subject, edits, id=f"{subject.family} {subject.index}: {describe(edits)}")
        for subject, skips, broadcast in (COMBINATIONS[i] for i in covering(PAIRS, 1))
        for edits in [Edits(*skips, broadcast)]
    ],
)
def test_edited_block_is_the_reference(subject, edits):
    model = fresh(subject.family)
    apply(edits, model, subject)
    call = run(model, subject)
    torch.testing.assert_close(call.y, expected(subject, call, edits), rtol=TOLERANCE, atol=TOLERANCE)
    assert_every_edit_matters(subject, call, edits)


@pytest.mark.parametrize(
    ("subject", "where"),
    [
        pytest.param(subject, where, id=f"{subject.family} {subject.index}: {where}")
        for subject in SUBJECTS
        for where in subject.positions
    ],
)
def test_scaled_broadcasting_is_the_reference(subject, where):
    # CB commutes with a linear layer, so that it cannot tell one side of it from the other. CB_S can.
    model = fresh(subject.family)
    wp.broadcast_context(model, where, scaled=True, blocks=[subject.index])
    (parameter,) = (p for name, p in model.named_parameters() if name.endswith("op.scale"))
    with torch.no_grad():
        parameter.uniform_(generator=torch.Generator().manual_seed(2))
    edits = Edits(broadcast=(where,), scale=parameter.detach())
    call = run(model, subject)

    torch.testing.assert_close(call.y, expected(subject, call, edits), rtol=TOLERANCE, atol=TOLERANCE)
    assert_every_edit_matters(subject, call, edits)
    unscaled = expected(subject, call, Edits(broadcast=(where,)))
    assert (unscaled - call.y).abs().max() > CLEARLY_DIFFERENT


@pytest.mark.pairwise
@pytest.mark.parametrize("skips", SKIPS)
@pytest.mark.parametrize("broadcast", broadcasts(POSITIONS), ids="+".join)
@pytest.mark.parametrize("index", [0, 1])
def test_torch_encoder_without_hooks_is_the_reference(index, broadcast, skips):
    # A hook on a layer, as the other tests have, keeps PyTorch from its fused kernel, which would
    # pass over the edits.
    subject = Subject("torch encoder", index, blocks.torch_encoder)
    model, edits = fresh(subject.family), Edits(*skips, broadcast)
    apply(edits, model, subject)
    tokens = BY_NAME[subject.family].input(dtype=torch.float64)
    with torch.no_grad():
        y = model(tokens)

    for layer in (0, 1):
        weights = weights_of(dataclasses.replace(subject, index=layer))
        tokens = blocks.torch_encoder(tokens, weights, edits if layer == index else Edits())
    torch.testing.assert_close(y, tokens, rtol=TOLERANCE, atol=TOLERANCE)
