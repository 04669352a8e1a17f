"""Options that take several values: after commas, by repeating the option, or both."""

from collections.abc import Sequence

from wellposed.text import indices


def parts(given: Sequence[str] | None) -> tuple[str, ...] | None:
    """The values, None where the option was not given.

    >>> parts(["cb, cb_s", "dct-pixels"])
    ('cb', 'cb_s', 'dct-pixels')
    """
    return tuple(part.strip() for part in ",".join(given).split(",")) if given else None


def numbers(given: Sequence[str] | None, name: str) -> list[int] | None:
    """As of :func:`wellposed.text.indices`, None where the option was not given.

    >>> numbers(["0-2", "5"], "seeds")
    [0, 1, 2, 5]
    """
    return indices(",".join(given), name) if given else None
