"""Runs of seconds: a ViT of two blocks on some of the digits."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from wellposed.train import Recipe, Result, fit
from wellposed.train.reporter import Reporter

TINY = {"depth": 2, "embed_dim": 32, "num_heads": 2}


def recipe(**fields: Any) -> Recipe:
    """12 updates of 16 images in 3 epochs unless ``fields`` say otherwise."""
    usual: dict[str, Any] = {
        "limit": 64,
        "batch_size": 16,
        "epochs": 3,
        "model_options": TINY,
        "trackers": (),
        "monitor_every": 0,
        "log_every": 2,
        "device": "cpu",
    }
    return Recipe.from_mapping(usual | fields)


def run(folder: Path, *, overwrite: bool = False, **fields: Any) -> Result:
    return fit(recipe(**fields), out=folder, overwrite=overwrite, quiet=True)


def weights(folder: Path) -> dict[str, Tensor]:
    """Of the newest checkpoint: model, optimizer and, if there is one, the average."""
    newest = max((folder / "checkpoints").glob("update-*"))
    return {
        f"{file.stem}/{name}": value
        for file in newest.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def assert_bitwise(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(got[name], expected[name])]
    assert not different


def signal_at(monkeypatch: Any, update: int, number: signal.Signals) -> None:
    """Send a signal to this process once, after so many updates."""
    advance, sent = Reporter.advance, []

    def advancing(self: Reporter, done: int) -> None:
        advance(self, done)
        if done == update and not sent:
            sent.append(done)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Reporter, "advance", advancing)
