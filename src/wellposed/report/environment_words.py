"""Where something ran, as text: from what :func:`wellposed.environment.environment` wrote."""

import shlex
from collections.abc import Mapping
from typing import Any

from wellposed.environment import without_secrets


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def environment_text(values: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text, without what is not known."""
    values = _mapping(values)
    git, packages = (_mapping(values.get(name)) for name in ("git", "packages"))
    commit = git.get("commit")
    changed = " with changes" if git.get("changed") else ""
    command, devices = values.get("command"), values.get("devices")
    told = {
        "command": shlex.join(map(str, command)) if isinstance(command, list) else command,
        "time": values.get("time"),
        "commit": f"{commit}{changed}" if commit else None,
        "python": values.get("python"),
        "platform": values.get("platform"),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "CPU": values.get("cpu"),
        "accelerators": ", ".join(map(str, devices if isinstance(devices, list) else [])),
        "processes": values.get("processes"),
    }
    return {key: without_secrets(str(value)) for key, value in told.items() if value not in (None, "")}
