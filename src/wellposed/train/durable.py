"""Writing that is on the disk when the call returns, and deleting that never leaves half a folder in view.

A folder can be replaced as a whole: whoever looks sees the old one or the new one, never half of one.
"""

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


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
    staged = _beside(folder, "staged")
    staged.mkdir()
    try:
        yield staged
        sync_folder(staged)
        _publish(staged, folder)
    except Exception:
        discard(staged)
        raise


def recover(folder: Path) -> None:
    """Clear up what a killed process left beside ``folder``; the only copy gets its name back."""
    aside = _beside(folder, "replaced")
    if aside.exists() and not folder.exists():
        rename(aside, folder)
    for left in (aside, _beside(folder, "staged")):
        if left.exists():
            discard(left)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


def _publish(staged: Path, folder: Path) -> None:
    if not folder.exists():
        rename(staged, folder)
    elif _exchange(staged, folder):
        sync_folder(folder.parent)
        discard(staged)
    else:
        aside = _beside(folder, "replaced")
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
