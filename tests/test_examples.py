"""Every script in examples/ runs on tiny settings, and says what it promises."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from clean_tables import restored_tables
from docs_blocks import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
_TINY = ["--epochs", "1", "--depth", "1"]

CASES: dict[str, tuple[list[str], list[str]]] = {
    "plain_loop": (_TINY, ["TokenGraying(eps=0.7", "epoch 1: loss"]),
    "accelerate_timm": (_TINY, ["step 0: worst kappa of attention", "epoch 1: loss"]),
    "lightning_callback": (_TINY, ["'kappa/attention.branch/worst'"]),
    "transformers_trainer": (_TINY, ["step 20: worst kappa of attention"]),
    "diagnose_checkpoint": (_TINY, ["untrained", "worst: blocks.0, kappa"]),
    "monitor_training": (["--epochs", "1"], ["with skips, step 0", "without skips, step 0"]),
    "own_model": ([], ["6 residual adds", "remove_skips attention blocks.0"]),
    "timm_train": (
        ["DATA_DIR", "--model", "vit_small_grayed"],
        ["kappa/attention.branch/worst", "TokenGraying"],
    ),
}
"""Script -> its options, and what its output must hold."""

# What timm's train.py does with a model, as far as it matters here: it stands beside the script.
TRAIN_PY = """
import sys, torch
from timm.models import create_model
size = {"img_size": 32, "patch_size": 8, "depth": 1}
model = create_model(sys.argv[3], pretrained=False, num_classes=3, drop_rate=0.0, **size)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(2, 3, 32, 32)).sum().backward()
optimizer.step()
print(model.patch_embed)
"""


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example_runs(script: Path, tmp_path, monkeypatch, capsys) -> None:
    if script.stem == "lightning_callback":
        pytest.importorskip("lightning")
    options, expected = CASES[script.stem]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    Path("train.py").write_text(TRAIN_PY)
    Path("watched").mkdir()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8) + 9).save("watched/one.png")
    torch.manual_seed(0)
    with restored_tables():
        runpy.run_path(str(script), run_name="__main__")
    output = capsys.readouterr().out
    for text in expected:
        assert text in output, output


def test_every_example_has_a_case_and_is_short() -> None:
    assert {script.stem for script in EXAMPLES} == set(CASES)
    for script in EXAMPLES:
        assert len(script.read_text(encoding="utf-8").splitlines()) < 60, script.name


def test_every_example_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    for script in EXAMPLES:
        assert f"(../examples/{script.name})" in page
