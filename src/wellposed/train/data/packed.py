"""``packed:FILE.npz``: a whole set in one file of numpy's, which :func:`~wellposed.train.data.pack` makes.

For each split, ``train`` and ``test``: ``<split>_bytes`` (all JPEG or PNG files, one after the other),
``<split>_offsets`` (n + 1) and ``<split>_labels`` (n); and ``classes``, their names. Optional:
``photographs``, whether mirroring makes sense (true where it is missing).
"""

import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wellposed.train.data.compact import Fingerprint, MappedBytes, Slices
from wellposed.train.data.images import NumberedImages
from wellposed.train.data.split import Contents, Part

_LOCAL_HEADER = 30  # bytes of a zip member's own header, before its name


def packed(path: Path) -> Contents:
    if not path.is_file():
        raise FileNotFoundError(f"expected a packed set, there is no file {path}; wellposed pack makes one.")
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array")
        with file:
            return _contents(path, file)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as a packed set: {error}. wellposed pack makes one from a folder."
        ) from error


def _contents(path: Path, file: Any) -> Contents:
    if "classes" not in file:
        raise ValueError(f"expected 'classes' in it, got {', '.join(file) or 'nothing'}")
    parts = {split: _part(path, file, split) for split in ("train", "test") if f"{split}_bytes" in file}
    if "train" not in parts:
        held = "has a test split only; it is for measuring" if "test" in parts else "has no images"
        raise ValueError(f"it {held}, not for training; give a set with a train split")
    return Contents(
        classes=tuple(map(str, file["classes"])),
        train=parts["train"],
        test=parts.get("test"),
        photographs=bool(file["photographs"]) if "photographs" in file else True,
    )


def _part(path: Path, file: Any, split: str) -> Part:
    missing = [name for name in (f"{split}_offsets", f"{split}_labels") if name not in file]
    if missing:
        raise ValueError(f"it has {split}_bytes, but no {' and no '.join(missing)}")
    offsets: npt.NDArray[Any] = file[f"{split}_offsets"]
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets):
        raise ValueError(f"{split}_offsets must be one row of integers, got {offsets.dtype} {offsets.shape}")
    data = _bytes(path, file, f"{split}_bytes")
    offsets = offsets.astype(np.int64)
    if offsets[0] < 0 or offsets[-1] > len(data) or (np.diff(offsets) < 0).any():
        raise ValueError(f"{split}_offsets must ascend from 0 to the {len(data)} bytes of {split}_bytes")
    slices = Slices(data, offsets[:-1], offsets[1:])
    return Part(NumberedImages(slices, f"{path} {split} image"), file[f"{split}_labels"])


def _bytes(path: Path, file: Any, name: str) -> Any:
    """The array of bytes: mapped from the file where it is stored plainly, else read into memory."""
    member = file.zip.getinfo(f"{name}.npy")
    with file.zip.open(member) as opened:
        version = np.lib.format.read_magic(opened)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(opened)
        header = opened.tell()
    if dtype != np.uint8 or len(shape) != 1:
        raise ValueError(f"{name} must be one row of bytes, got {dtype} {shape}")
    if member.compress_type != zipfile.ZIP_STORED:
        return file[name]
    with path.open("rb") as raw:
        raw.seek(member.header_offset)
        local = raw.read(_LOCAL_HEADER)
        lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        start = member.header_offset + _LOCAL_HEADER + lengths + header
        return MappedBytes(path, start, shape[0], Fingerprint.of(os.fstat(raw.fileno())))
