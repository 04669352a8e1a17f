"""``packed:FILE.npz``: a whole set in one file of numpy's, which :func:`~wellposed.train.data.pack` makes.

For each split, ``train`` and ``test``: ``<split>_bytes`` (all JPEG or PNG files, one after the other),
``<split>_offsets`` (n + 1) and ``<split>_labels`` (n); and ``classes``, their names. Optional:
``photographs``, whether mirroring makes sense (true where it is missing).

Pack a set into one file that ``packed:FILE.npz`` reads: one file to copy, no search through folders.
"""

import io
import lzma
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from wellposed.train.data.decoding import counted, in_threads, refusal
from wellposed.train.data.images import (
    Contents,
    EncodedImages,
    Fingerprint,
    ImageData,
    MappedBytes,
    NumberedImages,
    Part,
    Slices,
    Split,
    UnreadableImageError,
)
from wellposed.train.data.sets import open_data

_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    ValueError,
    RuntimeError,
    MemoryError,
    KeyError,
)
"""Of zip files and numpy's: also encrypted ones (RuntimeError), or of an unknown compression."""
MOST_UNPACKED, MOST_RATIO = 2**26, 100
_LOCAL_HEADER = 30  # bytes of a zip member's own header, before its name


def packed(path: Path) -> Contents:
    if not path.is_file():
        raise FileNotFoundError(f"expected a packed set, there is no file {path}; wellposed pack makes one.")
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array")
        with file:
            assert file.zip is not None
            for member in file.zip.infolist():
                _require_plausible(member)
            return _contents(path, file)
    except _DAMAGE as error:
        raise ValueError(
            f"{path} cannot be read as a packed set: {error}. wellposed pack makes one from a folder."
        ) from error


def _require_plausible(member: zipfile.ZipInfo) -> None:
    """Refuse what would unpack to far more than the file holds: images are compressed already."""
    if member.file_size > MOST_UNPACKED and member.file_size > MOST_RATIO * member.compress_size:
        raise ValueError(
            f"{member.filename} would unpack from {member.compress_size:,} to {member.file_size:,} bytes"
        )


def _array(file: Any, name: str) -> npt.NDArray[Any]:
    """A small array, whose header says no more than the file has."""
    member = file.zip.getinfo(f"{name}.npy")
    with file.zip.open(member) as opened:
        shape, dtype, header = _header(opened)
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize + header != member.file_size:
        raise ValueError(
            f"{name} must have {shape} values of {dtype}, got {member.file_size - header:,} bytes"
        )
    array: npt.NDArray[Any] = file[name]
    return array


def _header(opened: Any) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, type and where the values begin."""
    version = np.lib.format.read_magic(opened)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(opened)
    return shape, dtype, opened.tell()


def _contents(path: Path, file: Any) -> Contents:
    if "classes" not in file:
        raise ValueError(f"expected 'classes' in it, got {', '.join(file) or 'nothing'}")
    parts = {split: _part(path, file, split) for split in ("train", "test") if f"{split}_bytes" in file}
    if "train" not in parts:
        held = "has a test split only; it is for measuring" if "test" in parts else "has no images"
        raise ValueError(f"it {held}, not for training; give a set with a train split")
    return Contents(
        classes=tuple(map(str, _array(file, "classes"))),
        train=parts["train"],
        test=parts.get("test"),
        photographs=bool(_array(file, "photographs")) if "photographs" in file else True,
    )


def _part(path: Path, file: Any, split: str) -> Part:
    missing = [name for name in (f"{split}_offsets", f"{split}_labels") if name not in file]
    if missing:
        raise ValueError(f"it has {split}_bytes, but no {' and no '.join(missing)}")
    offsets = _array(file, f"{split}_offsets")
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets):
        raise ValueError(f"{split}_offsets must be one row of integers, got {offsets.dtype} {offsets.shape}")
    data = _bytes(path, file, f"{split}_bytes")
    offsets = offsets.astype(np.int64)
    if offsets[0] < 0 or offsets[-1] > len(data) or (np.diff(offsets) < 0).any():
        raise ValueError(f"{split}_offsets must ascend from 0 to the {len(data)} bytes of {split}_bytes")
    slices = Slices(data, offsets[:-1], offsets[1:])
    return Part(NumberedImages(slices, f"{path} {split} image"), _array(file, f"{split}_labels"))


def _bytes(path: Path, file: Any, name: str) -> Any:
    """The array of bytes: mapped from the file where it is stored plainly, else read into memory."""
    member = file.zip.getinfo(f"{name}.npy")
    with file.zip.open(member) as opened:
        shape, dtype, header = _header(opened)
    if dtype != np.uint8 or len(shape) != 1:
        raise ValueError(f"{name} must be one row of bytes, got {dtype} {shape}")
    if header + shape[0] != member.file_size:
        raise ValueError(f"{name} must have {shape[0]:,} bytes, got {member.file_size - header:,}")
    if member.compress_type != zipfile.ZIP_STORED:
        return file[name]
    with path.open("rb") as raw:
        raw.seek(member.header_offset)
        local = raw.read(_LOCAL_HEADER)
        lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        start = member.header_offset + _LOCAL_HEADER + lengths + header
        return MappedBytes(path, start, shape[0], Fingerprint.of(os.fstat(raw.fileno())))


_KEPT = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")


def pack(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    quality: int | None = None,
    holdout: float = 0.1,
    seed: int = 0,
    skip_unreadable: bool = False,
) -> ImageData:
    """Write a set as one .npz file and open that.

    Every image is decoded once, so that a damaged one is found now. JPEG and PNG files go in byte by byte as
    they are; anything else as a lossless PNG, or as JPEG where a ``quality`` is given.

    Args:
        source: all that :func:`open_data` takes.
        out: the file, which appears (or replaces an older one) when it is whole.
        quality: 1 to 95, of images that are not JPEG or PNG files; None is lossless.
        holdout, seed, skip_unreadable: as of :func:`open_data`. The split is fixed from here on.
    """
    path = Path(out).expanduser()
    if path.suffix != ".npz":
        raise ValueError(f"out must end with .npz, got {path}.")
    if quality is not None and not 1 <= quality <= 95:
        raise ValueError(f"quality must be from 1 to 95, got {quality}; without it nothing is lost.")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.absolute().parent} to write {path.name} into.")
    data = open_data(os.fspath(source), holdout=holdout, seed=seed, skip_unreadable=skip_unreadable)
    notes = data.notes
    with replaced(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, split in (("train", data.train), ("test", data.test)):
            contents, failed = _file_contents(split, quality)
            if failed and not skip_unreadable:
                raise refusal(f"{data.name}, {name},", list(failed.values()), len(split))
            if failed:
                notes += (counted(f"{data.name}, {name},", list(failed.values()), len(split)),)
            readable = [index for index in range(len(split)) if index not in failed]
            _write_bytes(archive, f"{name}_bytes", contents)
            _write(archive, f"{name}_offsets", np.cumsum([0, *map(len, contents)], dtype=np.int64))
            _write(archive, f"{name}_labels", split.labels[readable])
        _write(archive, "classes", np.array(data.classes))
        _write(archive, "photographs", np.array(data.photographs))
    made = open_data(f"packed:{path}")
    return replace(made, notes=(*notes, *made.notes))


def _file_contents(split: Split, quality: int | None) -> tuple[list[bytes], dict[int, str]]:
    """The files, and why some could not be read, by index."""

    def read(piece: range) -> tuple[list[bytes], dict[int, str]]:
        contents, failed = [], {}
        for index in piece:
            try:
                contents.append(_encoded(split, index, quality))
            except UnreadableImageError as error:
                failed[index] = str(error)
        return contents, failed

    pieces = in_threads(read, len(split), "packing images")
    failed = {index: message for _, failures in pieces for index, message in failures.items()}
    return [content for contents, _ in pieces for content in contents], failed


def _encoded(split: Split, index: int, quality: int | None) -> bytes:
    picture = split.picture(index)  # of files that are kept too: this is what finds damage
    if isinstance(split.images, EncodedImages):
        content = split.images.content(index)
        if content.startswith(_KEPT):
            return content
    buffer = io.BytesIO()
    if quality is None:
        picture.save(buffer, "PNG")
    else:
        picture.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _write_bytes(archive: zipfile.ZipFile, name: str, contents: Sequence[bytes]) -> None:
    """An array of bytes from its parts, without a second copy of it in memory."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (sum(map(len, contents)),)}
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(member, header)
        for content in contents:
            member.write(content)


def _write(archive: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that gets its name when it is whole and on the disk; after an error nothing is left."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with hidden.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)
    descriptor = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the name too
    finally:
        os.close(descriptor)
