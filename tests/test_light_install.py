"""The bare wheel, without its extras: edits and diagnoses work, training says what to install."""

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from docs_blocks import blocks

ROOT = Path(__file__).parent.parent
OF_EXTRAS = (
    "accelerate",
    "tensorboard",
    "ray",
    "transformers",
    "datasets",
    "lightning",
    "matplotlib",
    "yaml",
)

pytestmark = pytest.mark.slow

BLOCK = f"""
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OF_EXTRAS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {OF_EXTRAS} else find(name, package)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--quiet", "--wheel-dir", folder]
    subprocess.run([*build, "--build-constraint", ROOT / "constraints.txt"], check=True, timeout=300)
    (made,) = folder.glob("wellposed-*.whl")
    return made


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    folder = wheel.parent / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", folder, wheel]
    subprocess.run(install, check=True, timeout=300)
    return folder


def run(site: Path, code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_wheel_needs_nothing_of_the_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        assert "wellposed/py.typed" in archive.namelist()
    needed = [Requirement(text) for text in metadata.get_all("Requires-Dist", ())]
    base = [each.name for each in needed if each.marker is None]
    assert not set(base) & {*OF_EXTRAS, "pyyaml"}
    assert len(base) == len(set(base))
    assert {"torch", "timm", "safetensors"} <= set(base)


def test_the_first_examples_of_the_readme_run(site: Path, tmp_path: Path) -> None:
    (first,) = [each.python for each in blocks(ROOT / "README.md") if each.python]
    (second, *_) = [each.python for each in blocks(ROOT / "docs" / "quickstart.md") if each.python]
    shown = "import wellposed; print(wellposed.__file__)\n"
    done = run(site, shown + first + second, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))
    assert "gray_tokens" in done.stdout


def test_training_says_what_to_install(site: Path, tmp_path: Path) -> None:
    code = (
        "from wellposed.train import Recipe, fit, open_run\n"
        "try:\n    fit(Recipe())\nexcept ImportError as error:\n    print(error)\n"
    )
    done = run(site, code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pip install 'wellposed[train]'" in done.stdout
