"""The site builds without a warning, asks no other host for anything, and its links lead somewhere."""

import dataclasses
import doctest
import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs_blocks import ROOT

DOCUMENTED = {
    "wellposed": ("api/wellposed.html", "api/probes.html"),
    "wellposed.nn": ("api/nn.html",),
    "wellposed.nn.functional": ("api/nn.html",),
    "wellposed.linalg": ("api/linalg.html",),
    "wellposed.probes": ("api/probes.html",),
    "wellposed.train": ("api/train.html",),
    "wellposed.report": ("api/report.html",),
    "wellposed.anatomy": ("api/anatomy.html",),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class Page(HTMLParser):
    """What a page loads, where it links to, and its anchors."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.anchors |= {given[name] or "" for name in ("id", "name") if name in given}
        if tag == "a":
            self.links.append(given.get("href") or "")
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given.get("href") or "")
        elif "src" in given:
            self.loads.append(given["src"] or "")


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for file in pages:
        for target in Page(file).loads:
            assert not urlsplit(target).netloc, f"{file.name} loads {target}"
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", text), style.name


def test_links_pictures_and_anchors_exist(site: Path) -> None:
    pages = {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}
    for file, page in pages.items():
        for target in [*page.loads, *page.links]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or not (parts.path or parts.fragment):
                continue
            there = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert there.exists(), f"{file.relative_to(site)}: {target}"
            if parts.fragment and there in pages and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in pages[there].anchors, f"{file.relative_to(site)}: {target}"


def test_results_and_sources_are_in_the_site(site: Path) -> None:
    for file in (ROOT / "results").rglob("*"):
        if file.is_file() and file.suffix != ".md":
            assert (site / file.relative_to(ROOT)).read_bytes() == file.read_bytes()
    graying = (site / "graying.html").read_text(encoding="utf-8")
    assert 'href="results/graying-steps-h200.csv"' in graying
    assert 'src="results/graying-growth-h200.png"' in graying
    tutorial = (site / "tutorial.html").read_text(encoding="utf-8")
    assert "attention.branch" in tutorial.replace("<span", "")
    assert 'href="fix-my-model.html"' in tutorial
    assert "gray_tokens" in (site / "examples" / "plain_loop.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", DOCUMENTED)
def test_every_public_name_is_documented(package: str, site: Path) -> None:
    module = importlib.import_module(package)
    pages = [Page(site / page) for page in DOCUMENTED[package]]
    anchors = {anchor for page in pages for anchor in page.anchors}
    names = {anchor.rpartition(".")[2] for anchor in anchors if anchor.startswith("wellposed.")}
    public = getattr(module, "__all__", ("gray", "broadcast", "DEFAULT_EPS"))
    for name in public:
        if not _is_module(getattr(module, name)):
            assert name in names, f"{package}.{name} is not in {DOCUMENTED[package]}"


def test_every_field_of_a_recipe_is_told(site: Path) -> None:
    from wellposed.train import Recipe

    text = (site / "api" / "train.html").read_text(encoding="utf-8")
    for field in dataclasses.fields(Recipe):
        assert f"<td><code>{field.name}</code></td>" in text


@pytest.mark.parametrize("name", ["docstrings", "recipe_fields", "repository"])
def test_examples_in_the_sites_own_code(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tried = doctest.testmod(module)
    assert tried.attempted > 0
    assert tried.failed == 0


def test_docstrings_are_free_of_sphinx(site: Path) -> None:
    for file in (site / "api").glob("*.html"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r":(func|class|meth|mod|math|data):", text), file.name
        assert ".. " not in re.sub(r"<[^>]+>", "", text).replace("...", ""), file.name


def _is_module(value: object) -> bool:
    return type(value).__name__ == "module"
