"""What tells a whole checkpoint from a damaged one: a list of its files with their sizes and SHA-256 hashes.

``manifest.json`` is the last file to be written. It ends with a hash of itself.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from wellposed.files import parse_json, read_bytes

NAME = "manifest.json"
FORMAT = "wellposed checkpoint"
VERSION = 1


class DamagedError(Exception):
    """The checkpoint is not whole; the text is the reason."""


def describe(folder: Path, names: Iterable[str], update: int) -> bytes:
    """The content of a manifest for files that are in the folder already."""
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": file_hash(folder / name)} for name in names
    }
    return _sealed({"format": FORMAT, "version": VERSION, "update": update, "files": files})


def verified_files(folder: Path, update: int) -> tuple[str, ...]:
    """The names of a checkpoint's files, all of them whole; else a :class:`DamagedError`."""
    try:
        files = _read(folder / NAME, update)
        for name, facts in files.items():
            _verify(folder / name, facts)
    except FileNotFoundError as error:
        raise DamagedError(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise DamagedError(f"it cannot be read ({error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{NAME} does not have the fields of version {VERSION}") from error
    return tuple(files)


def _read(path: Path, update: int) -> dict[str, dict[str, Any]]:
    try:
        content = read_bytes(path)
        manifest = parse_json(content)
    except ValueError as error:
        raise DamagedError(f"{NAME} cannot be read ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DamagedError(f"{NAME} is not that of a {FORMAT}")
    if manifest.get("version") != VERSION:
        raise DamagedError(
            f"{NAME} has format version {manifest.get('version')}, this release reads {VERSION}"
        )
    manifest.pop("sha256", None)
    if _sealed(manifest) != content:
        raise DamagedError(f"{NAME} was altered")
    if manifest["update"] != update:
        raise DamagedError(f"{NAME} is that of update {manifest['update']}")
    files: dict[str, dict[str, Any]] = manifest["files"]
    if outside := [name for name in files if Path(name).name != name]:
        raise DamagedError(f"{NAME} lists {outside[0]!r}, which is not a file in this folder")
    return files


def _verify(path: Path, facts: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != facts["size"]:
        raise DamagedError(f"{path.name} has {size:,} bytes, {NAME} says {facts['size']:,}")
    if file_hash(path) != facts["sha256"]:
        raise DamagedError(f"the content of {path.name} is not what {NAME} says")
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise DamagedError(f"{path.name} is not in the safetensors format ({error})") from error


def file_hash(path: Path) -> str:
    """SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sealed(manifest: dict[str, Any]) -> bytes:
    """As text that has one spelling only, so that no byte of it can change unseen."""
    seal = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": seal}, indent=1) + "\n").encode()
