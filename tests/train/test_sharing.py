"""A run on the Hub, with a client that stands in for it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from typer.testing import CliRunner

from wellposed.cli import app
from wellposed.train.export import files_of, push

OF_WEIGHTS = ("README.md", "config.json", "model.safetensors", "recipe.toml")


class Hub:
    """Keeps what it is given, as huggingface_hub's HfApi."""

    def __init__(self, error: Exception | None = None) -> None:
        self.repos: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.error = error

    def create_repo(self, repo: str, *, repo_type: str, private: bool, exist_ok: bool) -> None:
        assert (repo_type, exist_ok) == ("model", True)
        if self.error is not None:
            raise self.error
        self.repos[repo] = private

    def create_commit(self, repo: str, *, operations: list, commit_message: str, repo_type: str):
        assert repo in self.repos
        self.message = commit_message
        self.files = {each.path_in_repo: Path(each.path_or_fileobj).read_bytes() for each in operations}
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo}/commit/1")


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "first"
    for weights in ("best", "last"):
        (folder / weights).mkdir(parents=True)
        for name in OF_WEIGHTS:
            (folder / weights / name).write_text(f"{name} of {weights}")
    for name in ("run.jsonl", "result.json", "environment.json", "recipe.toml"):
        (folder / name).write_text(f"{name} of the run")
    (folder / "checkpoints/update-00000002").mkdir(parents=True)
    (folder / "checkpoints/update-00000002/state.json").write_text("{}")
    return folder


@pytest.mark.parametrize("weights", ["best", "last"])
def test_weights_card_and_records_go_in_one_commit(run: Path, weights) -> None:
    hub = Hub()
    address = push(run, "me/mine", weights=weights, private=True, api=hub)
    assert address == "https://huggingface.co/me/mine/commit/1"
    assert hub.repos == {"me/mine": True}
    assert hub.files == {name: f"{name} of {weights}".encode() for name in OF_WEIGHTS} | {
        name: f"{name} of the run".encode() for name in ("run.jsonl", "result.json", "environment.json")
    }
    assert hub.message == f"The {weights} weights of first, with their run"


def test_a_run_without_weights_is_refused(run: Path, tmp_path) -> None:
    (run / "best/model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"expected the folder of a run .* has no model\.safetensors; finish"
    ):
        files_of(run)
    with pytest.raises(ValueError, match=r"there is no folder .*none.best"):
        push(tmp_path / "none", "me/mine", api=Hub())


def test_the_hubs_refusals_say_what_to_do(run: Path) -> None:
    response = SimpleNamespace(headers={}, request=None)
    refused = Hub(HfHubHTTPError("401 Unauthorized.", response=response))
    with pytest.raises(ConnectionError, match=r"\(401 Unauthorized\); `hf auth login` stores a token"):
        push(run, "me/mine", api=refused)
    without_network = HfHubHTTPError.__bases__[0]("name not known")
    with pytest.raises(ConnectionError, match=r"the Hub did not take me/mine \(name not known\)"):
        push(run, "me/mine", api=Hub(without_network))
    with pytest.raises(ValueError, match=r"expected a repository such as USER/NAME, got 'a/b/c'"):
        push(run, "a/b/c", api=Hub(HFValidationError("no")))


def test_the_command(run: Path, monkeypatch) -> None:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    dry = CliRunner().invoke(app, ["push", str(run), "me/mine", "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "model.safetensors" in dry.output
    assert not hub.repos
    done = CliRunner().invoke(app, ["push", str(run), "me/mine", "--weights", "last"])
    assert done.exit_code == 0, done.output
    assert "https://huggingface.co/me/mine/commit/1" in done.output
    assert hub.files["README.md"] == b"README.md of last"
    bad = CliRunner().invoke(app, ["push", str(run / "best"), "me/mine"])
    assert bad.exit_code == 1
    assert "error: expected the folder of a run" in bad.output
