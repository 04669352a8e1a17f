"""Every Python block of the README and the docs runs."""

import re
import sys
from pathlib import Path

import pytest

import own_model
from wellposed.anatomy.families import BLOCKS, EMBEDDINGS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
CODE = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.fixture
def my_model(monkeypatch):
    """The docs import the reader's own model by this name."""
    own_model.MyBlock, own_model.MyModel = own_model.OwnBlock, own_model.OwnModel
    own_model.MyPatches = own_model.OwnPatches
    monkeypatch.setitem(sys.modules, "my_model", own_model)
    blocks, embeddings = dict(BLOCKS), dict(EMBEDDINGS)
    yield
    for table, before in ((BLOCKS, blocks), (EMBEDDINGS, embeddings)):
        table.clear()
        table.update(before)


@pytest.mark.usefixtures("my_model")
@pytest.mark.parametrize("code", CODE)
def test_block_runs(code: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "<documentation>", "exec"), {"__name__": "documentation"})


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
