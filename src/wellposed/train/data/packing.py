"""Pack a set into one file that ``packed:FILE.npz`` reads: one file to copy, no search through folders."""

import io
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from wellposed.train.data.headers import counted, refusal
from wellposed.train.data.images import EncodedImages, UnreadableImageError
from wellposed.train.data.opening import open_data
from wellposed.train.data.split import ImageData, Split
from wellposed.train.data.threads import in_threads

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
            contents, failed = _contents(split, quality)
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


def _contents(split: Split, quality: int | None) -> tuple[list[bytes], dict[int, str]]:
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
