"""Two short runs that the studies' measurements are tried on."""

from pathlib import Path

import pytest

import short_runs


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain run with its checkpoints of 12 updates."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    short_runs.run(folder, checkpoint_every=4, keep=10, lr=3e-3)
    return folder


@pytest.fixture(scope="session")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edited") / "run"
    edits = {"graying": "dct", "eps": 0.9, "eps_end": 0.5, "broadcast": "cb_s", "remove_skips": "ffn"}
    short_runs.run(folder, init="xavier", **edits)
    return folder
