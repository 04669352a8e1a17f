"""Every number of the page is one of the records, and every name is text."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import report_material as make
from wellposed.probes.diagnosis import Diagnosis
from wellposed.records import Record
from wellposed.report import LIMIT, read_data, read_material, report_page
from wellposed.report.charts import Budget, Section, pack, picked, thin, unpacked
from wellposed.report.heat_maps import conditioning_section, density_section
from wellposed.report.material import Subject
from wellposed.report.page import LIBRARIES
from wellposed.stats import one_sample
from wellposed.train import Recipe
from wellposed.train.reporter import Reporter

STUDIES = sorted(path.parent for path in (Path(__file__).parents[2] / "studies").glob("*/*/records.jsonl"))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Two seeds of a plain run, one with graying, a diagnosis."""
    for seed in (0, 1):
        make.write_run(tmp_path / f"plain{seed}", seed=seed)
    make.write_run(tmp_path / "grayed", recipe='graying = "dct"\neps = 0.95\n')
    Diagnosis(tuple(make.records()), {"model": "vit", "images": 4}).save(tmp_path / "diagnosed")
    return [tmp_path / name for name in ("plain0", "plain1", "grayed", "diagnosed")]


def test_every_plotted_number_is_a_record(paths: list[Path]) -> None:
    page = report_page(read_material(paths))
    data = read_data(page)
    records = make.records()
    shown = [row for row in data["conditioning"] if row["run"] == "diagnosed"]
    kappas = {(r.block, r.position): r for r in records if r.measure == "kappa"}
    assert len(shown) == len(kappas)
    for row in shown:
        record = kappas[row["block"], row["position"]]
        assert (row["kappa"], row["ln_kappa"]) == (record.value, record.log)
        assert (row["low"], row["high"]) == (record.low, record.high)
    entropies = {(r.block, r.head): r.value for r in records if r.measure == "entropy"}
    for row in data["density"]:
        if row["run"] == "diagnosed":
            assert (
                row["entropy"] == entropies[row["block"], None if row["head"] == "all" else int(row["head"])]
            )
    bounds = {r.block: r for r in records if r.verdicts}
    assert {row["block"]: (row["measured"], row["bound"]) for row in data["bounds"]} == {
        block: (r.value, r.bound) for block, r in bounds.items()
    }
    ranks = {(r.block, r.position): r.value for r in records if r.measure == "effective rank"}
    for row in data["rest"]:
        if row["measure"] == "effective rank":
            assert row["value"] == ranks[row["block"], row["position"]]


def test_spectra_are_those_of_the_records(paths: list[Path]) -> None:
    page = report_page(read_material(paths))
    found = re.search(r"id='report-data'>(.*?)</script>", page, re.DOTALL)
    assert found
    section = next(each for each in json.loads(found[1]) if each["id"] == "conditioning")
    spectra = section["extra"]["spectra"]
    curves = {(r.block, r.position): r.curve for r in make.records() if r.measure == "spectrum"}
    for row in read_data(page)["conditioning"]:
        if row["run"] != "diagnosed":
            assert row["spectrum"] is None
            continue
        curve = curves[row["block"], row["position"]]
        assert tuple(spectra[row["spectrum"]]["value"]) == curve
        assert spectra[row["spectrum"]]["index"] == list(range(1, 17))


def test_jacobian_spectra_are_those_of_the_records(paths: list[Path]) -> None:
    rows = read_data(report_page(read_material(paths)))["jacobian"]
    curves = {
        f"block {r.block}, {r.position}": r.curve for r in make.records() if r.measure == "jacobian kappa"
    }
    assert {row["panel"] for row in rows} == curves.keys()
    for panel, curve in curves.items():
        shown = [row for row in rows if row["panel"] == panel]
        assert len(shown) == 64  # of 90
        for row in shown:
            assert row["value"] == curve[round(row["share"] * 89)] / curve[0]


def test_training_curves_are_those_of_the_run(tmp_path: Path) -> None:
    lines = make.write_run(tmp_path / "run", epochs=4)
    data = read_data(report_page(read_material([tmp_path / "run"])))["training"]
    of = {
        number: [row for row in data if row["number"] == number] for number in {row["number"] for row in data}
    }
    for number, event, key in (
        ("training loss", "train", "loss"),
        ("test loss", "test", "loss"),
        ("test accuracy", "test", "accuracy"),
        ("kappa attention.branch, worst block", "monitor", "kappa/attention.branch/worst"),
        ("entropy, mean", "monitor", "entropy/mean"),
    ):
        expected = [(line["update"], line[key]) for line in lines if line["event"] == event]
        assert [(row["update"], row["value"]) for row in of[number]] == expected
        assert all(row["epoch"] == pytest.approx(row["update"] / 10) for row in of[number])


def test_side_by_side_has_means_and_deviations(paths: list[Path]) -> None:
    rows = {row["name"]: row for row in read_data(report_page(read_material(paths)))["runs"]}
    plain = rows["no edits"]
    last = [90 - 100 / 30, 91 - 100 / 30]
    assert plain["n"] == 2
    assert plain["accuracy"] == pytest.approx(sum(last) / 2)
    assert plain["accuracy_deviation"] == pytest.approx(1 / math.sqrt(2))
    assert rows["grayed"]["edits"] == "DCT graying of the embedding, eps 0.95"
    assert rows["grayed"]["n"] == 1
    assert rows["grayed"]["accuracy_deviation"] is None
    assert rows["diagnosed"]["accuracy"] is None
    assert rows["diagnosed"]["ln_kappa"] == math.log(1018)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ((), "running or killed at update 20"),
        (("terminated", "note"), "stopped by a signal at update 20"),
        (("nonfinite", "warning", "checkpoint", "note"), "stopped by a loss that is not finite at update 20"),
        (("error",), "stopped by an error at update 20"),
    ],
)
def test_a_run_that_is_not_finished_counts_in_no_mean(
    tmp_path: Path, end: tuple[str, ...], said: str
) -> None:
    for seed in (0, 1):
        make.write_run(tmp_path / f"plain{seed}", seed=seed)
        make.write_run(tmp_path / f"grayed{seed}", seed=seed, recipe='graying = "dct"\n')
    make.write_run(tmp_path / "plain2", seed=2, per_epoch=2, end=())
    stopped = make.write_run(tmp_path / "plain3", seed=3, epochs=2, end=end)
    (tmp_path / "plain3" / "recipe.toml").write_text((tmp_path / "plain0" / "recipe.toml").read_text())
    page = report_page(read_material([tmp_path]))
    rows = {row["name"]: row for row in read_data(page)["runs"]}
    whole, part = rows["no edits"], rows["plain3 (not finished)"]
    assert (whole["n"], whole["state"]) == (2, "")
    assert whole["accuracy"] == pytest.approx(90.5 - 100 / 30)
    assert whole["accuracy_deviation"] == pytest.approx(1 / math.sqrt(2))
    last = next(line for line in reversed(stopped) if line["event"] == "test")
    assert (part["n"], part["accuracy"]) == (0, 100 * last["accuracy"])
    assert part["state"] == f"not finished: {said}"
    assert "plain3 (not finished)" in {row["run"] for row in read_data(page)["training"]}
    text = _text(page)
    assert "6 runs, 2 not finished" in text
    assert "2 runs are not finished and counted in no mean" in text
    difference = rows["DCT graying of the embedding"]
    assert (difference["n"], difference["difference"], difference["verdict"]) == (2, 0.0, "undecided")


def test_a_variant_of_which_nothing_is_finished_is_shown(tmp_path: Path) -> None:
    make.write_run(tmp_path / "plain")
    make.write_run(tmp_path / "grayed", recipe='graying = "dct"\n', end=())
    page = report_page(read_material([tmp_path]))
    rows = {row["name"]: row for row in read_data(page)["runs"]}
    assert {name: row["n"] for name, row in rows.items()} == {"plain": 1, "grayed (not finished)": 0}
    assert "difference" not in read_data(page)["runs"][0]
    assert "Compared with" not in _text(page)
    assert "1 run did not finish and counts in no mean" in _text(page)


def test_a_run_that_has_collapsed_counts_and_is_marked(tmp_path: Path) -> None:
    make.write_run(tmp_path / "plain0")
    make.write_run(tmp_path / "plain1", seed=1, end=("collapsed", "warning", "finished"))
    page = report_page(read_material([tmp_path]))
    (row,) = read_data(page)["runs"]
    assert (row["n"], row["state"]) == (2, "1 of 2 collapsed")
    assert row["accuracy"] == pytest.approx(90.5 - 100 / 30)
    assert {row["run"] for row in read_data(page)["training"]} == {"plain0", "plain1 (collapsed)"}
    states = {row["run"]: row["value"] for row in read_data(page)["provenance"] if row["field"] == "state"}
    assert states == {"plain0": "finished", "plain1 (collapsed)": "finished, collapsed"}


def test_runs_that_are_all_finished_have_no_column_of_states(paths: list[Path]) -> None:
    page = report_page(read_material(paths))
    assert all("state" not in row for row in read_data(page)["runs"])
    assert "not finished" not in _text(page)


def test_the_top_names_the_worst_place_and_the_change(paths: list[Path]) -> None:
    """One run is held against one of the same seed, and decides nothing."""
    page = report_page(read_material(paths))
    text = _text(page)
    assert "Whether accuracy changes with grayed is undecided: one run decides nothing." in text
    assert "diagnosed block 1, attention.branch 1,018" in text
    assert "grayed undecided +0.0 " in text
    (row,) = (row for row in read_data(page)["runs"] if row["name"] == "grayed")
    assert (row["difference"], row.get("low"), row.get("high")) == (0.0, None, None)
    assert (row["verdict"], row["baseline"]) == ("undecided", "no edits")
    assert text.index("Whether accuracy") < text.index("Worst place") < text.index("Provenance")


def test_runs_of_the_same_seeds_are_compared_seed_by_seed(tmp_path: Path) -> None:
    """Seeds differ by a point, graying takes from each about as much, CB all of it from one."""
    for seed in range(3):
        make.write_run(tmp_path / f"plain{seed}", seed=seed)
        gray, cb = 7 + seed % 2, (10, 1, 10)[seed]
        make.write_run(tmp_path / f"grayed{seed}", seed=seed, per_epoch=gray, recipe='graying = "dct"\n')
        make.write_run(tmp_path / f"cb{seed}", seed=seed, per_epoch=cb, recipe='broadcast = "cb"\n')
    page = report_page(read_material([tmp_path]))
    rows = {row["name"]: row for row in read_data(page)["runs"]}
    for name, last in (("DCT graying of the embedding", (7, 8, 7)), ("Context Broadcasting", (10, 1, 10))):
        # A run's last accuracy is 0.9 - 1 / updates, and the seed's own point on top.
        expected = one_sample([100 * (1 / 30 - 1 / (3 * per_epoch)) for per_epoch in last])
        found = rows[name]
        assert (found["difference"], found["low"], found["high"]) == pytest.approx(
            (expected.mean, expected.low, expected.high)
        )
    assert rows["DCT graying of the embedding"]["verdict"] == "lower"
    assert rows["Context Broadcasting"]["verdict"] == "undecided"
    assert (
        "Compared with no edits, accuracy is lower with DCT graying of the embedding; the other difference "
        "is undecided."
    ) in _text(page)


def test_hostile_names_are_text(tmp_path: Path) -> None:
    name = make.HOSTILE
    about = {"model": name, "images": 4, "edits": [f"gray_tokens {name}"], "notes": [name], "weights": name}
    Diagnosis(tuple(make.records()), about).to_json(tmp_path / "one.json")
    make.write_run(tmp_path / make.HOSTILE_FOLDER, data=name)
    page = report_page(read_material([tmp_path / "one.json", tmp_path / make.HOSTILE_FOLDER]), title=name)
    seen = _Elements()
    seen.feed(page)
    assert page.lower().count("</script>") == 5  # the data, three libraries, ours
    assert not [attributes for tag, attributes in seen.found if tag == "img"]
    assert "onerror" not in {name for _, attributes in seen.found for name, _ in attributes}
    assert any(row["value"] == name for row in read_data(page)["provenance"])


def test_policy_lets_nothing_in_or_out(paths: list[Path]) -> None:
    page = report_page(read_material(paths[:1]))
    policy = re.search(r"Content-Security-Policy' content=\"([^\"]+)\"", page)
    assert policy
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy[1]
    assert policy[1].count("sha256-") == len(LIBRARIES) + 1
    seen = _Elements()
    seen.feed(page)
    outside = [
        (tag, value)
        for tag, attributes in seen.found
        for name, value in attributes
        if name in ("src", "href") and value and not value.startswith(("#", "data:"))
    ]
    assert outside == []


def test_sections_without_records_are_named_with_a_remedy(tmp_path: Path) -> None:
    make.write_run(tmp_path / "run")
    page = report_page(read_material([tmp_path / "run"]))
    assert "bounds" not in read_data(page)
    text = _text(page)
    assert "Measured against bound: wellposed diagnose MODEL --images DIR --what bounds --out DIR" in text
    Diagnosis(tuple(make.records()), {"model": "vit"}).to_json(tmp_path / "d.json")
    alone = report_page(read_material([tmp_path / "d.json"]))
    assert "training" not in read_data(alone)
    assert "Training: wellposed train" in _text(alone)


def test_a_long_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    for seed in range(3):
        make.write_run(tmp_path / "sweep" / f"seed{seed}", seed=seed, epochs=300, per_epoch=20, blocks=12)
    page = report_page(read_material([tmp_path / "sweep"]))
    assert len(page.encode()) < LIMIT
    assert re.search(r"[\d,]+ of [\d,]+ points are drawn", _text(page))
    rows = [row for row in read_data(page)["training"] if row["number"] == "training loss"]
    lines = [json.loads(line) for line in (tmp_path / "sweep/seed0/run.jsonl").read_text().splitlines()]
    losses = {line["update"]: line["loss"] for line in lines if line["event"] == "train"}
    shown = [row for row in rows if row["run"] == "seed0"]
    assert len(shown) < len(losses) / 5
    assert all(row["value"] == losses[row["update"]] for row in shown)
    values = [row["value"] for row in shown]
    assert (min(values), max(values)) == (min(losses.values()), max(losses.values()))


BRIEF = ("graying_controls", "mean_and_difference", "remedies")
"""Studies with which all of them are too many for one page with every run."""


def _kappas(subjects: Iterable[Subject]) -> list[float]:
    return [
        record.value
        for subject in subjects
        for record in subject.select("kappa")
        if record.block is not None and record.head is None and record.value
    ]


def test_a_thousand_runs_fit_into_one_page() -> None:
    material = read_material([each for each in STUDIES if each.parent.name not in BRIEF])
    page = report_page(material)
    assert len(material.subjects) > 1000
    assert len(page.encode()) <= LIMIT
    kappas = _kappas(material.subjects)
    rows = read_data(page)["conditioning"]
    assert [row["kappa"] for row in rows] == kappas
    assert [row["ln_kappa"] for row in rows] == list(map(math.log, kappas))


def test_all_studies_of_the_repository_fit_into_one_page_by_a_run_of_each_variant() -> None:
    material = read_material(STUDIES)
    page = report_page(material)
    assert len(page.encode()) <= LIMIT
    assert "Of each variant one run is in this section" in _text(page)
    shown = Counter(row["kappa"] for row in read_data(page)["conditioning"])
    assert shown
    assert shown <= Counter(_kappas(material.subjects))


def test_where_nothing_else_is_left_one_run_of_a_variant_is_shown(tmp_path: Path) -> None:
    for seed in range(3):
        make.write_run(tmp_path / f"plain{seed}", seed=seed, end=("finished",) if seed else ())
        make.write_run(tmp_path / f"grayed{seed}", seed=seed, recipe='graying = "dct"\n')
    material = read_material([tmp_path])
    whole = report_page(material)
    small = report_page(material, limit=len(whole.encode()) - 4000)
    data = read_data(small)
    shown = {"plain1", "grayed0"}  # plain0 is not finished
    assert {row["run"] for row in data["conditioning"]} == {row["run"] for row in data["training"]} == shown
    assert data["runs"] == read_data(whole)["runs"]
    assert _text(small).count("Of each variant one run is in this section") == 3
    assert "one run is in this section" not in _text(whole)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [None] * 5,
        [1.5, 1.5, 1.5, 1.5, 2, None, None, None, None],
        [0, 1, 2, 3],
        ["a", "a", "a", "a", "b", ""],
        ["a", None, None, None, None, None, "a"],
    ],
)
def test_a_packed_column_is_as_it_was(values: list[Any]) -> None:
    told = pack(values)
    assert unpacked([{"key": "x", **told}]) == {"x": values}
    assert len(json.dumps(told.get("repeats", []))) <= len(json.dumps(values))


def test_a_page_that_cannot_be_small_enough_is_an_error(paths: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"at most 700,000 bytes.*report fewer"):
        report_page(read_material(paths), limit=700_000)


def test_thinning_keeps_ends_and_extremes() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).tolist()
    kept = thin(values, 50)
    assert len(kept) <= 50
    assert (kept[0].place, kept[-1].place) == (0, 999)
    assert {min(values), max(values)} <= {point.value for point in kept}
    assert all(values[point.place] == point.value for point in kept)
    assert [place for place, _ in picked(values, 10)] == sorted({round(i * 999 / 9) for i in range(10)})


class _Elements(HTMLParser):
    """All start tags."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, str | None]]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))


def _text(page: str) -> str:
    """What a reader sees without JavaScript, on one line."""
    body = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    words = re.sub(r"<[^>]+>", "", re.sub(r"</(p|li|h\d|ul|td)>", " ", body))
    return re.sub(r"\s+", " ", words).replace("&#x27;", "'").replace("&lt;", "<").replace("&amp;", "&")


def bounded(*bounds: tuple[int, str], others: float = 20.0) -> list[Record]:
    """Kappa of two blocks, at some places a lower bound that is the same everywhere."""
    places = [(block, position) for block in (0, 1) for position in make.POSITIONS if "skip" not in position]
    return [
        Record(
            measure="kappa",
            value=9.88e6 + block if (block, position) in bounds else others + block,
            status="at least" if (block, position) in bounds else "ok",
            block=block,
            position=position,
            images=4,
        )
        for block, position in places
    ]


def of_diagnosis(tmp_path: Path, records: list[Record]) -> str:
    Diagnosis(tuple(records), {"model": "vit", "images": 4}).save(tmp_path / "diagnosed")
    return report_page(read_material([tmp_path / "diagnosed"]))


def test_bounds_are_not_ranked(tmp_path: Path) -> None:
    page = of_diagnosis(tmp_path, bounded((0, "input"), (1, "ffn.branch")))
    assert "In diagnosed kappa exceeds float32 resolution at 2 of 10 places." in _text(page)
    assert "input a bound ≥ 9.88e6 attention.branch block 1 21" in _text(page)
    (row,) = read_data(page)["runs"]
    assert (row["bound"], row["place"]) == ("lower bound", "one of 2, which are bounds")


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ([], "attention's output is about as well conditioned as the FFN's"),
        ([(0, "attention.branch")], "attention's output is at least 703 times worse conditioned"),
        ([(0, "attention.branch"), (1, "ffn.branch")], None),
    ],
)
def test_no_ratio_is_made_of_two_bounds(
    tmp_path: Path, bounds: list[tuple[int, str]], said: str | None
) -> None:
    page = _text(of_diagnosis(tmp_path, bounded(*bounds)))
    assert said in page if said else "conditioned than" not in page


def test_the_monitor_of_a_run_says_bound_on_its_page_and_in_its_table(tmp_path: Path) -> None:
    recipe = Recipe(model="test_vit")
    with Reporter(tmp_path / "run", recipe, updates=20, start=0, main=True, quiet=True) as tell:
        tell.measured(0, {"kappa/0/input": 5.0, "kappa/input/worst": 5.0})
        tell.measured(
            20,
            {"kappa/0/input": 9.88e6, "kappa/0/input/at_least": 1.0}
            | {"kappa/input/worst": 9.88e6, "kappa/input/worst/at_least": 1.0},
        )
        tell.event("finished", update=20)
        result = tell.write_result()
        assert "5 -> ≥ 9.88e6 (worst block)" in str(tell.table())
    assert result["kappa"] == {"input": {"first": 5.0, "last": 9.88e6, "last/at_least": 1.0}}
    page = report_page(read_material([tmp_path / "run"]))
    data = read_data(page)
    assert [(row["value"], row["status"]) for row in data["training"]] == [(5.0, "ok"), (9.88e6, "at least")]
    assert [(row["kappa"], row["status"]) for row in data["conditioning"]] == [(9.88e6, "at least")]
    assert "what enters block 0: kappa is at least 9.88e6" in _text(page)


def advice(page: str) -> str:
    return _text(page).partition("What to try next")[2].partition("Summary")[0]


def entropies(value: float) -> list[Record]:
    return [Record(measure="entropy", value=value, block=block, images=4) for block in (0, 1)]


def test_the_advice_follows_the_evidence(tmp_path: Path) -> None:
    """Graying acts on what enters a block; CB takes trained weights apart, and random ones need no advice."""

    def page(records: list[Record], **about: Any) -> str:
        Diagnosis(tuple(records), {"model": "vit", "images": 4, **about}).save(tmp_path / "one")
        return advice(report_page(read_material([tmp_path / "one"])))

    attention_alone = [r for r in bounded() if r.position != "attention.branch"]
    attention_alone.append(Record(measure="kappa", value=1e5, block=0, position="attention.branch"))
    assert page(attention_alone).startswith(" Nothing in these records asks for an edit")
    assert "gray" not in page(attention_alone)
    assert "gray_tokens eps=0.7" in page(bounded(others=2e3))
    assert "wp.gray_tokens" not in page(bounded(others=2e3))
    dense = entropies(0.98)
    assert "scaled=True, init=" in page(dense)
    assert "broadcast" not in page(dense, random=True)
    assert "wp.broadcast_context(model)" not in page(dense)


def test_heat_maps_do_not_stretch_what_is_equal(tmp_path: Path) -> None:
    records = [*bounded(), *(replace(r, value=0.9994 + 0.0001 * r.block) for r in entropies(0.9))]
    material = read_material([tmp_path / "diagnosed"]) if of_diagnosis(tmp_path, records) else None
    assert material is not None
    for section, scale in ((conditioning_section, 1.0), (density_section, 0.1)):
        made = section(material, Budget())
        assert isinstance(made, Section)
        low, high = made.chart.spec["layer"][0]["encoding"]["color"]["scale"]["domain"]
        assert high - low == pytest.approx(scale)


def test_jacobians_without_a_spectrum_have_a_table(tmp_path: Path) -> None:
    """Those of a ViT at 224 pixels are too large; the page named the command that had made them."""
    jacobian = Record(measure="jacobian kappa", value=9e3, block=3, position="attention", images=1)
    page = of_diagnosis(tmp_path, [*bounded(), jacobian])
    assert "--what jacobian" not in page.partition("id='missing'")[2].partition("</section>")[0]
    (row,) = read_data(page)["jacobian"]
    assert (row["block"], row["position"], row["value"]) == (3, "attention", 9e3)


def test_line_separators_in_names_do_not_reach_the_charts(tmp_path: Path) -> None:
    """Vega's expressions hold names as texts, and a U+2028 ends the line in the middle of one."""
    make.write_run(tmp_path / "a\u2028b\u2029c")
    page = report_page(read_material([tmp_path / "a\u2028b\u2029c"]))
    found = re.search(r"id='report-data'>(.*?)</script>", page, re.DOTALL)
    assert found
    for separator in ("\u2028", "\u2029", "\\u2028", "\\u2029"):
        assert separator not in found[1]
    assert {row["run"] for row in read_data(page)["training"]} == {"a b c"}
