"""The edits of every family: what they record, how they combine, and that restore undoes them."""

import itertools

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import wellposed as wp
from wellposed.linalg.spectral_plan import DEFAULT_TOLERANCE
from wellposed.surgery.insertion import Inserted
from zoo import BY_NAME, WITH_EMBEDDING, Case, each_kind, every_family, families, output

POSITIONS = ("mlp.end", "mlp.middle", "mlp.start", "attention.end")


def fingerprint(model: nn.Module) -> list[object]:
    """All that an edit could have left behind."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    return [
        (
            name,
            type(module),
            module.training,
            list(module._modules),
            list(module._parameters),
            list(module._buffers),
            *(len(getattr(module, hook)) for hook in hooks),
        )
        for name, module in model.named_modules()
    ]


def gray_where(case: Case) -> str:
    return "embedding" if case.has_embedding else "blocks"


def edit_all(model: nn.Module, case: Case) -> None:
    wp.gray_tokens(model, 0.6, "dct", gray_where(case))
    if case.has_mlp:
        wp.broadcast_context(model, scaled=True)
    wp.remove_skips(model, case.roles[0], blocks=0)


@every_family
def test_edit_then_restore_is_the_identity(case: Case) -> None:
    model, x = case.model(), case.input()
    expected, before = output(model, x), fingerprint(model)
    edit_all(model, case)
    assert not torch.allclose(output(model, x), expected)
    undone = wp.restore(model)
    assert undone
    assert fingerprint(model) == before
    assert torch.equal(output(model, x), expected)
    assert wp.edits(model) == ()
    assert wp.restore(model) == ()


@each_kind
def test_state_dict_keys_stay_but_for_scales(case: Case) -> None:
    model = case.model()
    before = set(model.state_dict())
    edit_all(model, case)
    added = set(model.state_dict()) - before
    assert before <= set(model.state_dict())
    assert all(key.endswith(".inserted_after.op.scale") for key in added)
    assert bool(added) == case.has_mlp
    wp.restore(model)
    model.load_state_dict(case.model(seed=3).state_dict(), strict=True)


@each_kind
def test_broadcasting_at_every_position(case: Case) -> None:
    model, x = case.model(), case.input()
    plain = output(model, x)
    for where in POSITIONS:
        if not (case.has_attention if where == "attention.end" else case.has_mlp):
            with pytest.raises(ValueError, match=r"has no meaning for .*mixes tokens"):
                wp.broadcast_context(model, where)
            assert not wp.edits(model)
            continue
        done = wp.broadcast_context(model, where, scaled=True, init="identity")
        # With init="identity" a trained model computes what it did.
        torch.testing.assert_close(output(model, x), plain, msg=lambda text, where=where: f"{where}: {text}")
        for module in model.modules():
            if isinstance(module, Inserted):
                nn.init.constant_(module.op.scale, 0.5)
        scaled = output(model, x)
        wp.restore(model)
        assert len(wp.broadcast_context(model, where)) == len(done), where
        torch.testing.assert_close(output(model, x), scaled, msg=lambda text, where=where: f"{where}: {text}")
        assert not torch.allclose(scaled, plain), where
        wp.restore(model)


@each_kind
def test_graying_everywhere(case: Case) -> None:
    model, x = case.model(), case.input()
    plain = output(model, x)
    for where, there in (("embedding", case.has_embedding), ("pixels", case.has_pixels), ("blocks", True)):
        if not there:
            with pytest.raises(ValueError, match=r"no patch embedding|no pixel-patch matrix"):
                wp.gray_tokens(model, 0.5, "svd", where)
            assert not wp.edits(model)
            continue
        wp.gray_tokens(model, 1.0, "svd", where)
        torch.testing.assert_close(output(model, x), plain, msg=lambda text, where=where: f"{where}: {text}")
        wp.restore(model)
        done = wp.gray_tokens(model, 0.5, "svd", where)
        assert {edit.where for edit in done} == {where}
        assert not torch.allclose(output(model, x), plain), where
        wp.restore(model)


@families(*WITH_EMBEDDING)
def test_embedded_tokens_are_what_is_grayed(case: Case) -> None:
    """The layout is right: kappa of what leaves the tap is kappa of what reached it, to the power eps."""
    model, x = case.model(dtype=torch.float64), case.input(dtype=torch.float64)
    wp.gray_tokens(model, 0.5, "svd")
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    (inserted,) = (module for module in model.modules() if isinstance(module, Inserted))
    inserted.op.register_forward_hook(lambda op, args, out: seen.append((args[0], out)))
    output(model, x)
    ((before, after),) = seen
    # 32 px in patches of 4, 8 or 16, or PVT's 64 px in strides of 4: never the channel count
    assert before.shape[:2] in {(2, 64), (2, 16), (2, 4), (2, 256)}
    kappa = [torch.linalg.cond(value) for value in (before, after)]
    torch.testing.assert_close(kappa[1], kappa[0] ** 0.5, rtol=1e-6, atol=0)


@every_family
def test_skips_of_every_role(case: Case) -> None:
    model, x = case.model(), case.input()
    plain = output(model, x)
    for role in ("attention", "ffn", "mixer", "local"):
        if role in case.roles:
            done = wp.remove_skips(model, role)
            assert {edit.where for edit in done} == {role}
            assert not torch.allclose(output(model, x), plain)
            wp.restore(model)
        else:
            with pytest.raises(ValueError, match=f"no skip around {role}; it has"):
                wp.remove_skips(model, role)
    if {"attention", "ffn"} <= set(case.roles):
        assert {edit.where for edit in wp.remove_skips(model, "both")} == {"attention", "ffn"}
    else:
        with pytest.raises(ValueError, match="no skip around attention"):
            wp.remove_skips(model, "both")


def apply(model: nn.Module, name: str) -> None:
    match name:
        case "gray":
            wp.gray_tokens(model, 0.6, "svd")
        case "pixels":
            wp.gray_tokens(model, 0.9, "dct", "pixels")
        case "gray block":
            wp.gray_tokens(model, 0.8, "dct", "blocks", blocks=1)
        case "cb":
            wp.broadcast_context(model)
        case "cb attention":
            wp.broadcast_context(model, "attention.end", blocks=[0])
        case "skips":
            wp.remove_skips(model, "attention", blocks=slice(1, None))
        case "ffn skips":
            wp.remove_skips(model, "ffn", blocks=-1)


EDITS = ("gray", "pixels", "gray block", "cb", "cb attention", "skips", "ffn skips")


@families("timm vit", "timm swinv2", "hf vit", "torchvision vit")
def test_edits_combine_in_any_order(case: Case) -> None:
    x = case.input()
    results, records = [], []
    for order in (EDITS, EDITS[::-1], EDITS[3:] + EDITS[:3]):
        model = case.model()
        for name in order:
            apply(model, name)
        results.append(output(model, x))
        records.append(wp.edits(model))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert set(records[0]) == set(records[1]) == set(records[2])


@settings(derandomize=True, deadline=None, max_examples=25)
@given(order=st.permutations(EDITS), count=st.integers(0, len(EDITS)))
def test_any_edits_then_restore(order: list[str], count: int) -> None:
    case = BY_NAME["timm vit"]
    model, x = case.model(), case.input()
    expected, before = output(model, x), fingerprint(model)
    for name in order[:count]:
        apply(model, name)
    wp.restore(model)
    assert fingerprint(model) == before
    assert torch.equal(output(model, x), expected)


@pytest.mark.parametrize("name", EDITS)
def test_the_same_edit_twice_is_an_error(name: str) -> None:
    case = BY_NAME["timm vit"]
    model, x = case.model(), case.input()
    apply(model, name)
    expected, record = output(model, x), wp.edits(model)
    with pytest.raises(ValueError, match="the same edit twice is a mistake"):
        apply(model, name)
    assert wp.edits(model) == record
    assert torch.equal(output(model, x), expected)


def test_an_edit_that_overlaps_in_one_block_changes_nothing() -> None:
    model = BY_NAME["timm vit"].model()
    wp.remove_skips(model, "attention", blocks=1)
    wp.broadcast_context(model, blocks=1)
    record = wp.edits(model)
    for again in (lambda: wp.remove_skips(model, "both"), lambda: wp.broadcast_context(model)):
        with pytest.raises(ValueError, match=r"blocks\.1"):
            again()
        assert wp.edits(model) == record


def test_records_tell_what_was_touched() -> None:
    model = BY_NAME["timm vit"].model()
    gray = wp.gray_tokens(model, 0.7, "svd")
    assert gray == (
        wp.Edit(
            "gray_tokens",
            "embedding",
            None,
            "patch_embed",
            str(model.patch_embed.inserted_after.op),
            {
                "eps": 0.7,
                "method": "svd",
                "target_kappa": None,
                "rescale": True,
                "floor": None,
                "tolerance": DEFAULT_TOLERANCE,
                "precision": "auto",
            },
        ),
    )
    cb = wp.broadcast_context(model, "mlp.middle", blocks=1)
    assert [(edit.block, edit.module) for edit in cb] == [(1, "blocks.1.mlp.fc2")]
    skips = wp.remove_skips(model, "both", blocks=0)
    assert [(e.block, e.where, e.module) for e in skips] == [
        (0, "attention", "blocks.0.join_attention"),
        (0, "ffn", "blocks.0.join_ffn"),
    ]
    assert set(wp.edits(model)) == {*gray, *cb, *skips}
    assert cb[0].settings == {"scaled": False, "init": "cb"}
    assert skips[0].settings == {"allow_drop_path": False}
    table = str(wp.edits(model)).splitlines()
    assert table[0].split() == ["edit", "where", "block", "module", "detail"]
    assert len([line for line in table[1:] if "blocks have no" not in line]) == 4
    assert table[5:] == [
        "1 of 2 blocks have no remove_skips at attention: 1",
        "1 of 2 blocks have no remove_skips at ffn: 1",
        "1 of 2 blocks have no broadcast_context at mlp.middle: 0",
    ]
    assert "eps=0.7" in str(wp.edits(model))


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (0, [0]),
        (-1, [3]),
        (slice(1, 3), [1, 2]),
        ([3, 0, 0], [0, 3]),
        (range(2), [0, 1]),
        (None, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_blocks_may_be_an_index_a_slice_or_several(blocks: object, expected: list[int]) -> None:
    model = BY_NAME["timm swin"].model()
    assert [edit.block for edit in wp.remove_skips(model, "attention", blocks=blocks)] == expected


@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        (4, IndexError, r"within 0 and 3, got 4; the model has 4 blocks, from layers.0.blocks.0"),
        ([0, -5], IndexError, r"got -5"),
        ([], ValueError, r"selects none of the 4 blocks"),
        (slice(9, 12), ValueError, r"selects none"),
        (["0"], TypeError, r"got '0'"),
        ([True], TypeError, r"got True"),
        ([0.0], TypeError, r"got 0\.0"),
    ],
    ids=str,
)
def test_bad_blocks(blocks: object, error: type[Exception], message: str) -> None:
    model = BY_NAME["timm swin"].model()
    for edit in (
        lambda: wp.remove_skips(model, "attention", blocks=blocks),
        lambda: wp.broadcast_context(model, blocks=blocks),
        lambda: wp.gray_tokens(model, where="blocks", blocks=blocks),
    ):
        with pytest.raises(error, match=message):
            edit()
    assert not wp.edits(model)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: wp.gray_tokens(m, where="tokens"), "embedding, pixels, blocks, got 'tokens'"),
        (lambda m: wp.gray_tokens(m, blocks=0), r'goes with where="blocks", got where=\'embedding\''),
        (lambda m: wp.gray_tokens(m, eps=1.5), r"in \(0, 1\], got 1.5"),
        (lambda m: wp.gray_tokens(m, method="fft"), "got 'fft'"),
        (lambda m: wp.broadcast_context(m, "end"), "got 'end'"),
        (lambda m: wp.broadcast_context(m, init="identity"), "scaled=True"),
        (lambda m: wp.broadcast_context(m, scaled=True, init="zero"), "got 'zero'"),
        (lambda m: wp.remove_skips(m, "mlp"), "got 'mlp'"),
    ],
)
def test_bad_arguments_change_nothing(edit, message: str) -> None:
    model = BY_NAME["timm vit"].model()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message):
        edit(model)
    assert fingerprint(model) == before


def test_default_eps_is_the_papers() -> None:
    model = BY_NAME["timm vit"].model()
    wp.gray_tokens(model)
    assert model.patch_embed.inserted_after.op.eps == 0.7
    wp.restore(model)
    wp.gray_tokens(model, method="dct")
    assert model.patch_embed.inserted_after.op.eps == 0.95


def test_class_attention_is_left_out_unless_named() -> None:
    model = BY_NAME["timm cait"].model()
    assert [edit.block for edit in wp.broadcast_context(model)] == [0, 1]
    with pytest.raises(ValueError, match="class token alone"):
        wp.broadcast_context(model, "mlp.start", blocks=[1, 2])


def test_dynamic_image_sizes_are_grayed_in_their_layout() -> None:
    import timm

    torch.manual_seed(0)
    settings = {"embed_dim": 32, "depth": 1, "num_heads": 2, "patch_size": 8, "img_size": 32}
    fixed = timm.create_model("vit_tiny_patch16_224", **settings).eval()
    dynamic = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **settings).eval()
    dynamic.load_state_dict(fixed.state_dict())
    x = torch.randn(2, 3, 32, 32)
    for model in (fixed, dynamic):
        wp.gray_tokens(model, 0.5, "svd")
    torch.testing.assert_close(dynamic(x), fixed(x))
    assert dynamic(torch.randn(2, 3, 48, 24)).shape == (2, 1000)


def test_pixel_graying_is_graying_of_the_images() -> None:
    for case in (BY_NAME[name] for name in ("timm vit", "hf dinov3", "torchvision swin", "timm convmixer")):
        model, x = case.model(), case.input()
        wp.gray_tokens(model, 0.6, "svd", "pixels")
        inside = output(model, x)
        (op,) = (m for m in model.modules() if isinstance(m, wp.nn.PixelGraying))
        wp.restore(model)
        torch.testing.assert_close(inside, output(model, op(x)))


def test_every_pair_of_positions_combines() -> None:
    case = BY_NAME["torchvision vit"]
    x = case.input()
    for first, second in itertools.permutations(POSITIONS, 2):
        model, other = case.model(), case.model()
        wp.broadcast_context(model, first)
        wp.broadcast_context(model, second)
        wp.broadcast_context(other, second)
        wp.broadcast_context(other, first)
        assert torch.equal(output(model, x), output(other, x))


def test_scales_of_a_quantised_layer_are_floating_point() -> None:
    model = BY_NAME["timm vit"].model()
    for block in model.blocks:
        block.mlp.fc2.weight = nn.Parameter(block.mlp.fc2.weight.to(torch.int8), requires_grad=False)
    wp.broadcast_context(model, scaled=True)
    assert model.blocks[0].mlp.inserted_after.op.scale.dtype == torch.float32
    assert model.blocks[0].mlp.inserted_after.op.scale.unique().item() == 0.5


@pytest.mark.parametrize("where", POSITIONS)
def test_one_image_without_a_batch_axis(where: str) -> None:
    case = BY_NAME["torch encoder pre-norm"]  # batch_first=False: (L, N, C) and (L, C)
    model, x = case.model(), case.input(1)[0]
    wp.broadcast_context(model, where, scaled=True)
    torch.testing.assert_close(model(x), model(x[:, None])[:, 0])


def test_numbers_of_numpy_are_numbers() -> None:
    model = BY_NAME["timm vit"].model()
    (edit,) = wp.remove_skips(model, "ffn", blocks=np.int64(1))
    assert edit.block == 1
    assert len(wp.uniform_heads(model, np.int64(1), blocks=np.array([0, 1]))) == 2


def _tiny_vit(**settings: object) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    return timm.create_model("vit_tiny_patch16_224", **sizes, **settings).eval()


def test_mean_and_difference_as_an_edit() -> None:
    """Any two factors, fixed or learned; saved, made again, undone; the mean is of all tokens."""
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model, again, plain = (_tiny_vit() for _ in range(3))
    for each in (again, plain):
        each.load_state_dict(model.state_dict())
    seen: list[torch.Tensor] = []
    handle = plain.blocks[1].mlp.register_forward_hook(lambda _m, _a, out: seen.append(out))
    plain(x)
    handle.remove()

    wp.broadcast_context(model, mean=2.0, difference=0.5, blocks=1)
    model.blocks[1].mlp.register_forward_hook(lambda _m, _a, out: seen.append(out))
    wanted = model(x)
    out, mixed = seen
    mean = out.double().mean(-2, keepdim=True)
    torch.testing.assert_close(mixed.double(), 2 * mean + 0.5 * (out - mean), rtol=0, atol=1e-6)

    wp.apply(again, wp.edits(model).to_json())
    assert torch.equal(again(x), wanted)
    wp.restore(again)
    assert torch.equal(again(x), plain(x))

    wp.broadcast_context(again, "attention.end", mean=1.0, difference=1.0, learned=True)  # FeatScale
    torch.testing.assert_close(again(x), plain(x), rtol=0, atol=1e-5)
    assert len([name for name, _ in again.named_parameters() if name.endswith((".mean", ".difference"))]) == 4
    with pytest.raises(ValueError, match="factors of its own"):
        wp.broadcast_context(plain, scaled=True, mean=2.0)


def test_cb_in_the_last_block_of_a_pooled_model_changes_nothing() -> None:
    """The head sees the mean over the tokens, which CB keeps; with a class token it sees another token."""
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    changes = {}
    for pooling in ("avg", "token"):
        model = _tiny_vit(global_pool=pooling, class_token=pooling == "token")
        before = model(x)
        wp.broadcast_context(model, blocks=[1])
        changes[pooling] = (model(x) - before).abs().max().item()
    assert changes["avg"] < 1e-6 < 1e-3 < changes["token"]
