"""What a run ran on: versions, device, command and code, for the file next to it."""

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("wellposed", "torch", "timm", "accelerate", "numpy", "safetensors", "transformers", "datasets")
HIDDEN = "[hidden]"

_SECRET_NAME = r"[\w.-]*(?:token|secret|passw(?:or)?d|credential|api[_-]?key|access[_-]?key)[\w.-]*"
_SECRETS = (
    # name=value, as an option or in an address
    (re.compile(rf"(?i)({_SECRET_NAME}[=:])[^\s&,;'\"]+"), rf"\1{HIDDEN}"),
    # user:password@host
    (re.compile(r"(?i)([a-z][a-z0-9+.-]*://)[^/\s@]+@"), rf"\1{HIDDEN}@"),
    # tokens that are known by their form: Hugging Face, GitHub, OpenAI's form, AWS
    (re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_\w{16,}|sk-[\w-]{16,}|AKIA[0-9A-Z]{16})\b"), HIDDEN),
)
_SECRET_OPTION = re.compile(rf"(?i)-{{1,2}}{_SECRET_NAME}")


def environment() -> dict[str, Any]:
    """Versions, hardware, processes, command line and commit, as plain values for JSON.

    >>> environment()["python"] == platform.python_version()
    True
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
        "git": _git(Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "cpu": _cpu_model(),
        "cpu_cores": os.cpu_count(),
        "cpu_cores_usable": usable_cores(),
        **_accelerators(),
    }


def command_line(arguments: Sequence[str]) -> list[str]:
    """The arguments of a program without passwords and tokens.

    >>> command_line(["train", "--api-key", "abc", "--token=abc", "--lr", "0.1", "https://me:pw@host/x"])
    ['train', '--api-key', '[hidden]', '--token=[hidden]', '--lr', '0.1', 'https://[hidden]@host/x']
    """
    shown: list[str] = []
    for argument in arguments:
        # `bench graying --tokens` counts tokens of a model.
        follows_name = bool(shown) and shown[-1] != "--tokens" and bool(_SECRET_OPTION.fullmatch(shown[-1]))
        shown.append(HIDDEN if follows_name else without_secrets(argument))
    return shown


def without_secrets(text: str) -> str:
    """A text in which what looks like a password or a token is hidden.

    >>> without_secrets("wds:https://me:pw@host/{0..9}.tar?token=abc&part=1")
    'wds:https://[hidden]@host/{0..9}.tar?token=[hidden]&part=1'
    """
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


def _version(package: str) -> str | None:
    # The module's own, where it is loaded: it may come from a path that no installation knows.
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _accelerators() -> dict[str, Any]:
    import torch

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        processes = torch.distributed.get_world_size()
    found: dict[str, Any] = {"processes": processes, "cuda": torch.version.cuda, "cudnn": None, "devices": []}
    if torch.cuda.is_available():
        found["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit of the folder's repository and whether files differ from it; None without git or repository."""
    commit = _git_output(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git_output(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changed is None else bool(changed)}


def _git_output(folder: Path, *arguments: str) -> str | None:
    # No locks, and no program that the repository's own configuration names.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=10, check=True, text=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
