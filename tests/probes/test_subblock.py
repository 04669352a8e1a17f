"""A sub-block cut out of a model computes what the model computes there, and can be differentiated."""

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.anatomy import blocks
from wellposed.anatomy.table import to_tokens
from wellposed.errors import UnknownModelError
from wellposed.probes.jacobian import products
from wellposed.probes.observe import observed, watching_tokens
from wellposed.probes.subblock import SubBlock, sub_block
from zoo import BY_NAME, Case, each_kind, families


def one_image(case: Case, dtype: torch.dtype = torch.float32) -> Tensor:
    x = case.input(dtype=dtype)
    return x[:, :1] if case.name == "torch encoder pre-norm" else x[:1]


def tokens_seen(model: nn.Module, x: Tensor) -> dict[tuple[int, str], Tensor]:
    """What the model itself has at every position."""
    seen: dict[tuple[int, str], Tensor] = {}
    with (
        observed(model) as found,
        torch.no_grad(),
        watching_tokens(
            found, lambda block, position, tokens: seen.update({(block.index, position): tokens})
        ),
    ):
        model(x)
    return seen


def tokens(model: nn.Module, cut: SubBlock, x: Tensor) -> Tensor:
    block = blocks(model)[cut.block]
    return to_tokens(x, block.row.layout_of(block.module))


@each_kind
def test_every_part_is_what_the_model_computes(case: Case) -> None:
    model, x = case.model(), one_image(case)
    seen = tokens_seen(model, x)
    for block in blocks(model):
        for role in block.row.roles:
            branch = sub_block(model, x, block.index, role)
            total = sub_block(model, x, block.index, role, skip=True)
            for cut, position in ((branch, "branch"), (total, "sum")):
                out = tokens(model, cut, cut.function(cut.input))
                torch.testing.assert_close(out, seen[block.index, f"{role}.{position}"])


@each_kind
def test_parts_start_where_they_should(case: Case) -> None:
    model, x = case.model(), one_image(case)
    seen = tokens_seen(model, x)
    for block in blocks(model):
        roles = block.row.roles
        positions = ["input", *(f"{role}.sum" for role in roles)]
        for role, position in zip(("block", *roles[:1], *roles[1:]), ["input", *positions], strict=False):
            cut = sub_block(model, x, block.index, role)
            torch.testing.assert_close(tokens(model, cut, cut.input), seen[block.index, position])


@each_kind
def test_the_whole_block_is_the_block(case: Case) -> None:
    model, x = case.model(), one_image(case)
    for block in blocks(model):
        outputs = []
        handle = block.module.register_forward_hook(lambda module, args, out, to=outputs: to.append(out))
        with torch.no_grad():
            model(x)
        handle.remove()
        expected = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
        cut = sub_block(model, x, block.index, "block")
        if "ViTMAE" not in type(model).__name__:  # which masks at random
            torch.testing.assert_close(cut.function(cut.input), expected)
        assert cut.function(cut.input).shape == expected.shape
        assert cut.skip is None


@each_kind
def test_products_are_the_derivative(case: Case) -> None:
    model, x = case.model(dtype=torch.float64), one_image(case, torch.float64)
    draw = torch.Generator().manual_seed(5)
    for part in (*case.roles, "block"):
        cut = sub_block(model, x, 0, part, skip=True)
        apply, apply_adjoint = products(cut)
        u, v = torch.randn(2, cut.input.numel(), generator=draw, dtype=torch.float64)
        step = 1e-6 * v.reshape(cut.input.shape)
        moved = (cut.function(cut.input + step) - cut.function(cut.input - step)).reshape(-1) / 2e-6
        torch.testing.assert_close(apply(v), moved, rtol=1e-6, atol=1e-6)
        # The adjoint: <u, J v> = <J^T u, v>.
        torch.testing.assert_close(u @ moved, apply_adjoint(u) @ v, rtol=1e-6, atol=1e-5)


@families("timm vit", "torchvision swin_v2", "torchvision vit", "hf dinov3", "timm convmixer")
def test_torch_func_takes_it(case: Case) -> None:
    cut = sub_block(case.model(), one_image(case), 0, case.roles[0], dtype=torch.float64)
    v = torch.randn(3, *cut.input.shape, dtype=torch.float64)
    apply, _ = products(cut)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        forward = torch.func.vmap(lambda v: torch.func.jvp(cut.function, (cut.input,), (v,))[1])(v)
    torch.testing.assert_close(forward[1].reshape(-1), apply(v[1].reshape(-1)))


@families("timm vit", "hf swin", "torch encoder")
def test_computes_in_the_dtype_asked_for(case: Case) -> None:
    model, x = case.model(dtype=torch.bfloat16), one_image(case, torch.bfloat16)
    assert sub_block(model, x, 1).input.dtype == torch.bfloat16
    cut = sub_block(model, x, 1, dtype=torch.float64)
    reference = sub_block(copy.deepcopy(model).double(), x.double(), 1)
    assert cut.function(cut.input).dtype == torch.float64
    # The same function in float64, at the tokens that the bfloat16 model has.
    torch.testing.assert_close(cut.function(reference.input), reference.function(reference.input))
    assert not torch.equal(cut.input, reference.input)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cut.function(cut.input), cut.function(cut.input.clone()))
        assert cut.function(cut.input).dtype == torch.float64


def test_parts_of_a_model_without_skips() -> None:
    case = BY_NAME["timm vit"]
    model, x = case.model(), one_image(case)
    wp.remove_skips(model, "all")
    seen = tokens_seen(model, x)
    # A role has the skip that was asked for; the block, and the way to a later role, the model's own.
    ffn = sub_block(model, x, 0, "ffn", skip=True)
    torch.testing.assert_close(ffn.input, seen[0, "attention.branch"])
    torch.testing.assert_close(ffn.function(ffn.input), seen[0, "ffn.skip"] + seen[0, "ffn.branch"])
    whole = sub_block(model, x, 0, "block")
    torch.testing.assert_close(whole.function(whole.input), seen[0, "ffn.branch"])


def test_inserted_graying_is_before_the_input_and_broadcasting_inside() -> None:
    case = BY_NAME["timm vit"]
    model, x = case.model(), one_image(case)
    plain_input = sub_block(model, x, 0).input
    wp.gray_tokens(model, 0.5, "svd", where="blocks", blocks=0)
    wp.broadcast_context(model, blocks=0)
    cut = sub_block(model, x, 0, "ffn")
    torch.testing.assert_close(sub_block(model, x, 0).input, wp.nn.functional.gray(plain_input, 0.5, "svd"))
    seen = tokens_seen(model, x)
    torch.testing.assert_close(cut.function(cut.input), seen[0, "ffn.branch"])
    assert len(wp.edits(model)) == 2


def state(model: nn.Module) -> list[object]:
    """All that a probe might leave behind."""
    return [
        [
            (name, type(module), module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in model.named_modules()
        ],
        [(p.requires_grad, p.grad, p.data_ptr(), p._version) for p in model.parameters()],
        torch.random.get_rng_state().tolist(),
        torch.backends.mha.get_fastpath_enabled(),
    ]


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    before = state(model)
    yield
    assert state(model) == before


@families("timm vit", "hf vit", "torchvision vit", "timm swin")
def test_the_model_is_left_as_it_was(case: Case) -> None:
    model, x = case.model().train(), one_image(case)
    model.get_submodule(blocks(model)[0].name).eval()
    with unchanged(model):
        cut = sub_block(model, x, 0, "ffn")
        cut.function(cut.input)
        products(cut)[0](cut.input.reshape(-1))


def test_the_model_is_left_as_it_was_after_an_error() -> None:
    case = BY_NAME["torchvision vit"]
    model = case.model().train()
    with unchanged(model), pytest.raises(ValueError, match="expected one image, got 2"):
        sub_block(model, case.input(2), 0)
    cut = sub_block(model, one_image(case), 0)
    with unchanged(model), pytest.raises((RuntimeError, AssertionError)):
        cut.function(cut.input[..., :3])


def test_watching_hooks_on_the_block_are_not_run_by_the_function() -> None:
    case = BY_NAME["timm vit"]
    model, x, calls = case.model(), one_image(case), []
    blocks(model)[0].module.register_forward_hook(lambda *_: calls.append("block"))
    blocks(model)[0].module.register_full_backward_hook(lambda *_: calls.append("gradient"))
    cut = sub_block(model, x, 0, "block")
    assert calls == ["block"]
    products(cut)[1](cut.input.reshape(-1))
    assert calls == ["block"]


def test_inside_inference_mode() -> None:
    case = BY_NAME["timm vit"]
    model = case.model()
    expected = sub_block(model, one_image(case), 1)
    with torch.inference_mode():
        cut = sub_block(model, one_image(case).clone(), 1)
    torch.testing.assert_close(
        products(cut)[1](cut.input.reshape(-1)), products(expected)[1](cut.input.reshape(-1))
    )


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("timm vit", "mixer", "part must be one of attention, ffn, block for blocks.0, got 'mixer'"),
        ("timm convmixer", "attention", r"part must be one of mixer, block for .*, got 'attention'"),
    ],
)
def test_unknown_parts(name: str, part: str, message: str) -> None:
    case = BY_NAME[name]
    with pytest.raises(ValueError, match=message):
        sub_block(case.model(), one_image(case), 0, part)


def test_unknown_blocks_and_models() -> None:
    case = BY_NAME["timm vit"]
    with pytest.raises(IndexError, match="blocks must be within 0 and 1, got 7"):
        sub_block(case.model(), one_image(case), 7)
    with pytest.raises(UnknownModelError):
        sub_block(nn.Linear(3, 3), torch.ones(1, 3), 0)
