"""What the bounds say of models, against the formulas written out in NumPy."""

import importlib
import json
import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional

import wellposed as wp
from own_model import OwnBlock, OwnModel
from reference.ops import attend, layer_norm, logits, packed_qkv
from reference.spectra import generator, values
from untouched import assert_same, fingerprint
from wellposed.anatomy import Add, BlockRow, after, blocks, taps, teach
from wellposed.anatomy.table import BLOCKS
from wellposed.linalg.bounds import (
    depthwise_extremes,
)
from wellposed.linalg.spectrum import ConditionNumber
from wellposed.probes.attention_maps import no_attention
from wellposed.probes.bounds import bounds
from wellposed.probes.tables import as_text, bounds_table
from wellposed.records import Record, from_dict, to_dict, write_json
from zoo import BY_NAME, Case, each_kind, families


def kappa(x: Any) -> float:
    """Over min(m, n) singular values, by NumPy."""
    s = np.linalg.svd(np.asarray(x), compute_uv=False)
    return float(s[0] / s[-1]) if s[-1] > 0 else math.inf


def by(records: list[Record]) -> dict[tuple[int | None, str, int | None], Record]:
    found = {(record.block, record.measure, record.head): record for record in records}
    assert len(found) == len(records) == len({record.key for record in records})
    return found


def assert_is(record: Record, kappas: list[float], limits: list[float]) -> None:
    assert record.samples == pytest.approx(kappas, rel=1e-5)
    assert record.value == pytest.approx(np.median(kappas), rel=1e-5)
    assert record.low == pytest.approx(np.quantile(kappas, 0.25), rel=1e-5)
    assert record.high == pytest.approx(np.quantile(kappas, 0.75), rel=1e-5)
    assert record.bound == pytest.approx(np.median(limits), rel=1e-5)
    holds = sum(k <= b for k, b in zip(kappas, limits, strict=True))
    margins = [b / k for k, b in zip(kappas, limits, strict=True)]
    assert record.verdicts == (holds, 0, len(kappas) - holds, 0)
    assert f"margin x{np.median(margins):.3g}, smallest x{np.min(margins):.3g}" in record.note


def cubic(C: float, x: np.ndarray) -> float:
    return C * kappa(x) ** 3


def with_skip(C: float, x: np.ndarray) -> float:
    s = np.linalg.svd(x, compute_uv=False)
    return (C * s[0] ** 3 + s[0]) / (s[-1] ** 3 + s[-1])


def assert_block_is(
    found: dict[Any, Record], index: int, x: np.ndarray, W: dict[str, np.ndarray], P: np.ndarray
) -> None:
    """The linear and softmax forms of x (B, N, D), weights (D, D), probabilities (B, H, N, N)."""
    heads = P.shape[1]
    C = kappa(W["q"]) * kappa(W["k"]) * kappa(W["v"])
    M = [W["q"] @ W["k"].T @ t.T @ t @ W["v"] for t in x]
    assert_is(
        found[index, "kappa 4.1 linear", None],
        [kappa(t @ m) for t, m in zip(x, M, strict=True)],
        [cubic(C, t) for t in x],
    )
    assert_is(
        found[index, "kappa 4.2 linear", None],
        [kappa(t @ m + t) for t, m in zip(x, M, strict=True)],
        [with_skip(C, t) for t in x],
    )
    width = len(W["q"]) // heads
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        q, k, v, out = W["q"][:, part], W["k"][:, part], W["v"][:, part], W["out"][part]
        C = kappa(q) * kappa(k) * kappa(v)
        made = [t @ q @ k.T @ t.T @ t @ v for t in x]
        limits = [cubic(C, t) for t in x]
        assert_is(found[index, "kappa 4.1 linear", head], [kappa(y) for y in made], limits)
        attended = [p[head] @ (t @ v + W["b_v"][part]) for t, p in zip(x, P, strict=True)]
        assert_is(found[index, "kappa 4.1 softmax", head], [kappa(y) for y in attended], limits)
        limits = [with_skip(C * kappa(out), t) for t in x]
        sums = [kappa(y @ out + t) for t, y in zip(x, made, strict=True)]
        assert_is(found[index, "kappa 4.2 linear", head], sums, limits)


def test_timm_vit_against_numpy():
    case = BY_NAME["timm vit"]
    model, images = case.model(dtype=torch.float64), case.input(3, dtype=torch.float64)
    found = by(bounds(model, images))
    with torch.no_grad():
        stream = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        for index, block in enumerate(model.blocks):
            w = {name: tensor.detach() for name, tensor in block.named_parameters()}
            normed = layer_norm(stream, w, "norm1", 1e-6)
            q, k, v = packed_qkv(normed, w["attn.qkv.weight"], w["attn.qkv.bias"], 2)
            P = torch.softmax(logits(q, k), -1)
            branch = attend(logits(q, k), v) @ w["attn.proj.weight"].T + w["attn.proj.bias"]
            W = dict(zip("qkv", w["attn.qkv.weight"].chunk(3), strict=True)) | {"out": w["attn.proj.weight"]}
            W = {name: weight.T.numpy() for name, weight in W.items()}
            W["b_v"] = w["attn.qkv.bias"].chunk(3)[2].numpy()
            x = normed.numpy()
            assert_block_is(found, index, x, W, P.numpy())
            C = kappa(W["q"]) * kappa(W["k"]) * kappa(W["v"])
            limits = [cubic(C, t) for t in x]
            assert_is(found[index, "kappa 4.1 softmax", None], [kappa(y) for y in branch], limits)
            stream = stream + branch
            limits = [with_skip(C, t) for t in x]
            assert_is(found[index, "kappa 4.2 softmax", None], [kappa(y) for y in stream], limits)

            normed = layer_norm(stream, w, "norm2", 1e-6)
            first, last = w["mlp.fc1.weight"].T.numpy(), w["mlp.fc2.weight"].T.numpy()
            branch = block.mlp(normed)
            limits = [kappa(first) * kappa(last) * kappa(t) for t in normed]
            linear = [kappa(t @ first @ last) for t in normed.numpy()]
            assert_is(found[index, "kappa ffn linear", None], linear, limits)
            assert_is(found[index, "kappa ffn", None], [kappa(y) for y in branch], limits)
            stream = stream + branch
    for record in found.values():
        assert (record.images, record.dtype, record.estimator) == (
            3,
            "float64",
            "float64 Gram eigenvalues, SVD above kappa 3e4",
        )
        assert record.module == f"blocks.{record.block}"
        assert record.status == "ok"
    assert len(found) == 2 * (4 + 2 + 2 * 3)


def test_transformers_vit_against_numpy():
    case = BY_NAME["hf vit"]
    model, images = case.model(dtype=torch.float64), case.input(3, dtype=torch.float64)
    found = by(bounds(model, images, blocks=1))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        seen = model(images, output_attentions=True, output_hidden_states=True)
    layer = blocks(model)[1].module
    w = {name: tensor.detach() for name, tensor in layer.named_parameters()}
    x = layer_norm(seen.hidden_states[1], w, "layernorm_before", 1e-12).numpy()
    W = {letter: w[f"attention.{letter}_proj.weight"].T.numpy() for letter in "qkv"}
    W |= {"out": w["attention.o_proj.weight"].T.numpy(), "b_v": w["attention.v_proj.bias"].numpy()}
    assert_block_is(found, 1, x, W, seen.attentions[1].numpy())
    assert {record.block for record in found.values()} == {1}


def test_windows_against_numpy():
    case = BY_NAME["timm swin"]
    model, images = case.model(dtype=torch.float64), case.input(2, dtype=torch.float64)
    attention, inputs, outputs = model.layers[0].blocks[1].attn, [], []
    handle = attention.register_forward_hook(
        lambda m, args, out: inputs.append(args[0]) or outputs.append(out)
    )
    with torch.no_grad():
        model(images)
    handle.remove()
    records = by(bounds(model, images, blocks=1))
    x = inputs[0].detach().numpy()
    assert x.shape == (8, 16, 16)  # 2 images of 4 windows
    q, k, v = (part.detach().T.numpy() for part in attention.qkv.weight.chunk(3))
    each = [kappa(t @ q @ k.T @ t.T @ t @ v + t) for t in x]
    C = kappa(q) * kappa(k) * kappa(v)
    record = records[1, "kappa 4.2 linear", None]
    assert record.samples == pytest.approx([np.median(each[:4]), np.median(each[4:])], rel=1e-5)
    assert record.bound == pytest.approx(np.median([with_skip(C, t) for t in x]), rel=1e-5)
    assert "for 8 of 8" in record.note
    assert "4 windows an image" in record.note
    # What the branch adds, for whole images.
    record = records[1, "kappa 4.1 softmax", None]
    of_images = outputs[0].reshape(2, 64, 16)
    assert record.samples == pytest.approx([kappa(y) for y in of_images], rel=1e-5)
    assert record.bound == pytest.approx(np.median([cubic(C, t) for t in x.reshape(2, 64, 16)]), rel=1e-5)
    assert "of all its tokens" in record.note


@families("timm vit", "timm swin", "torchvision vit")
def test_probabilities_that_come_in_several_parts(case: Case, monkeypatch):
    model, images = case.model(), case.input(3)
    whole = bounds(model, images)
    monkeypatch.setattr("wellposed.probes.attention_maps.LARGEST_MAP", 1)  # one image at a time
    for record, expected in zip(bounds(model, images), whole, strict=True):
        assert record.key == expected.key
        assert record.samples == pytest.approx(expected.samples, rel=1e-3)


def test_reduced_keys_against_numpy():
    case = BY_NAME["timm pvt_v2"]
    model, images = case.model(dtype=torch.float64), case.input(2, dtype=torch.float64)
    attention, inputs = model.stages[0].blocks[0].attn, {}
    handles = [
        layer.register_forward_hook(lambda m, args, out, name=name: inputs.update({name: args[0].detach()}))
        for name, layer in (("q", attention.q), ("kv", attention.kv))
    ]
    records = by(bounds(model, images, blocks=0))
    for handle in handles:
        handle.remove()
    queries, keys = inputs["q"].numpy(), inputs["kv"].numpy()
    assert queries.shape[1] == 16 * keys.shape[1]
    wq, (wk, wv) = (
        attention.q.weight.detach().T.numpy(),
        (part.detach().T.numpy() for part in attention.kv.weight.chunk(2)),
    )
    C = kappa(wq) * kappa(wk) * kappa(wv)
    made = [kappa(x @ wq @ wk.T @ y.T @ y @ wv) for x, y in zip(queries, keys, strict=True)]
    limits = [C * kappa(x) * kappa(y) ** 2 for x, y in zip(queries, keys, strict=True)]
    assert_is(records[0, "kappa 4.1 linear", None], made, limits)


def test_convmixer_against_numpy():
    case = BY_NAME["timm convmixer"]
    model, images = case.model(dtype=torch.float64), case.input(3, dtype=torch.float64)
    found = by(bounds(model, images))
    with torch.no_grad():
        x = model.stem(images)
    block = model.blocks[0][0]
    convolution, _ = depthwise_extremes(block.fn[0].weight[:, 0], (4, 4))
    limits = [float(convolution.kappa) * kappa(image.flatten(1).T) for image in x]
    kernels = block.fn[0].weight.detach()
    linear = functional.conv2d(x, kernels, padding=1, groups=16)
    made = [kappa(image.flatten(1).T) for image in linear]
    assert_is(found[0, "kappa convolution linear", None], made, limits)
    branch = [kappa(image.flatten(1).T) for image in block.fn(x).detach()]
    assert_is(found[0, "kappa convolution", None], branch, limits)
    assert "kappa(W_CD) by the dense matrix" in found[0, "kappa convolution", None].note
    assert {record.position for record in found.values()} == {"mixer.branch"}
    assert len(found) == 4


# Every family, and models that the bounds do not fit


@each_kind
def test_every_family(case: Case):
    model, images = case.model(), case.input(2)
    before = fingerprint(model)
    records = bounds(model, images, images_limit=2)
    assert_same(before, fingerprint(model))
    found = by(records)
    for block in blocks(model):
        of_block = [record for record in records if record.block == block.index]
        measured = {record.measure for record in of_block if record.value is not None}
        one_token = "class attention" in block.row.family
        expected = set()
        if "attention" in block.row.roles and not no_attention(block) and not one_token:
            expected |= {
                f"kappa {form}" for form in ("4.1 linear", "4.1 softmax", "4.2 linear", "4.2 softmax")
            }
            for measure, heads in (("4.1 linear", 2), ("4.1 softmax", 2), ("4.2 linear", 2)):
                heads = 1 if "stages.0" in block.name or "stages.1" in block.name else heads
                assert [(block.index, f"kappa {measure}", head) in found for head in range(3)] == [
                    head < heads for head in range(3)
                ]
        if "ffn" in block.row.roles and not one_token:
            expected |= {"kappa ffn linear", "kappa ffn"}
        if case.name == "timm convmixer":
            expected |= {"kappa convolution linear", "kappa convolution"}
        assert measured == expected
        for record in of_block:
            if record.value is None:
                assert record.status == "not measured"
                assert (
                    "one token" in record.note
                    or "over channels" in record.note
                    or "class token" in record.note
                )
            else:
                assert record.value >= 1
                assert sum(record.verdicts) >= record.images
    json.dumps([to_dict(record) for record in records], allow_nan=False)
    assert len(as_text(bounds_table(records)).splitlines()) > 2


@pytest.mark.parametrize("seed", range(5))
def test_4_1_holds_in_a_model_with_more_tokens_than_channels(seed):
    torch.manual_seed(seed)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=8, depth=3, num_heads=1, num_classes=2
    )
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.5 if "weight" in name else 0.1)
    images = torch.randn(3, 3, 32, 32)
    records = [record for record in bounds(model, images) if record.measure == "kappa 4.1 linear"]
    assert len(records) == 3 * 2
    for record in records:
        holds, _, violated, cannot_tell = record.verdicts
        assert violated == 0
        assert holds + cannot_tell == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tokens_without_full_rank_hold_trivially(dtype, tmp_path):
    # Fresh norms have no bias: a token's channels sum to zero, and 65 tokens of 64 channels lack one rank.
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, patch_size=8, embed_dim=64, depth=1, num_heads=2, num_classes=2
    ).to(dtype)
    records = bounds(model, torch.randn(2, 3, 64, 64, dtype=dtype))
    for record in records:
        assert "holds trivially for 2 of 2, infinite where" in record.note
        assert record.bound is None
    linear = by(records)[0, "kappa 4.1 linear", None]
    assert linear.status == "at least"
    assert "≥" in linear.text()
    write_json(records, {}, tmp_path / "records.json")
    rows = {row[0]: row[1:] for row in bounds_table(records).rows}
    assert rows["kappa 4.1 linear"] == ("0", "2", "0", "0", "-", "-")


@pytest.mark.parametrize(
    ("capped", "status"),
    [
        ([False, False, False], "ok"),
        ([True, False, False], "ok"),  # above the middle, wherever it is
        ([False, True, False], "at least"),
        ([False, False, True], "at least"),
    ],
)
def test_at_least_where_the_median_is_a_lower_bound(monkeypatch, capped, status):
    case = BY_NAME["timm vit"]

    def measured(product, norm):
        # (images, windows), or (images,) for the MLP
        return ConditionNumber(values(3.0, 1.0, 2.0).view_as(norm), torch.tensor(capped).view_as(norm))

    module = importlib.import_module("wellposed.probes.bounds")  # the package has a function of that name
    monkeypatch.setattr(module, "product_condition_number", measured)
    record = bounds(case.model(), case.input(3), blocks=0)[0]
    assert (record.value, record.status) == (2.0, status)


def test_not_finite_tokens_are_not_measured():
    case = BY_NAME["timm vit"]
    model, images = case.model(), case.input(2)
    bad = [0]

    def spoil(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[bad] = math.nan
        return out

    model.patch_embed.register_forward_hook(spoil)
    for record in bounds(model, images):
        assert record.samples[0] is None
        assert record.value == record.samples[1]
        assert "cannot tell for 1 of 2" in record.note
    bad.append(1)
    with pytest.raises(ValueError, match="non-finite"):
        bounds(model, images)


def test_class_attention_alone_is_an_error():
    case = BY_NAME["timm cait"]
    with pytest.raises(ValueError, match=r"got none in blocks_token_only.0 .*the class token alone"):
        bounds(case.model(), case.input(), blocks=2)


def test_blocks_without_any_of_it_are_an_error():
    case = BY_NAME["timm convmixer"]
    model = case.model()
    for block in blocks(model):
        block.module.fn[0] = nn.Conv2d(16, 16, 3, padding=1)
    with pytest.raises(
        ValueError, match=r"an MLP or a depthwise convolution, got none in .*they have neither"
    ):
        bounds(model, case.input())


def test_a_removed_skip_has_no_4_2():
    case = BY_NAME["timm vit"]
    model = case.model()
    wp.remove_skips(model, "attention", blocks=[0])
    found = by(bounds(model, case.input()))
    assert found[0, "kappa 4.2 softmax", None].status == "not measured"
    assert "skip is removed" in found[0, "kappa 4.2 softmax", None].note
    assert found[1, "kappa 4.2 softmax", None].status == "ok"
    assert found[0, "kappa 4.2 linear", None].status == "ok"


@pytest.fixture
def taught():
    before = dict(BLOCKS)
    row = taps(attention=after("mix"), mlp="ff", last_linear="ff.out")
    teach(OwnBlock, BlockRow("own", (Add("attention", "x"), Add("ffn", "x")), row))
    yield OwnModel().eval()
    BLOCKS.clear()
    BLOCKS.update(before)


def test_unknown_attention_is_not_measured_and_says_what_was_found(taught):
    found = by(bounds(taught, torch.randn(2, 3, 16, 16, generator=generator(0))))
    assert "blocks.0.mix (Linear), found no linear layer in it" in found[0, "kappa 4.1 linear", None].note
    assert found[0, "kappa ffn linear", None].value > 1


def test_the_table_adds_up():
    def record(value: float, bound: float | None, verdicts: tuple[int, ...], head: int | None) -> Record:
        # Over its images: one has less room than the medians say.
        margins = (bound / value, bound / value / 2) if bound else ()
        where = {"value": value, "bound": bound, "verdicts": verdicts, "margins": margins, "head": head}
        return Record(measure="kappa 4.1 linear", **where)

    records = [
        record(2.0, 4.0, (1, 0, 1, 0), None),
        record(8.0, 4.0, (1, 0, 0, 1), None),
        record(1.0, None, (0, 1, 0, 0), 0),
    ]
    records.append(Record(measure="kappa ffn", value=None, status="not measured", note="no MLP"))
    again = [from_dict(to_dict(record)) for record in records]
    assert bounds_table(again).rows == (
        ("kappa 4.1 linear", "2", "0", "1", "1", "x1.25", "x0.25"),
        ("kappa 4.1 linear, heads", "0", "1", "0", "0", "-", "-"),
    )
    assert bounds_table(records[-1:]).rows == ()


def test_arguments():
    case = BY_NAME["timm vit"]
    model, images = case.model(), case.input(3)
    with pytest.raises(ValueError, match="images_limit must be at least 1, got 0"):
        bounds(model, images, images_limit=0)
    assert {record.images for record in bounds(model, images, images_limit=2)} == {2}
    assert {record.block for record in bounds(model, images, blocks=[1])} == {1}
    with pytest.raises(IndexError, match="within 0 and 1"):
        bounds(model, images, blocks=7)


@families("timm vit", "torchvision vit", "timm swin")
def test_inside_autocast_the_algebra_keeps_its_digits(case: Case):
    model, images = case.model(), case.input(2)
    plain = by(bounds(model, images, blocks=0))
    with torch.autocast("cpu", torch.bfloat16):
        lowered = by(bounds(model, images, blocks=0))
    for key in ((0, "kappa 4.1 linear", None), (0, "kappa 4.2 linear", 1)):
        # The first block's tokens are rounded, the products are not.
        assert lowered[key].value == pytest.approx(plain[key].value, rel=0.3)
        assert lowered[key].bound == pytest.approx(plain[key].bound, rel=0.3)
    assert lowered[0, "kappa 4.1 softmax", None].dtype == "bfloat16"


def test_a_bfloat16_model():
    case = BY_NAME["timm vit"]
    found = by(bounds(case.model(dtype=torch.bfloat16), case.input(2, dtype=torch.bfloat16)))
    assert {record.dtype for record in found.values()} == {"bfloat16"}
    assert found[0, "kappa 4.1 linear", None].value > 1


def test_the_model_is_left_alone_after_an_error():
    case = BY_NAME["timm vit"]
    model, images = case.model().train(), case.input()
    model.blocks[1].mlp.fc2.register_forward_hook(_stop)
    before = fingerprint(model)
    with pytest.raises(RuntimeError, match="stop"):
        bounds(model, images)
    assert_same(before, fingerprint(model))
    assert not torch.overrides._get_current_function_mode_stack()


def _stop(*_: Any) -> None:
    raise RuntimeError("stop")
