"""What is recorded about the machine and the code."""

import json
import subprocess
import sys

import pytest
import timm
import torch

from wellposed import environment as module
from wellposed.environment import command_line, environment, without_secrets


def git(folder, *arguments) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_what_it_holds(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["wellposed", "train", "--hub-token", "abc"])
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = environment()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["timm"] == timm.__version__
    assert {"wellposed", "accelerate", "numpy"} <= found["packages"].keys()
    assert found["processes"] == 4
    assert found["cpu_cores_usable"] >= 1
    assert found["cpu"]
    assert found["command"] == ["wellposed", "train", "--hub-token", "[hidden]"]
    assert found["time"].endswith("+00:00")


def test_the_commit_of_the_working_folder(tmp_path, monkeypatch) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "first")
    monkeypatch.chdir(tmp_path)
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert environment()["git"] == {"commit": commit, "changed": False}
    (tmp_path / "a").write_text("2")
    assert environment()["git"] == {"commit": commit, "changed": True}


def test_without_a_repository_or_git(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert environment()["git"] is None
    monkeypatch.setenv("PATH", "")
    assert environment()["git"] is None


def test_a_git_that_hangs(tmp_path, monkeypatch) -> None:
    def hangs(*arguments, timeout, **options):
        raise subprocess.TimeoutExpired("git", timeout)

    monkeypatch.setattr(module.subprocess, "run", hangs)
    assert environment()["git"] is None


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--token", "abc", "--lr", "1"], ["--token", "[hidden]", "--lr", "1"]),
        (["--wandb-api-key=abc"], ["--wandb-api-key=[hidden]"]),
        (["--PASSWORD", "abc"], ["--PASSWORD", "[hidden]"]),
        (["data=https://me:pw@host/x"], ["data=https://[hidden]@host/x"]),
        (["hf:name?token=abc&rev=1"], ["hf:name?token=[hidden]&rev=1"]),
        (["--model-option", "note=hf_" + "a" * 30], ["--model-option", "note=[hidden]"]),
        (["AWS_SECRET_ACCESS_KEY=abc"], ["AWS_SECRET_ACCESS_KEY=[hidden]"]),
        # What only looks a little like one is kept: a command must stay one that can be run again.
        (
            ["--gray-where", "tokens", "--data", "key/value"],
            ["--gray-where", "tokens", "--data", "key/value"],
        ),
        (["--data", "cifar10:DIR", "--keep", "3"], ["--data", "cifar10:DIR", "--keep", "3"]),
        (["out@host"], ["out@host"]),
    ],
)
def test_secrets_are_hidden(arguments, shown) -> None:
    assert command_line(arguments) == shown


def test_text_without_secrets_is_unchanged() -> None:
    text = "wds:https://host/{000..999}.tar, monkey=1, keyboard: 2"
    assert without_secrets(text) == text
