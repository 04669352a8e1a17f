"""How the matrix of versions is counted, and that what the docs say of it is what was measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import badges
import matrix

TESTS = """
import pytest, wellposed
pytestmark = pytest.mark.libraries("timm")
def test_passed(): pass
def test_refused(): raise wellposed.SeamError("a newer source")
def test_failed(): raise TypeError("in the forward")
def test_skipped(): pytest.skip("no GPU")
@pytest.fixture
def model(): raise wellposed.SeamError("a newer source")
@pytest.mark.libraries("transformers")
def test_refused_in_set_up(model): pass
@pytest.mark.libraries("transformers")
def test_refusal_that_does_not_come():
    with pytest.raises(wellposed.SeamError): pass
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_outcomes_are_counted_by_library(tmp_path: Path, workers: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = libraries(name)\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("def test_of_none(): pass\n")
    out = tmp_path / "outcomes.jsonl"
    asked = ["-n", workers, "-p", "outcomes", "--outcomes", str(out), "-p", "no:cacheprovider", str(tmp_path)]
    paths = os.pathsep.join(str(matrix.ROOT / name) for name in ("src", "tools"))
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", *asked]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    counts = matrix.counted(out)
    versions = {name: counts[name].pop("version") for name in counts}
    assert versions == {
        name: matrix.installed(name) for name in ("timm", "transformers", "torchvision", "torch")
    }
    assert counts["timm"] == {"passed": 1, "refused": 1, "failed": 1}
    assert counts["transformers"] == {"passed": 0, "refused": 1, "failed": 1}
    assert counts["torch"] == {"passed": 0, "refused": 0, "failed": 0}


def test_the_page_says_what_was_measured() -> None:
    result = json.loads(matrix.RESULT.read_text(encoding="utf-8"))
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert page.count(matrix.START) == page.count(matrix.END) == 1
    assert matrix.with_section(page, matrix.page_section(result)) == page, "make matrix writes it"


def test_the_badges_say_it_too() -> None:
    written = {file.name: file.read_text(encoding="utf-8") for file in badges.FOLDER.iterdir()}
    assert written == badges.badges(), "python tools/badges.py writes them"
    readme = (badges.ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"docs/images/badges/{name})" in readme for name in written)


def test_the_oldest_versions_measured_are_those_of_the_ranges() -> None:
    measured = json.loads(matrix.RESULT.read_text(encoding="utf-8"))["columns"]["oldest"]
    for name, bound in matrix.oldest().items():
        if name in measured:
            assert Version(measured[name]["version"]) == Version(bound), f"{name}: make matrix"
