"""The page in Chromium: it opens, the click and the sort work, nothing leaves it, and names stay text."""

import contextlib
import csv
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import report_material as make
from wellposed.probes.diagnosis import Diagnosis
from wellposed.report import read_data, read_material, report_page
from wellposed.report.variants import by_place

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
)


CELLS = "#conditioning-chart svg .mark-rect.role-mark.child_layer_0_marks path"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    make.write_run(folder / "plain")
    make.write_run(folder / make.HOSTILE_FOLDER, recipe='graying = "dct"\neps = 0.95\n')
    about = {"model": make.HOSTILE, "images": 4, "notes": [make.HOSTILE]}
    Diagnosis(tuple(make.records()), about).to_json(folder / "hostile.json")
    Diagnosis(tuple(make.records(scale=0.5)), {"model": "vit"}).to_json(folder / "second.json")
    paths = [folder / name for name in ("plain", make.HOSTILE_FOLDER, "hostile.json", "second.json")]
    (folder / "report.html").write_text(report_page(read_material(paths)), encoding="utf-8")
    return folder / "report.html"


@contextlib.contextmanager
def opened(browser: Any, report: Path, **options: Any) -> Iterator[Any]:
    """The page, drawn; on the way out no error and no request may have been seen."""
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-ready]", timeout=30_000)
    page.evaluate("document.querySelectorAll('details.part').forEach(part => { part.open = true; })")
    page.wait_for_function(
        "[...document.querySelectorAll('.chart')].every(chart => chart.querySelector('svg'))"
    )
    yield page
    context.close()
    assert said == []
    left = [url for url in asked if not url.startswith(("data:", "blob:")) and url != report.as_uri()]
    assert left == []


def test_it_opens_and_draws(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        for name in ("runs", "conditioning", "density", "bounds", "jacobian", "training"):
            assert page.locator(f"#{name}-chart svg").count() == 1, name
        # Of each of the two diagnoses all, of each of the two runs what the monitor saw.
        assert page.locator(CELLS).count() == 2 * 2 * len(make.POSITIONS) + 2 * 2 * 3
        assert page.locator("#graying-pictures img").count() == 3 * 9  # before, and two for each of four eps
        natural = page.evaluate("[...document.images].map(image => image.naturalWidth)")
        assert set(natural) == {8}


def test_a_click_opens_the_spectrum_of_that_place(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        said = page.locator("#conditioning-said")
        assert said.inner_text().startswith("block 1, attention.branch: kappa")
        page.locator(CELLS).nth(-2 * len(make.POSITIONS)).click()  # the first of the last panel
        playwright.expect(said).to_contain_text("block 0, input: kappa")
        assert "5 in second" in said.inner_text()
        lines = page.locator("#conditioning-spectrum-chart svg .mark-line path")
        assert lines.count() == 2  # one of each diagnosis
        place = page.locator("#conditioning-place")
        place.select_option(label="block 1, ffn.sum")  # the way of a keyboard
        playwright.expect(said).to_contain_text("block 1, ffn.sum: kappa")


@pytest.mark.parametrize("seeds", [3, 4])
def test_a_cell_is_the_median_of_its_variant(browser: Any, tmp_path: Path, seeds: int) -> None:
    """As Python has it, with a lower bound in one run above the others, and in one below them."""
    for seed in range(seeds):
        make.write_run(tmp_path / "runs" / f"plain{seed}", seed=seed)
        known = [r for r in make.records(scale=1.0 + seed**2) if r.measure == "kappa"]
        place = {0: "input", seeds - 1: "ffn.sum"}.get(seed)
        marked = [replace(r, status="at least") if r.position == place else r for r in known]
        Diagnosis(tuple(marked), {"model": "vit"}).to_json(tmp_path / "runs" / f"plain{seed}/diagnosis.json")
    material = read_material([tmp_path / "runs"])
    (tmp_path / "report.html").write_text(report_page(material), encoding="utf-8")
    with opened(browser, tmp_path / "report.html") as page:
        labels = page.locator(CELLS.replace("child_", "")).evaluate_all("all => all.map(e => e.ariaLabel)")
        marks = page.locator("#conditioning-chart svg .role-mark.layer_1_marks text").count()
    found = [dict(part.split(": ") for part in label.split("; ")) for label in labels]
    drawn = {(int(cell["block"]), cell["position"]): float(cell["ln kappa"]) for cell in found}
    expected = by_place(material.subjects)
    assert drawn == pytest.approx({place: log.value for place, log in expected.items()})
    bounds = [position for (_, position), log in expected.items() if log.at_least]
    assert bounds == ["input", "input"]
    assert marks == 2


def test_a_tooltip_tells_the_record(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        page.locator(CELLS).nth(8 - 2 * len(make.POSITIONS)).hover()
        tip = page.locator(".tip")
        playwright.expect(tip).to_be_visible()
        assert tip.locator("dt").all_inner_texts()[:4] == ["block", "module", "position", "kappa"]
        assert tip.locator("dd").all_inner_texts()[:4] == ["1", "blocks.1", "attention.branch", "509"]


def test_a_table_sorts_both_ways(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        page.locator("#conditioning details summary").click()
        head = page.locator("#conditioning-table th", has_text="ln kappa")
        values = "rows => rows.map(row => +row.children[4].title)"
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "ascending"
        kappas = page.locator("#conditioning-table tbody tr").evaluate_all(values)
        assert len(kappas) == 2 * 2 * len(make.POSITIONS) + 2 * 2 * 3
        assert kappas == sorted(kappas)
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "descending"
        kappas = page.locator("#conditioning-table tbody tr").evaluate_all(values)
        assert kappas == sorted(kappas, reverse=True)


def test_hostile_names_are_shown_as_text(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        assert page.evaluate("window.harmed") is None
        assert page.locator("img[src='x']").count() == 0
        cells = page.locator("#provenance-table td bdi").all_inner_texts()
        assert make.HOSTILE in cells
        page.locator("#runs details summary").click()
        page.locator("#runs-table tbody tr").first.wait_for()  # drawn once the browser says that it is open
        assert make.HOSTILE_FOLDER in page.locator("#runs-table td bdi").all_inner_texts()


@pytest.mark.parametrize("kind", ["PNG", "SVG", "CSV"])
def test_charts_can_be_saved(browser: Any, report: Path, tmp_path: Path, kind: str) -> None:
    with opened(browser, report) as page:
        with page.expect_download() as waiting:
            page.locator(f"#conditioning > .tools [data-save={kind}]").click()
        waiting.value.save_as(tmp_path / "saved")
        content = (tmp_path / "saved").read_bytes()
        assert waiting.value.suggested_filename == f"conditioning.{kind.lower()}"
        assert content.startswith({"PNG": b"\x89PNG", "SVG": b"<svg", "CSV": b"run,block,module"}[kind])
        if kind == "CSV":
            assert content.count(b"\r\n") == 1 + 2 * 2 * len(make.POSITIONS) + 2 * 2 * 3
            assert b",1018," in content


def test_the_browser_unpacks_what_python_does(browser: Any, report: Path, tmp_path: Path) -> None:
    with opened(browser, report) as page:
        with page.expect_download() as waiting:
            page.locator("#conditioning > .tools [data-save=CSV]").click()
        waiting.value.save_as(tmp_path / "saved.csv")
    with (tmp_path / "saved.csv").open(newline="", encoding="utf-8") as file:
        saved = list(csv.DictReader(file))
    rows = read_data(report.read_text(encoding="utf-8"))["conditioning"]
    assert len(saved) == len(rows)
    for told, row in zip(saved, rows, strict=True):
        assert (told["run"], told["position"], int(told["block"])) == (
            row["run"],
            row["position"],
            row["block"],
        )
        assert float(told["kappa"]) == row["kappa"]
        assert float(told["ln kappa"]) == pytest.approx(row["ln_kappa"], rel=1e-15)
        assert told["lower quartile"] == ("" if row["low"] is None else f"{row['low']:g}")


def test_light_dark_and_the_phone(browser: Any, report: Path) -> None:
    def ground(page: Any) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    with opened(browser, report, color_scheme="dark", viewport={"width": 390, "height": 800}) as page:
        dark = ground(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.locator("#theme").click()
        light = ground(page)
        assert (dark, light) == ("rgb(20, 23, 29)", "rgb(255, 255, 255)")
        chart = page.locator("#runs-chart svg")
        playwright.expect(chart).to_have_css("background-color", "rgb(255, 255, 255)")


def test_a_keyboard_reaches_what_a_mouse_does(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        page.keyboard.press("Tab")
        playwright.expect(page.locator(".skip")).to_be_focused()
        named = page.evaluate(
            "[...document.querySelectorAll('button, select, [role=img], [role=region]')].every(element => "
            "element.innerText || element.ariaLabel || (element.labels && element.labels.length))"
        )
        assert named
        headings = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => +h.tagName[1])")
        assert headings[0] == 1
        assert all(after - before <= 1 for before, after in itertools.pairwise(headings))
        page.locator("#runs details summary").click()
        captions = page.locator("#runs-table caption")  # drawn once the browser says that it is open
        playwright.expect(captions).to_have_text(["Accuracy by variant. The buttons in the head sort."])
