"""Probes on texts, sounds and several inputs: padding does not count, and masks are seen."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

import wellposed as wp
from texts import (
    albert,
    bert,
    clip,
    encoder,
    gpt2,
    llama,
    made,
    naflex,
    patches,
    qwen3,
    texts,
    tokens,
    wav2vec2,
    whisper,
)
from wellposed.anatomy import blocks
from wellposed.anatomy.masks import hidden_keys, hides_later
from wellposed.anatomy.proof import Proofs, proofs
from wellposed.probes import jacobian_spectrum, ntk
from wellposed.probes.jacobian import dense_jacobian
from wellposed.probes.named_inputs import as_named
from wellposed.probes.subblock import sub_block
from wellposed.records import Record

LENGTHS = (5, 1, 3, 5)


def samples(records: Any, measure: str, position: str, block: int = 0) -> tuple[float | None, ...]:
    (record,) = [
        r for r in records if (r.measure, r.position, r.block, r.head) == (measure, position, block, None)
    ]
    return record.samples


def caught(model: nn.Module, name: str, inputs: dict[str, Tensor]) -> Tensor:
    """The tokens that enter a module."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("make", [bert, gpt2, llama, qwen3])
def test_kappa_is_of_the_valid_tokens(make: Callable[[], nn.Module]) -> None:
    model, inputs = made(make), texts(LENGTHS, 7)
    block = blocks(model)[1]
    found = wp.diagnose(model, inputs, what="conditioning").records
    x = caught(model, block.name, inputs)
    expected = [torch.linalg.svdvals(x[i, :n]) for i, n in enumerate(LENGTHS) if n > 1]
    kappas = torch.tensor([(s[0] / s[-1]).item() for s in expected])
    torch.testing.assert_close(torch.tensor(samples(found, "kappa", "input", 1)), kappas, rtol=1e-6, atol=0)
    stable = torch.tensor([(s.square().sum() / s[0] ** 2).item() for s in expected])
    told = torch.tensor(samples(found, "stable rank", "input", 1))
    torch.testing.assert_close(told, stable, rtol=1e-6, atol=0)
    (note,) = [r.note for r in found if (r.measure, r.position, r.block) == ("kappa", "input", 1)]
    assert note.startswith(
        "3-5 tokens x 32 channels, without padding; 1 texts of one token or none are skipped"
    )


@pytest.mark.parametrize(
    ("make", "inputs"), [(bert, texts), (gpt2, texts), (albert, texts), (naflex, patches), (encoder, tokens)]
)
def test_more_padding_changes_no_record(make: Callable[[], nn.Module], inputs: Any) -> None:
    model = made(make)
    few, many = (wp.diagnose(model, inputs((5, 3), width)).records for width in (5, 8))
    assert len(few) == len(many)
    for one, other in zip(few, many, strict=True):
        assert (one.key, one.status) == (other.key, other.status)
        if one.value is not None and one.status == "ok":
            assert other.value == pytest.approx(one.value, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("make", [bert, gpt2])
def test_entropy_is_over_the_keys_that_a_row_may_see(make: Any, implementation: str) -> None:
    model, inputs = made(make), texts(LENGTHS, 7)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attention = model(**inputs, output_attentions=True).attentions[0]
    expected, uniform = [], []
    for p, n in zip(attention, LENGTHS, strict=True):
        rows = [
            (head[i, : (i + 1 if make is gpt2 else n)])
            for head in p
            for i in range(n)
            if (i + 1 if make is gpt2 else n) > 1
        ]
        entropies = [-(row * row.log()).sum().item() / math.log(len(row)) for row in rows]
        expected.append(sum(entropies) / len(rows) if rows else None)
        distances = [(row - 1 / len(row)).abs().sum().item() / 2 for row in rows]
        uniform.append(sum(distances) / len(rows) if rows else None)
    model.set_attn_implementation(implementation)
    found = wp.diagnose(model, inputs, what="density").records
    assert samples(found, "entropy", "attention") == pytest.approx(expected, abs=1e-6)
    assert samples(found, "distance from uniform", "attention") == pytest.approx(uniform, abs=1e-6)
    assert any("rows that see one key are skipped" in r.note for r in found)


def test_a_loader_with_padding_of_its_own_in_each_batch() -> None:
    model = made(bert)
    groups = [texts((5, 3), 6), texts((4,), 4), texts((6, 2), 9)]
    loader = DataLoader(groups, batch_size=None)
    found = wp.diagnose(model, loader).records
    alone = [s for one in groups for s in samples(wp.diagnose(model, one).records, "kappa", "input", 1)]
    assert samples(found, "kappa", "input", 1) == pytest.approx(alone)
    assert {r.status for r in found if r.measure == "spectrum"} == {"not measured"}


def test_ids_alone_and_a_batch_encoding() -> None:
    model, inputs = made(bert), texts((5, 5), 5)
    expected = samples(wp.diagnose(model, inputs).records, "kappa", "input", 1)
    encoding = transformers.BatchEncoding(dict(inputs) | {"labels": torch.tensor([0, 1])})
    for given in (inputs["input_ids"], encoding, [texts((5, 5), 5)], iter([texts((5, 5), 5)])):
        assert samples(wp.diagnose(model, given).records, "kappa", "input", 1) == expected


def test_towers_have_their_own_tokens() -> None:
    inputs = texts((5, 3), 5) | {"pixel_values": torch.randn(2, 3, 32, 32)}
    model = made(clip)
    found = wp.diagnose(model, inputs).records
    notes = {
        r.module.partition(".")[0]: r.note for r in found if (r.measure, r.position) == ("kappa", "input")
    }
    assert notes == {
        "text_model": "3-5 tokens x 32 channels, without padding",
        "vision_model": "17 tokens x 32 channels",
    }
    # As many patches as words, with a mask that is of the words.
    width = 17
    found = wp.diagnose(model, texts((17, 3), width) | {"pixel_values": torch.randn(2, 3, 32, 32)}).records
    assert {r.note for r in found if r.module.startswith("vision") and r.measure == "kappa"} == {
        "17 tokens x 32 channels"
    }


def test_sounds() -> None:
    mask = (torch.arange(400) < torch.tensor([400, 300])[:, None]).long()
    found = wp.diagnose(made(wav2vec2), {"input_values": torch.randn(2, 400), "attention_mask": mask}).records
    assert any(r.note == "29-39 tokens x 32 channels, without padding" for r in found)
    sounds = {
        "input_features": torch.randn(2, 8, 40),
        "decoder_input_ids": torch.tensor([[1, 5, 6], [1, 7, 8]]),
    }
    found = wp.diagnose(made(whisper), sounds).records
    assert {r.position for r in found if r.measure == "entropy"} == {"attention", "attention 2"}


def test_a_block_that_runs_twice_is_measured_at_its_first_call() -> None:
    model, inputs = made(albert), texts((5, 3), 5)
    found = wp.diagnose(model, inputs).records
    assert all(r.images == 2 and "of the first of 2 calls" in r.note for r in found if r.value is not None)
    (block,) = blocks(model)
    x = caught(model, block.name, inputs)
    s = torch.linalg.svdvals(x[0])
    told = samples(found, "kappa", "input")[0]
    assert told == pytest.approx((s[0] / s[-1]).item(), rel=1e-6)


class Pooled(nn.Module):
    """Halves the tokens before its blocks, which never see the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = encoder()

    def forward(self, src: Tensor, attention_mask: Tensor) -> Tensor:
        return self.blocks(src[:, ::2])  # type: ignore[no-any-return]


def test_tokens_that_do_not_match_the_mask_are_not_measured() -> None:
    inputs = {"src": torch.randn(2, 6, 32), "attention_mask": torch.ones(2, 6)}
    inputs["attention_mask"][1, 4:] = 0
    found = wp.diagnose(made(Pooled), inputs).records
    assert {(r.status, r.note) for r in found} == {
        ("not measured", "which of its 3 tokens are padding cannot be told: the mask has 6 entries")
    }
    inputs["attention_mask"][:] = 1
    assert all(r.status == "ok" for r in wp.diagnose(made(Pooled), inputs, what="density").records)


def test_the_jacobian_and_the_kernel_are_of_the_text_alone() -> None:
    model = made(bert)
    padded, alone = texts((4, 3), 7), {name: x[:1, :4] for name, x in texts((4, 3), 7).items()}
    one, other = (jacobian_spectrum(model, given, block=1, skip=True) for given in (padded, alone))
    assert one.singular_values is not None
    assert other.singular_values is not None
    torch.testing.assert_close(one.singular_values, other.singular_values)
    kernel = ntk(model, padded).kernel
    torch.testing.assert_close(kernel[:1, :1], ntk(model, alone).kernel)


def test_the_jacobian_of_a_causal_block_is_triangular() -> None:
    cut = sub_block(made(llama), as_named(texts((3,), 3), made(llama)), 1, "attention")
    whole = dense_jacobian(cut).reshape(3, 32, 3, 32)
    for row in range(3):
        assert whole[row, :, row].abs().max() > 0
        assert not whole[row, :, row + 1 :].any()
    assert torch.equal(cut.function(cut.input), cut.function(cut.input))  # no cache of keys grows


def statuses(records: tuple[Record, ...]) -> dict[str, set[str]]:
    return {r.measure: {x.status for x in records if x.measure == r.measure} for r in records}


def test_bounds_where_they_have_a_meaning() -> None:
    whole = statuses(wp.diagnose(made(encoder), tokens((5, 5), 5), what="bounds").records)
    assert "not measured" not in set.union(*whole.values())
    padded = statuses(wp.diagnose(made(encoder), tokens((5, 3), 5), what="bounds").records)
    assert set.union(*padded.values()) == {"not measured"}
    causal = statuses(wp.diagnose(made(llama), texts((5, 5), 5), what="bounds").records)
    assert causal["kappa 4.1 linear"] == {"not measured"}
    assert "not measured" not in causal["kappa ffn"]


def test_causality_is_found_and_kept() -> None:
    assert {block.row.causal for make in (gpt2, llama, qwen3) for block in blocks(made(make))} == {True}
    assert {block.row.causal for make in (bert, naflex, encoder) for block in blocks(made(make))} == {False}
    by_tower = {block.name.partition(".")[0]: block.row.causal for block in blocks(made(whisper))}
    assert by_tower == {"encoder": False, "decoder": True}
    assert {block.row.causal for block in blocks(made(clip))} == {None}
    again = Proofs()
    again.load(json.loads(json.dumps(proofs().to_json())))
    assert again.rows == proofs().rows


def test_masks_of_all_kinds() -> None:
    hidden = torch.tensor([[False, False, True], [False, True, True]])
    low = torch.zeros(2, 3).masked_fill(hidden, torch.finfo(torch.float32).min)
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    for name, mask, of_torch in (
        ("attention_mask", (~hidden).long(), False),
        ("attention_mask", ~hidden, False),
        ("attention_mask", (~hidden).float(), False),
        ("src_key_padding_mask", hidden, True),
        ("src_key_padding_mask", low, True),
        ("attn_mask", low[:, None, None], False),
        ("attention_mask", ~(hidden[:, None, None] | later), False),
        ("src_mask", (hidden[:, None] | later).repeat_interleave(4, 0), True),
    ):
        found = hidden_keys(mask, name, 2, 3, of_torch=of_torch)
        assert found is not None
        assert torch.equal(found, hidden), name
    assert hidden_keys(torch.ones(2, 4), "attention_mask", 2, 3) is None
    assert hides_later(later)
    assert not hides_later(torch.zeros(3, 3, dtype=torch.bool))
    assert not hides_later(torch.ones(3, 3, dtype=torch.bool))
    assert not hides_later(later.T)
