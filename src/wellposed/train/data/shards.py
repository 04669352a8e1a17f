"""The files that a notation for shards means.

>>> braces_expanded("imagenet-{train,val}-{08..10}.tar")[:3]
['imagenet-train-08.tar', 'imagenet-train-09.tar', 'imagenet-train-10.tar']

``wds:SHARDS``: WebDataset tar files on a local disk, read at random by an index.

A sample is the members of one tar that share a name up to its first dot: an image (jpg, jpeg, png, webp or
ppm) and its label, a number as text in ``cls`` or under "label" in ``json``. Each tar is gone through once;
then any image is one read, so that the order of training is exact and a run can be resumed anywhere.
"""

import glob
import itertools
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from io import BufferedReader, BytesIO, RawIOBase
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from wellposed.files import parse_json
from wellposed.train.data.decoding import in_threads
from wellposed.train.data.folder import grouped, train_and_test
from wellposed.train.data.images import Contents, EncodedImages, Fingerprint, Indices, Part, Slices
from wellposed.train.data.sets import numbered_classes

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
MOST_SHARDS = 100_000
_REMOTE = re.compile(r"(pipe|https?|s3|gs|gcs|az|hf|ftp)\s*:")


def shard_paths(spec: str) -> list[Path]:
    """All shards: names with ``{000..003}`` or ``{a,b}``, patterns with ``*``, several after commas."""
    paths: dict[Path, None] = {}  # in order, each once
    for pattern in _outer_parts(spec):
        if _REMOTE.match(pattern):
            raise ValueError(
                f"shards must be files on a local disk, got {pattern!r}: the order of training is exact only "
                "where any image can be read at any time. Copy them to a disk first."
            )
        for expanded in braces_expanded(pattern):
            paths |= dict.fromkeys(_existing(expanded))
    if not paths:
        raise ValueError("expected shards such as wds:DIR/train-{000..003}.tar, got nothing.")
    return list(paths)


def _existing(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        name = str(path / "*.tar")
    found = sorted(Path(file) for file in glob.glob(str(Path(name).expanduser()), recursive=True))
    if not found:
        raise FileNotFoundError(f"expected shards (tar files), there is no {name}.")
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
    before, after = pattern[: match.start()], pattern[match.end() :]
    for option in _options(match[1]):
        yield from _expanded(f"{before}{option}{after}")


def _options(inside: str) -> Iterable[str]:
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        return inside.split(",")
    first, last = numbers[1], numbers[2]
    if int(first) > int(last):
        raise ValueError(f"expected an ascending range of shards, got {{{inside}}}.")
    return (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _outer_parts(spec: str) -> list[str]:
    """Split at commas that are not in braces.

    >>> _outer_parts("a-{1,2}.tar, b.tar")
    ['a-{1,2}.tar', 'b.tar']
    """
    return [part.strip() for part in re.split(r",(?![^{]*\})", spec) if part.strip()]


_IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp", "ppm")
_LABEL_ENDINGS = ("cls", "json")
_BLOCK = tarfile.BLOCKSIZE
_OPEN_FILES = 64
MOST_OF_A_HEADER = 2**20
"""Bytes, of a member's header and of a label."""


class ShardImages(EncodedImages):
    """Ranges of bytes in shards.

    Args:
        shards: paths and fingerprints.
        names: of the members.
        places: (n, 3): number of the shard, first byte, number of bytes.
    """

    def __init__(self, shards: tuple[tuple[str, Fingerprint], ...], names: Slices, places: Indices) -> None:
        self._shards, self._names, self._places = shards, names, places

    def __len__(self) -> int:
        return len(self._places)

    def name(self, index: int) -> str:
        return f"{self._shards[self._places[index, 0]][0]}: {self._names.text(index)}"

    def select(self, indices: Indices) -> "ShardImages":
        return ShardImages(self._shards, self._names.select(indices), self._places[indices])

    def file(self, index: int) -> IO[bytes]:
        return BytesIO(self.content(index))

    def content(self, index: int) -> bytes:
        shard, start, size = self._places[index].tolist()
        return os.pread(_opened(*self._shards[shard]).descriptor, size, start)

    def header(self, index: int) -> IO[bytes]:
        shard, start, size = self._places[index].tolist()
        return BufferedReader(_Window(_opened(*self._shards[shard]), start, size), buffer_size=4096)


class _Opened:
    """An open file, closed when nobody reads from it any more.

    Read at given positions only: it then may be used by threads, and by processes forked from this one.
    """

    def __init__(self, path: str, fingerprint: Fingerprint) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        fingerprint.check(self.descriptor, path)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


_opened = lru_cache(_OPEN_FILES)(_Opened)


class _Window(RawIOBase):
    """A range of an open file as a file, of which only what is asked for is read."""

    def __init__(self, opened: _Opened, start: int, size: int) -> None:
        self._opened, self._start, self._size, self._position = opened, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(min(len(buffer), self._size - self._position), 0)
        content = os.pread(self._opened.descriptor, count, self._start + self._position)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


class _Headers:
    """A tar file of which headers are read, none longer than :data:`MOST_OF_A_HEADER`.

    tarfile reads as many bytes as a header says that its own extension has.
    """

    def __init__(self, file: BufferedReader) -> None:
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
    groups = grouped(shard_paths(spec), f"wds:{spec}")
    train, test, notes = train_and_test(groups, f"wds:{spec}")
    parts = [_part(paths) for paths in (train, test) if paths is not None]
    whole = [part.labels for part in parts]
    return Contents(
        classes=numbered_classes(whole[0], whole[1] if len(whole) > 1 else None, f"wds:{spec}"),
        train=parts[0],
        test=parts[1] if len(parts) > 1 else None,
        notes=notes,
    )


def _part(paths: list[Path]) -> Part:
    def read(piece: range) -> list[tuple[Fingerprint, list[_Sample]]]:
        return [samples_of(paths[number]) for number in piece]

    pieces = in_threads(read, len(paths), "reading the index of shards", chunk=1, bar_from=20)
    indexed = [shard for piece in pieces for shard in piece]
    samples = [(number, sample) for number, (_, found) in enumerate(indexed) for sample in found]
    images = ShardImages(
        tuple((str(path.absolute()), seen) for path, (seen, _) in zip(paths, indexed, strict=True)),
        Slices.of_texts(sample.member for _, sample in samples),
        np.array([(number, sample.start, sample.size) for number, sample in samples], np.int64).reshape(
            -1, 3
        ),
    )
    return Part(images, np.array([sample.label for _, sample in samples], np.int64))


def samples_of(path: Path) -> tuple[Fingerprint, list[_Sample]]:
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
                f"{path} is cut or damaged at byte {end}: a tar file ends with zeros; copy it anew."
            )
        seen = Fingerprint.of(os.fstat(file.fileno()))
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
