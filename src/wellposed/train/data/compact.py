"""Many byte strings as two arrays, so that forked worker processes share them.

A list of a million paths is a million Python objects. Each process that only looks at one writes its
reference count, and so copies the page that holds it: the memory of every worker grows over an epoch. Arrays
have no such counts.

>>> paths = Slices.of_texts(["cat/1.jpg", "dog/2.jpg", "dog/3.jpg"])
>>> paths.select(np.array([2, 0])).text(0)
'dog/3.jpg'
"""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class ByteSource(Protocol):
    def __getitem__(self, where: slice) -> Bytes: ...


class Slices(NamedTuple):
    """Byte string i is ``data[starts[i]:stops[i]]``."""

    data: ByteSource
    starts: Indices
    stops: Indices

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> "Slices":
        parts = [os.fsencode(text) for text in texts]
        ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(parts), np.uint8), ends[:-1], ends[1:])

    def content(self, index: int) -> bytes:
        return self.data[int(self.starts[index]) : int(self.stops[index])].tobytes()

    def text(self, index: int) -> str:
        return os.fsdecode(self.content(index))

    def select(self, indices: Indices) -> "Slices":
        """Those at the indices; the bytes themselves are not copied."""
        return Slices(self.data, self.starts[indices], self.stops[indices])


class Fingerprint(NamedTuple):
    """Tells whether a file is still the one that was looked at."""

    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Fingerprint":
        return cls(status.st_size, status.st_mtime_ns)

    def check(self, descriptor: int, path: Path | str) -> None:
        """Refuse an open file that is another one by now."""
        if Fingerprint.of(os.fstat(descriptor)) != self:
            raise OSError(errno.ESTALE, "the file was changed while it was in use; start again", str(path))


class MappedBytes:
    """A range of bytes in a file, mapped into memory: processes share it, however they were started.

    What is pickled is the place, not the bytes.
    """

    def __init__(self, path: Path, offset: int, size: int, fingerprint: Fingerprint) -> None:
        self._place = (path.absolute(), offset, size, fingerprint)
        with path.open("rb") as file:
            fingerprint.check(file.fileno(), path)
            # As a plain array, of which a slice is quicker made than of a memmap.
            self._bytes: Bytes = np.asarray(
                np.memmap(file, np.uint8, "r", offset, (size,)) if size else np.empty(0, np.uint8)
            )

    def __getitem__(self, where: slice) -> Bytes:
        return self._bytes[where]

    def __len__(self) -> int:
        return len(self._bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedBytes, self._place
