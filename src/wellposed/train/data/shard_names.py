"""The files that a notation for shards means.

>>> braces_expanded("imagenet-{train,val}-{08..10}.tar")[:3]
['imagenet-train-08.tar', 'imagenet-train-09.tar', 'imagenet-train-10.tar']
"""

import glob
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

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
