"""A folder of checkpoints, of which the newest whole one can be had at any moment, whatever happened.

::

    folder/update-00001234/model.safetensors       tensors, one file for each of the names given
                           optimizer.safetensors
                           state.json              everything else
                           manifest.json           sizes and hashes, written last

A checkpoint is made under a hidden name and gets its own by one rename, when all of it is on the disk. Old
ones are deleted after that, and get a hidden name before. So what has a checkpoint's name is whole, or was
damaged later, which the manifest shows: it lists the files with their sizes and SHA-256 hashes, and ends with
a hash of itself. Nothing in a checkpoint is ever unpickled. Exported weights are written by the same means.

JSON turns tuples into lists, keys into texts, and has no infinity; what it would change is tagged instead.

>>> encode({"betas": (0.9, 0.999), "best": float("inf")})
{'betas': {'$tuple': [0.9, 0.999]}, 'best': {'$float': 'inf'}}
>>> decode(encode({"betas": (0.9, 0.999), 3: None}))
{'betas': (0.9, 0.999), 3: None}
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from wellposed.files import parse_json, read_bytes

_STATE = "state.json"
_CHECKPOINT = re.compile(r"(?P<replaced>\.replaced-)?update-(?P<update>[0-9]{8,})")
_LEFTOVER = re.compile(r"\.staging-update-[0-9]{8,}-[0-9]+|\.deleted-update-[0-9]{8,}")
_STEM = re.compile(r"[A-Za-z0-9_-]+")
_HEADER_OF_A_TENSOR = 200
"""Bytes besides its content and its name, at most."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. Those before it are as they were."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint; :meth:`Store.newest` gives it."""

    path: Path
    update: int
    state: dict[str, Any]
    stems: tuple[str, ...]

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """Those that were saved under this name, in main memory."""
        if stem not in self.stems:
            raise ValueError(
                f"the checkpoint {self.path} holds {', '.join(self.stems) or 'no tensors'}, not {stem!r}."
            )
        # load_file maps the file; copies do not depend on it, so the checkpoint may be deleted.
        return {name: value.clone() for name, value in load_file(self.path / f"{stem}.safetensors").items()}


class Store:
    """The checkpoints of one run; one process at a time may save.

    Args:
        folder: made when the first one is saved.
        keep: how many to keep.

    ``passed_over`` says, after :meth:`newest`, which damaged ones it did not take, and why.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}.")
        self.folder = Path(folder)
        self.keep = keep
        self.passed_over: list[str] = []

    def save(self, update: int, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
        """Save and return the checkpoint's folder; then delete those beyond ``keep``.

        Args:
            update: how many updates were made. A checkpoint of the same update is replaced.
            files: tensors by name, for each file; ``{"model": ...}`` becomes ``model.safetensors``.
            state: everything else, of plain values; floats, tuples and None come back as they were.
        """
        if update < 0:
            raise ValueError(f"update must be at least 0, got {update}.")
        if wrong := [stem for stem in files if not _STEM.fullmatch(stem)]:
            raise ValueError(f"expected names of letters, digits, - and _ for the files, got {wrong[0]!r}.")
        text = (json.dumps(encode(dict(state)), indent=1, allow_nan=False) + "\n").encode()
        self._refuse_the_past(update)
        needed = len(text) + sum(map(_size, files.values()))
        writing = "its folder"
        staging = self.folder / f".staging-{_name(update)}-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clear_up()
            if shutil.disk_usage(self.folder).free < needed:
                raise OSError(errno.ENOSPC, "there is not enough space")
            staging.mkdir()
            for stem, tensors in files.items():
                writing = f"{stem}.safetensors"
                write_tensors(staging / writing, tensors)
            writing = _STATE
            write_bytes(staging / _STATE, text)
            names = [*(f"{stem}.safetensors" for stem in files), _STATE]
            writing = MANIFEST
            write_bytes(staging / MANIFEST, manifest_text(staging, names, update))
            writing = "its folder"
            sync_folder(staging)
            self._publish(staging, update)
        except OSError as error:
            self._take_back(staging, update)
            raise CheckpointError(self._explain(update, writing, error, needed)) from error
        except BaseException:
            self._take_back(staging, update)
            raise
        self._delete_beyond(update)
        return self.folder / _name(update)

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint, with every byte of it verified.

        None where there is no checkpoint, or none that is whole; ``passed_over`` says which.
        """
        self.passed_over = []
        for update, path in self._candidates():
            try:
                return _open(path, update)
            except DamagedError as reason:
                self.passed_over.append(f"The checkpoint {path} was passed over: {reason}.")
        return None

    def _candidates(self) -> list[tuple[int, Path]]:
        """By update, the newest first; one that was being replaced comes behind what replaces it."""
        found = [(match, self.folder / match.string) for match in self._matches(_CHECKPOINT)]
        found.sort(key=lambda item: (-int(item[0]["update"]), item[0]["replaced"] is not None))
        return [(int(match["update"]), path) for match, path in found if path.is_dir()]

    def _matches(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        names = sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []
        return [match for name in names if (match := pattern.fullmatch(name))]

    def _refuse_the_past(self, update: int) -> None:
        """A later checkpoint that is whole would be taken for the newest at the next start."""
        for later, path in self._candidates():
            if later <= update:
                break
            try:
                _open(path, later)
            except DamagedError:
                continue
            raise ValueError(
                f"expected an update of at least {later}, that of {path}, got {update}; "
                "resume from that checkpoint, or start another run in another folder."
            )

    def _clear_up(self) -> None:
        """Away with what a killed process left. One that it was about to replace gets its name back."""
        for match in self._matches(_LEFTOVER):
            discard(self.folder / match.string)
        for match in self._matches(_CHECKPOINT):
            if match["replaced"]:
                self._settle(int(match["update"]))

    def _publish(self, staging: Path, update: int) -> None:
        final = self.folder / _name(update)
        if final.exists():
            rename(final, self._aside(update))
        rename(staging, final)
        self._settle(update)

    def _take_back(self, staging: Path, update: int) -> None:
        discard(staging)
        with contextlib.suppress(OSError):  # newest() finds one that is still aside, too
            self._settle(update)

    def _settle(self, update: int) -> None:
        """End a replacement: the old one goes, unless the new one did not come."""
        final, aside = self.folder / _name(update), self._aside(update)
        if final.exists():
            discard(aside)
        elif aside.exists():
            rename(aside, final)

    def _aside(self, update: int) -> Path:
        return self.folder / f".replaced-{_name(update)}"

    def _delete_beyond(self, update: int) -> None:
        """Keep the one just saved and those before it; later ones are damaged, see _refuse_the_past."""
        candidates = [(other, path) for other, path in self._candidates() if path.name == _name(other)]
        later = [path for other, path in candidates if other > update]
        others = [path for other, path in candidates if other < update]
        for path in later + others[self.keep - 1 :]:
            hidden = self.folder / f".deleted-{path.name}"
            rename(path, hidden)
            discard(hidden)

    def _explain(self, update: int, writing: str, error: OSError, needed: int) -> str:
        there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        free, older = shutil.disk_usage(there).free, self.newest()
        still = f"{older.path} is still whole" if older else "there is no whole one before it"
        return (
            f"could not write the checkpoint of update {update} ({writing}: {error.strerror or error}). "
            f"It needs {needed:,} bytes, {free:,} are free in {self.folder}; {still}. "
            "Free space there, check the quota and the permissions, or keep fewer checkpoints; then start "
            "again, which resumes from the newest whole one."
        )


def _name(update: int) -> str:
    return f"update-{update:08d}"


def _open(path: Path, update: int) -> Checkpoint:
    files = verified_files(path, update)
    if _STATE not in files:
        raise DamagedError(f"{_STATE} is missing")
    try:
        state = decode(parse_json(read_bytes(path / _STATE)))
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise DamagedError(f"{_STATE} cannot be read ({error})") from error
    stems = tuple(Path(name).stem for name in files if name.endswith(".safetensors"))
    return Checkpoint(path, update, state, stems)


def _size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the file, at most."""
    return sum(
        tensor.numel() * tensor.element_size() + len(name.encode()) + _HEADER_OF_A_TENSOR
        for name, tensor in tensors.items()
    )


MANIFEST = "manifest.json"
FORMAT = "wellposed checkpoint"
VERSION = 1


class DamagedError(Exception):
    """The checkpoint is not whole; the text is the reason."""


def manifest_text(folder: Path, names: Iterable[str], update: int) -> bytes:
    """The content of a manifest for files that are in the folder already."""
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": file_hash(folder / name)} for name in names
    }
    return _sealed({"format": FORMAT, "version": VERSION, "update": update, "files": files})


def verified_files(folder: Path, update: int) -> tuple[str, ...]:
    """The names of a checkpoint's files, all of them whole; else a :class:`DamagedError`."""
    try:
        files = _read_manifest(folder / MANIFEST, update)
        for name, facts in files.items():
            _verify_file(folder / name, facts)
    except FileNotFoundError as error:
        raise DamagedError(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise DamagedError(f"it cannot be read ({error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST} does not have the fields of version {VERSION}") from error
    return tuple(files)


def _read_manifest(path: Path, update: int) -> dict[str, dict[str, Any]]:
    try:
        content = read_bytes(path)
        manifest = parse_json(content)
    except ValueError as error:
        raise DamagedError(f"{MANIFEST} cannot be read ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DamagedError(f"{MANIFEST} is not that of a {FORMAT}")
    if manifest.get("version") != VERSION:
        raise DamagedError(
            f"{MANIFEST} has format version {manifest.get('version')}, this release reads {VERSION}"
        )
    manifest.pop("sha256", None)
    if _sealed(manifest) != content:
        raise DamagedError(f"{MANIFEST} was altered")
    if manifest["update"] != update:
        raise DamagedError(f"{MANIFEST} is that of update {manifest['update']}")
    files: dict[str, dict[str, Any]] = manifest["files"]
    if outside := [name for name in files if Path(name).name != name]:
        raise DamagedError(f"{MANIFEST} lists {outside[0]!r}, which is not a file in this folder")
    return files


def _verify_file(path: Path, facts: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != facts["size"]:
        raise DamagedError(f"{path.name} has {size:,} bytes, {MANIFEST} says {facts['size']:,}")
    if file_hash(path) != facts["sha256"]:
        raise DamagedError(f"the content of {path.name} is not what {MANIFEST} says")
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


@dataclass(frozen=True)
class TensorName:
    """Stands for a tensor that is in a file of tensors, under this name.

    ``parted``: where processes hold parts of the parameters, they hold parts of it, too.
    """

    name: str
    parted: bool = False


def encode(value: Any, where: str = "state") -> Any:
    """What ``json.dumps`` can write without loss. ``where`` is what an error calls the value."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind in (list, tuple):
        items = [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if isinstance(value, dict):
        pairs = [(key, encode(item, f"{where}[{key!r}]")) for key, item in value.items()]
        if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [[encode(key, f"a key of {where}"), item] for key, item in pairs]}
    if kind is TensorName:
        return {"$tensor": [value.name, value.parted]}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$device": str(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return {"$numpy": [value.dtype.name, encode(value.item(), where)]}
    raise TypeError(
        f"{where} must be made of numbers, texts, None, lists, tuples and dicts to be saved, "
        f"got {kind.__module__}.{kind.__qualname__}; tensors go into the files."
    )


def decode(value: Any) -> Any:
    """What :func:`encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(item) for key, item in value.items()}
    if tag not in _DECODERS or len(value) != 1:
        raise ValueError(f"expected one of {', '.join(_DECODERS)}, got {tag!r}.")
    return _DECODERS[tag](value[tag])


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a dtype of torch, got {name!r}.")
    return dtype


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda items: tuple(decode(item) for item in items),
    "$dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
    "$tensor": lambda fields: TensorName(*fields),
    "$dtype": _dtype,
    "$device": torch.device,
    "$numpy": lambda fields: np.dtype(fields[0]).type(decode(fields[1])),
}


def write_bytes(path: Path, content: bytes) -> None:
    """A new file."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A new file in the safetensors format; an OSError if there is no room for it."""
    path.touch(exist_ok=False)
    mode = path.stat().st_mode
    try:
        save_file(_separate(tensors), path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    with path.open("r+b") as file:
        # safetensors may put a file of its own in the place, which only the owner can read.
        os.chmod(path, mode)
        os.fsync(file.fileno())


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in main memory, each with storage of its own, as safetensors wants them."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = tensor.detach().to("cpu", memory_format=torch.contiguous_format).contiguous()
        if own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        separate[name] = own
    return separate


def rename(source: Path, target: Path) -> None:
    """At once: whoever looks sees the one name or the other."""
    os.rename(source, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot, and need not: they store names when they are made.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def discard(folder: Path) -> None:
    """Delete a folder that nobody takes for a checkpoint.

    What cannot be deleted now, say a file that is still open on a network file system, stays for the next
    time.
    """
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)


_AT_CWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A new, empty folder to fill, which takes the place of ``folder`` when the block ends without an error.

    >>> import tempfile
    >>> best = Path(tempfile.mkdtemp()) / "best"
    >>> with replaced(best) as new:
    ...     _ = (new / "a.txt").write_text("1")
    >>> with replaced(best) as new:
    ...     _ = (new / "b.txt").write_text("2")
    >>> [path.name for path in best.iterdir()], [path.name for path in best.parent.iterdir()]
    (['b.txt'], ['best'])
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    recover(folder)
    staged = _sibling(folder, "staged")
    staged.mkdir()
    try:
        yield staged
        sync_folder(staged)
        _publish(staged, folder)
    except Exception:
        discard(staged)
        raise


def recover(folder: Path) -> None:
    """Clear up what a killed process left next to ``folder``; the only copy gets its name back."""
    aside = _sibling(folder, "replaced")
    if aside.exists() and not folder.exists():
        rename(aside, folder)
    for left in (aside, _sibling(folder, "staged")):
        if left.exists():
            discard(left)


def _sibling(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


def _publish(staged: Path, folder: Path) -> None:
    if not folder.exists():
        rename(staged, folder)
    elif _exchange(staged, folder):
        sync_folder(folder.parent)
        discard(staged)
    else:
        aside = _sibling(folder, "replaced")
        rename(folder, aside)
        rename(staged, folder)
        discard(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders swap their names at once, where system and file system can (Linux)."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, TypeError, AttributeError):
        return False
    names = (os.fsencode(path.absolute()) for path in (one, other))
    return bool(renameat2(_AT_CWD, next(names), _AT_CWD, next(names), _RENAME_EXCHANGE) == 0)
