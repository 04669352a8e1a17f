"""Sets in few files: ``wds:SHARDS``, ``packed:FILE.npz``, and :func:`pack`, which makes the latter.

Of shards, which are WebDataset's tar files on a local disk, a sample is the members of one tar that share a
name up to its first dot: an image (jpg, jpeg, png, webp or ppm) and its label, a number as text in ``cls`` or
under "label" in ``json``. Each tar is gone through once; then any image is one read, so that the order of
training is exact and a run can be resumed anywhere.

A packed set has for each split, ``train`` and ``test``: ``<split>_bytes`` (all JPEG or PNG files, one after
the other), ``<split>_offsets`` (n + 1) and ``<split>_labels`` (n); and ``classes``, their names. Optional:
``photographs``, whether mirroring makes sense (true where it is missing).

>>> braces_expanded("imagenet-{train,val}-{08..10}.tar")[:3]
['imagenet-train-08.tar', 'imagenet-train-09.tar', 'imagenet-train-10.tar']
"""

import glob
import itertools
import math
import os
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from wellposed.files import parse_json, replacing
from wellposed.train.data import grouped, numbered_classes, open_data, train_and_test
from wellposed.train.data.images import (
    Archive,
    ArchivedImages,
    Contents,
    EncodedImages,
    Fingerprint,
    ImageData,
    Part,
    Split,
    UnreadableImageError,
    as_array,
    counted,
    in_threads,
    refusal,
)

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
MOST_SHARDS = 100_000
_REMOTE = re.compile(r"(pipe|https?|s3|gs|gcs|az|hf|ftp)\s*:")


def shard_paths(spec: str) -> list[Path]:
    """All shards: names with ``{000..003}`` or ``{a,b}``, patterns with ``*``, several after commas."""
    paths: dict[Path, None] = {}  # in order, each once
    for pattern in re.split(r",(?![^{]*\})", spec):  # at commas that are not in braces
        pattern = pattern.strip()
        if _REMOTE.match(pattern):
            raise ValueError(
                f"shards must be files on a local disk, got {pattern!r}: the order of training is exact only "
                "where any image can be read at any time. Copy them to a disk first."
            )
        for expanded in braces_expanded(pattern) if pattern else ():
            paths |= dict.fromkeys(_existing(expanded))
    if not paths:
        raise ValueError("expected shards such as wds:DIR/train-{000..003}.tar, got nothing.")
    return list(paths)


def _existing(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    pattern = str(path / "*.tar" if path.is_dir() else path)
    found = sorted(map(Path, glob.glob(pattern, recursive=True)))
    if not found:
        raise FileNotFoundError(f"expected shards (tar files), there is no {pattern}.")
    return found


def braces_expanded(pattern: str) -> list[str]:
    """All texts that a pattern with braces means, as a shell has it."""
    found = list(itertools.islice(_expanded(pattern), MOST_SHARDS + 1))
    if len(found) > MOST_SHARDS:
        raise ValueError(f"expected at most {MOST_SHARDS:,} shards, got the pattern {pattern!r}.")
    return found


def _expanded(pattern: str) -> Iterator[str]:
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    options: Iterable[str] = match[1].split(",")
    if numbers := _RANGE.fullmatch(match[1]):
        first, last = numbers[1], numbers[2]
        if int(first) > int(last):
            raise ValueError(f"expected an ascending range of shards, got {{{match[1]}}}.")
        options = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    for option in options:
        yield from _expanded(f"{pattern[: match.start()]}{option}{pattern[match.end() :]}")


_IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp", "ppm")
_LABEL_ENDINGS = ("cls", "json")
_BLOCK = tarfile.BLOCKSIZE
MOST_OF_A_HEADER = 2**20
"""Bytes, of a member's header and of a label."""


class _Headers:
    """A tar file of which headers are read, none longer than :data:`MOST_OF_A_HEADER`.

    tarfile reads as many bytes as a header says that its own extension has.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if size > MOST_OF_A_HEADER:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return self._file.read(size)


class _Sample(NamedTuple):
    member: str
    start: int
    size: int
    label: int


def shards(spec: str) -> Contents:
    """WebDataset's tar files."""
    groups = grouped(shard_paths(spec), f"wds:{spec}")
    train_paths, test_paths, notes = train_and_test(groups, f"wds:{spec}")
    train, test = _shards_part(train_paths), None if test_paths is None else _shards_part(test_paths)
    classes = numbered_classes(train.labels, None if test is None else test.labels, f"wds:{spec}")
    return Contents(classes, train, test, notes=notes)


def _shards_part(paths: list[Path]) -> Part:
    def read(piece: range) -> tuple[Archive, list[_Sample]]:
        return _indexed(paths[piece[0]])

    indexed = in_threads(read, len(paths), "reading the index of shards", chunk=1)
    samples = [(number, sample) for number, (_, found) in enumerate(indexed) for sample in found]
    names = as_array(f": {sample.member}" for _, sample in samples)
    places = [(number, sample.start, sample.size) for number, sample in samples]
    images = ArchivedImages(
        [archive for archive, _ in indexed], "", names, np.array(places, np.int64).reshape(-1, 3)
    )
    return Part(images, np.array([sample.label for _, sample in samples], np.int64))


def _indexed(path: Path) -> tuple[Archive, list[_Sample]]:
    """All samples of a shard, in its order."""
    members: dict[str, dict[str, tarfile.TarInfo]] = {}
    end = 0
    with path.open("rb") as file:
        try:
            with tarfile.open(fileobj=cast(IO[bytes], _Headers(file)), mode="r:") as archive:
                for member in archive:
                    end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                    key, ending = _key_and_ending(member.name)
                    if not member.isreg() or not key:
                        continue
                    if members.setdefault(key, {}).setdefault(ending, member) is not member:
                        raise ValueError(f"{path} has two members {key}.{ending}; names must differ.")
        except tarfile.TarError as error:
            raise ValueError(
                f"{path} is cut, damaged or no plain tar file ({error}); a compressed one must be unpacked "
                "first, since images are read from its middle."
            ) from error
        # tarfile takes a damaged header, or the end of the file, for the end of the archive.
        file.seek(end)
        if file.read(_BLOCK) != bytes(_BLOCK):
            raise ValueError(
                f"{path} is cut or damaged at byte {end}: a tar file ends with zeros; copy it again."
            )
        seen = Archive(str(path.absolute()), Fingerprint.of(file.fileno()))
        return seen, [_sample(path, file, key, endings) for key, endings in members.items()]


def _key_and_ending(name: str) -> tuple[str, str]:
    """A member's name at the first dot of its base name; no key if it is hidden.

    >>> _key_and_ending("./train.d/n01440764_36.jpg"), _key_and_ending("a/._b.jpg")
    (('./train.d/n01440764_36', 'jpg'), ('', ''))
    """
    folder, slash, base = name.rpartition("/")
    key, _, ending = base.partition(".")
    return (f"{folder}{slash}{key}", ending.lower()) if key else ("", "")


def _sample(path: Path, file: IO[bytes], key: str, endings: dict[str, tarfile.TarInfo]) -> _Sample:
    image = next((endings[ending] for ending in _IMAGE_ENDINGS if ending in endings), None)
    label = next((endings[ending] for ending in _LABEL_ENDINGS if ending in endings), None)
    if image is None or label is None:
        expected = _IMAGE_ENDINGS if image is None else _LABEL_ENDINGS
        raise ValueError(
            f"expected {' or '.join(expected)} for the sample {key} of {path}, got {', '.join(endings)}."
        )
    if label.size > MOST_OF_A_HEADER:
        raise ValueError(f"expected a label in {label.name} of {path}, got {label.size:,} bytes.")
    file.seek(label.offset_data)
    return _Sample(image.name, image.offset_data, image.size, _label(path, label.name, file.read(label.size)))


def _label(path: Path, name: str, content: bytes) -> int:
    try:
        value = parse_json(content)["label"] if name.lower().endswith("json") else int(content)
        if type(value) is int:
            return value
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        f"expected a whole number as the label in {name} of {path} (in json: under 'label'), got "
        f"{content[:40].decode(errors='replace')!r}."
    )


MOST_UNPACKED, MOST_RATIO = 2**26, 100
_LOCAL_HEADER = 30  # bytes of a zip member's own header, before its name


def packed(path: Path) -> Contents:
    """A set in one file of numpy's."""
    if not path.is_file():
        raise FileNotFoundError(f"expected a packed set, there is no file {path}; wellposed pack makes one.")
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array")
        with file:
            return _packed_contents(path, file)
    except OSError:
        raise
    except Exception as error:  # zip files and numpy's have errors of many kinds
        raise ValueError(
            f"{path} cannot be read as a packed set: {error}. wellposed pack makes one from a folder."
        ) from error


def _packed_contents(path: Path, file: Any) -> Contents:
    for member in file.zip.infolist():
        # Images are compressed already.
        if member.file_size > MOST_UNPACKED and member.file_size > MOST_RATIO * member.compress_size:
            sizes = f"from {member.compress_size:,} to {member.file_size:,} bytes"
            raise ValueError(f"{member.filename} would unpack {sizes}")
    if "classes" not in file:
        raise ValueError(f"expected 'classes' in it, got {', '.join(file) or 'nothing'}")
    parts = {
        split: _packed_part(path, file, split) for split in ("train", "test") if f"{split}_bytes" in file
    }
    if "train" not in parts:
        held = "has a test split only; it is for measuring" if "test" in parts else "has no images"
        raise ValueError(f"it {held}, not for training; give a set with a train split")
    return Contents(
        classes=tuple(map(str, _array(file, "classes"))),
        train=parts["train"],
        test=parts.get("test"),
        photographs=bool(_array(file, "photographs")) if "photographs" in file else True,
    )


def _packed_part(path: Path, file: Any, split: str) -> Part:
    missing = [name for name in (f"{split}_offsets", f"{split}_labels") if name not in file]
    if missing:
        raise ValueError(f"it has {split}_bytes, but no {' and no '.join(missing)}")
    offsets = _array(file, f"{split}_offsets")
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets):
        raise ValueError(f"{split}_offsets must be one row of integers, got {offsets.dtype} {offsets.shape}")
    offsets = offsets.astype(np.int64)
    archive, first, size = _bytes(path, file, f"{split}_bytes")
    if offsets[0] < 0 or offsets[-1] > size or (np.diff(offsets) < 0).any():
        raise ValueError(f"{split}_offsets must ascend from 0 to the {size} bytes of {split}_bytes")
    places = np.stack([np.zeros_like(offsets[1:]), first + offsets[:-1], np.diff(offsets)], axis=1)
    names = as_array(f" {split} image {number}" for number in range(len(places)))
    return Part(ArchivedImages([archive], str(path), names, places), _array(file, f"{split}_labels"))


def _header(file: Any, name: str) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape and type of an array, of which the file has as many bytes as it says, and where they begin."""
    member = file.zip.getinfo(f"{name}.npy")
    with file.zip.open(member) as opened:
        version = np.lib.format.read_magic(opened)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(opened)
        start = opened.tell()
    got = member.file_size - start
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize != got:
        raise ValueError(f"{name} must have {math.prod(shape):,} values of {dtype}, got {got:,} bytes")
    return shape, dtype, start


def _array(file: Any, name: str) -> npt.NDArray[Any]:
    _header(file, name)
    array: npt.NDArray[Any] = file[name]
    return array


def _bytes(path: Path, file: Any, name: str) -> tuple[Archive | npt.NDArray[np.uint8], int, int]:
    """Where an array of bytes is, its first byte there and how many it has.

    That is the file itself where the array is stored plainly, else memory.
    """
    shape, dtype, offset = _header(file, name)
    if dtype != np.uint8 or len(shape) != 1:
        raise ValueError(f"{name} must be one row of bytes, got {dtype} {shape}")
    member = file.zip.getinfo(f"{name}.npy")
    if member.compress_type != zipfile.ZIP_STORED:
        return file[name], 0, shape[0]
    with path.open("rb") as raw:
        raw.seek(member.header_offset)
        local = raw.read(_LOCAL_HEADER)
        lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        start = member.header_offset + _LOCAL_HEADER + lengths + offset
        return Archive(str(path.absolute()), Fingerprint.of(raw.fileno())), start, shape[0]


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
    """Write a set as one .npz file and open that: one file to copy, no search through folders.

    Every image is decoded once, so that a damaged one is found now. JPEG and PNG files go in byte by byte as
    they are; anything else as a lossless PNG, or as JPEG where a ``quality`` is given.

    Args:
        source: all that :func:`open_data` takes.
        out: the file, which appears (or replaces an older one) when it is whole.
        quality: 1 to 95, of images that are not JPEG or PNG files; None is lossless.
        holdout: as of :func:`open_data`. The split is fixed from here on.
        seed: the same.
        skip_unreadable: the same.

    Returns:
        The set as ``open_data("packed:FILE.npz")`` opens it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     len(pack("digits", f"{folder}/digits.npz").train)
        1397
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
    with replacing(path, binary=True) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, split in (("train", data.train), ("test", data.test)):
            contents, failed = _file_contents(split, quality)
            what = f"{data.name}, {name},"
            if failed and not skip_unreadable:
                raise refusal(what, list(failed.values()), len(split))
            if failed:
                notes += (counted(what, list(failed.values()), len(split)),)
            _write_bytes(archive, f"{name}_bytes", contents)
            _write(archive, f"{name}_offsets", np.cumsum([0, *map(len, contents)], dtype=np.int64))
            _write(archive, f"{name}_labels", np.delete(split.labels, list(failed)))
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
    buffer = BytesIO()
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
