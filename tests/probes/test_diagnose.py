"""The one call: what it takes, what it gives, and that it leaves no trace."""

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset

import wellposed as wp
import zoo
from own_model import OwnModel
from untouched import assert_same, fingerprint
from wellposed.anatomy import Add, BlockRow, after, taps
from wellposed.anatomy.table import BLOCKS
from wellposed.probes import Diagnosis
from wellposed.probes.diagnose import EVERYTHING
from wellposed.records import Record

VIT = zoo.BY_NAME["timm vit"]


def small_vit() -> nn.Module:
    return VIT.model()


@zoo.every_family
def test_every_family_plain_and_edited(case: zoo.Case) -> None:
    model, x = case.model(), case.input(2)
    first = wp.diagnose(model, x)
    assert {record.block for record in first.records} == set(range(case.blocks))
    if case.has_attention:
        assert any(record.measure == "entropy" and record.value is not None for record in first.records)
    else:
        assert any("density not measured" in note for note in first.notes)
    wp.remove_skips(model, "all")
    if case.has_mlp:
        wp.broadcast_context(model, scaled=True)
    before = fingerprint(model)
    second = wp.diagnose(model, x)
    assert_same(before, fingerprint(model))
    assert second.about["edits"]
    assert str(first)
    assert str(first.compare(second))


def test_everything_on_one_model() -> None:
    model, x = small_vit(), VIT.input(2)
    before = fingerprint(model)
    diagnosis = wp.diagnose(model, x, what=EVERYTHING)
    assert_same(before, fingerprint(model))
    measures = {record.measure for record in diagnosis.records}
    assert {"kappa", "entropy", "jacobian kappa", "ntk kappa", "kappa 4.1 linear"} <= measures
    for record in diagnosis.records:
        assert record.status == "not measured" or record.estimator, record
        assert record.status == "not measured" or record.dtype, record
        is_of_images = not record.measure.startswith("weight")
        assert record.images > 0 or record.status == "not measured" or not is_of_images, record
        assert record.status != "ok" or record.tolerance is not None, record
    for title in ("jacobian kappa", "ntk kappa", "kappa 4.1 linear"):
        assert title in str(diagnosis)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("what", [each for each in EVERYTHING if each != "weights"])  # they need no pass
def test_as_found_after_an_error(what: str, error: type[BaseException]) -> None:
    model, x = small_vit().train(), VIT.input(2)
    wp.gray_tokens(model, 0.9, "dct")

    def fail(*_: object) -> None:
        raise error("stop")

    model.blocks[1].mlp.fc1.register_forward_hook(fail)
    before = fingerprint(model)
    with pytest.raises(error, match="stop"):
        wp.diagnose(model, x, what=what)
    assert_same(before, fingerprint(model))


def test_images_of_every_kind_agree(tmp_path) -> None:
    x = VIT.input(4)
    loader = DataLoader(TensorDataset(x, torch.zeros(4)), batch_size=3)
    same = [wp.diagnose(small_vit(), images, what="conditioning").records for images in (x, list(x), loader)]
    for records in same[1:]:
        for one, other in zip(same[0], records, strict=True):
            assert one.key == other.key
            assert one.samples == pytest.approx(other.samples, rel=1e-3)


def test_the_table_has_the_worst_block_first() -> None:
    diagnosis = wp.diagnose(small_vit(), VIT.input(3))
    worst = max(diagnosis.select("kappa"), key=lambda record: record.value)
    rows = [line for line in str(diagnosis).splitlines() if re.match(r"\d", line)]
    assert rows[0].startswith(f"{worst.block} ")
    assert len(rows) == 2
    assert "entropy" in str(diagnosis)


def test_results_print_in_a_line_or_a_table() -> None:
    model, x = small_vit(), VIT.input(2)
    diagnosis = wp.diagnose(model, x)
    assert repr(diagnosis) == str(diagnosis)
    assert repr(diagnosis.compare(diagnosis)).startswith("measure")
    spectrum = str(wp.probes.jacobian_spectrum(model, x, skip=True))
    assert re.fullmatch(r"Jacobian of blocks\.0 attention\+skip, 544 x 544: sigma max .*float64\)", spectrum)
    assert re.match(
        r"NTK of the sum of 5 outputs.*2 images: lambda max .* kappa ", str(wp.probes.ntk(model, x))
    )


def test_blocks_whose_worst_number_is_a_bound_have_no_order() -> None:
    def record(block: int, status: str) -> Record:
        where: dict[str, Any] = {"module": f"blocks.{block}", "position": "input", "status": status}
        return Record(measure="kappa", value=9.88e6 - block, block=block, **where)

    said = "blocks ranked by a bound have no order among them"
    tied = Diagnosis((record(0, "at least"), record(1, "at least"), record(2, "ok")))
    assert said in " ".join(str(tied).split())
    for status in ("ok", "at least"):  # one bound above numbers is the worst
        ordered = Diagnosis((record(0, status), record(1, "ok"), record(2, "ok")))
        assert said not in " ".join(str(ordered).split())


def test_html_escapes_and_colours(tmp_path) -> None:
    bad = Record(measure="kappa", value=3e7, block=0, module="<script>", position="input", status="at least")
    good = Record(measure="kappa", value=1.0, block=1, module="b", position="input")
    page = Diagnosis((bad, good), {"model": "a<b", "notes": ["x & y"]})._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "x &amp; y" in page
    assert "rgb(255,140,130)" in page
    assert "rgb(255,255,255)" in page


def test_files(tmp_path) -> None:
    diagnosis = wp.diagnose(small_vit(), VIT.input(2))
    diagnosis.save(tmp_path / "made" / "here")
    again = Diagnosis.from_json(tmp_path / "made" / "here" / "diagnosis.json")
    assert again.records == diagnosis.records
    assert again.about == diagnosis.about
    lines = (tmp_path / "made" / "here" / "diagnosis.csv").read_text().splitlines()
    assert len(lines) == 1 + len(diagnosis.records)
    assert "report-data" in (tmp_path / "made" / "here" / "diagnosis.html").read_text(encoding="utf-8")


def of(block: int, position: str, value: float, status: Any = "ok", measure: str = "kappa") -> Record:
    samples = (value, value + 1)
    return Record(
        measure=measure, value=value, block=block, position=position, status=status, samples=samples
    )


def test_compare_sorts_filters_and_skips_what_is_the_same_tensor() -> None:
    first = [
        of(0, "input", 5.0),
        of(0, "attention.branch", 9.0),
        of(0, "attention.skip", 5.0),
        of(0, "attention.sum", 7.0),
        of(1, "input", 7.0),
        of(1, "attention.branch", 9e6, "at least"),
        of(1, "attention.skip", 7.5),  # something was inserted before it
        of(1, "entropy", 0.5, measure="entropy"),
    ]
    changed = [5.0, 18.0, 5.0, 70.0, 70.0, 3e7, 7.5, 0.5]
    second = [replace(r, value=v, samples=(v, v + 1)) for r, v in zip(first, changed, strict=True)]
    this, other = Diagnosis(tuple(first)), Diagnosis(tuple(second))
    places = [(a.block, a.position) for a, _ in this.compare(other).pairs]
    assert places[:2] == [(0, "attention.sum"), (0, "attention.branch")]
    assert places[-1] == (1, "attention.branch")  # two bounds
    assert set(places) == {(r.block, r.position) for r in first} - {(0, "attention.skip"), (1, "input")}
    chosen = this.compare(other, measure="kappa", block=1, position=("attention.branch", "attention.skip"))
    assert {(a.block, a.position) for a, _ in chosen.pairs} == {
        (1, "attention.branch"),
        (1, "attention.skip"),
    }
    with pytest.raises(ValueError, match=r"share nothing with measure=\['rank'\]"):
        this.compare(other, measure="rank")


def test_compare() -> None:
    model, x = small_vit(), VIT.input(3)
    before = wp.diagnose(model, x, what="conditioning")
    wp.gray_tokens(model, 0.5, "svd", where="blocks", blocks=0)
    comparison = before.compare(wp.diagnose(model, x, what="conditioning"), ("plain", "grayed"))
    pairs = {a.key: (a, b) for a, b in comparison.pairs}
    plain, grayed = pairs["kappa", 0, "input", None]
    assert grayed.value < plain.value
    lines = str(comparison).splitlines()
    assert lines[0].split() == ["measure", "where", "plain", "grayed", "ratio"]
    assert "<table>" in comparison._repr_html_()
    with pytest.raises(ValueError, match=r"share no quantity.*kappa.*entropy"):
        before.compare(Diagnosis((Record(measure="entropy", value=1.0),)))


def test_what_and_blocks() -> None:
    model, x = small_vit(), VIT.input(2)
    only = wp.diagnose(model, x, what=["density"], blocks=1)
    assert {(record.block, record.position) for record in only.records} == {(1, "attention")}
    with pytest.raises(ValueError, match=r"what must be.*conditioning.*got 'speed'"):
        wp.diagnose(model, x, what="speed")
    with pytest.raises(ValueError, match="got nothing"):
        wp.diagnose(model, x, what=[])
    with pytest.raises(IndexError, match="within 0 and 1"):
        wp.diagnose(model, x, blocks=9)


def test_density_asked_for_where_there_is_none() -> None:
    case = zoo.BY_NAME["timm mixer"]
    with pytest.raises(ValueError, match="without attention"):
        wp.diagnose(case.model(), case.input(1), what="density")


def test_a_model_of_ones_own_without_softmax(monkeypatch) -> None:
    row = BlockRow(
        "mine", (Add("attention"), Add("ffn")), taps(attention=after("mix"), mlp="ff", last_linear="ff.out")
    )
    monkeypatch.setitem(BLOCKS, "own_model.OwnBlock", row)
    model, x = OwnModel(), torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    diagnosis = wp.diagnose(model, x)
    assert diagnosis.select("kappa", position="attention.branch")[1].status == "ok"
    (entropy, _) = diagnosis.select("entropy")
    assert (entropy.status, entropy.note) == ("not measured", "it showed no softmax attention")
    assert "kappa/0/input" in wp.probes.Monitor(model, x).measure()
    with pytest.raises(RuntimeError, match="expected a call of scaled_dot_product_attention"):
        wp.diagnose(model, x, what="density")


def test_not_a_known_model() -> None:
    with pytest.raises(wp.UnknownModelError, match="Teach it"):
        wp.diagnose(nn.Linear(3, 3), torch.randn(1, 3, 8, 8))
    with pytest.raises(TypeError, match="Module"):
        wp.diagnose("vit", torch.randn(1, 3, 8, 8))


def test_wrapped_and_compiled_models() -> None:
    model, x = small_vit(), VIT.input(2)
    expected = wp.diagnose(model, x, what="conditioning").records
    wrapped = nn.DataParallel(model)
    wrapped.module.cpu()  # it goes to a GPU where there is one
    assert wp.diagnose(wrapped, x, what="conditioning").records == expected
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        out = compiled(x)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        assert wp.diagnose(compiled, x, what="conditioning").records == expected
        # Nor does looking make it compile again.
        assert torch.equal(compiled(x), out)


def test_inside_inference_mode() -> None:
    model, x = small_vit(), VIT.input(2)
    expected = wp.diagnose(model, x).records
    with torch.inference_mode():
        assert wp.diagnose(model, x).records == expected


def test_two_runs_agree() -> None:
    case = zoo.BY_NAME["hf vitmae"]  # draws its mask at random
    model, x = case.model(), case.input(2)
    assert wp.diagnose(model, x).records == wp.diagnose(model, x).records


def test_a_progress_bar_for_those_who_see_it(capsys, monkeypatch) -> None:
    wp.diagnose(small_vit(), VIT.input(1))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as far as rich can tell
    wp.diagnose(small_vit(), VIT.input(1))
    assert "forward passes" in capsys.readouterr().err
    wp.diagnose(small_vit(), VIT.input(1), progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_the_first_call_of_a_process_leaves_random_numbers_alone() -> None:
    """Importing what it needs must not disturb a run that was seeded before."""
    code = """
import random, numpy as np, timm, torch
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=16, depth=1)
random.seed(0), np.random.seed(0), torch.manual_seed(0)
expected = random.random(), np.random.rand(), torch.rand(()).item()
random.seed(0), np.random.seed(0), torch.manual_seed(0)
import wellposed as wp
wp.diagnose(model, torch.ones(1, 3, 32, 32), what="all")
assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_that_there_is_is_measured_where_there_is_no_attention() -> None:
    case = zoo.BY_NAME["timm mixer"]
    diagnosis = wp.diagnose(case.model(), case.input(), what="all")
    assert diagnosis.about["what"] == [
        "conditioning",
        "tokens",
        "weights",
        "gradients",
        "bounds",
        "jacobian",
        "ntk",
    ]
    assert any("density not measured" in note for note in diagnosis.notes)
    with pytest.raises(ValueError, match="attention"):
        wp.diagnose(case.model(), case.input(), what="density")


def test_bounds_of_parametrized_weights_are_not_measured_and_say_why() -> None:
    case = VIT
    model = case.model()
    spectral_norm(model.blocks[0].attn.qkv)
    diagnosis = wp.diagnose(model, case.input(), what="bounds")
    (told,) = {record.note for record in diagnosis.records if record.block == 0 and "parametr" in record.note}
    assert "got a parametrization; remove it" in told


@pytest.mark.parametrize("where", ["embedding", "pixels"])
def test_a_graying_before_the_blocks_is_seen_where_it_acts(where) -> None:
    case = zoo.BY_NAME["timm vit"]
    model, x = case.model(dtype=torch.float64), case.input(3, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    if where == "embedding":
        handle = model.patch_embed.register_forward_hook(lambda _, __, out: seen.append(out))
        model(x)
        handle.remove()
    else:
        seen.append(x.unfold(2, 8, 8).unfold(3, 8, 8).movedim(1, 3).flatten(1, 2).flatten(2))
    plain = np.median(np.linalg.cond(seen[0].detach().numpy()))
    assert not wp.diagnose(model, x).select("grayed kappa")
    wp.gray_tokens(model, 0.5, "svd", where)
    found = wp.diagnose(model, x)
    before, after = found.select("grayed kappa")
    assert (before.position, after.position) == ("before graying", "after graying")
    assert before.value == pytest.approx(plain, rel=1e-6)
    assert after.value == pytest.approx(plain**0.5, rel=1e-6)
    assert before.images == after.images == 3
    assert before.block is None
    assert "grayed kappa  after graying" in str(found)
