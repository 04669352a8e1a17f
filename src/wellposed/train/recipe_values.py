"""Values of a recipe's fields: do they fit the field's type, and if not, what was expected?

>>> fitting("lr", 1, float), fitting("graying", "none", Literal["svd", "dct"] | None)
(1.0, None)
>>> fitting("epochs", "ten", int)
Traceback (most recent call last):
TypeError: epochs must be a whole number, got 'ten'.
"""

import difflib
import numbers
import os
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

NONE = "none"
"""Stands for None where a field may be None, since TOML has no such value, and for an empty list."""

_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def kind_of(hint: Any) -> tuple[Any, bool]:
    """A field's type without its None, and whether it may be None.

    >>> kind_of(int | None), kind_of(str)
    ((<class 'int'>, True), (<class 'str'>, False))
    """
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    (kind,) = (option for option in options if option is not types.NoneType)
    return kind, types.NoneType in options


def fitting(name: str, value: Any, hint: Any) -> Any:
    """The value as the field's type has it, or an error that says what was expected."""
    kind, may_be_none = kind_of(hint)
    if may_be_none and (value is None or _is_none_word(value)):
        return None
    origin = get_origin(kind)
    if origin is Literal:
        return _choice(name, value, get_args(kind))
    if origin is tuple:
        return _tuple(name, value, get_args(kind)[0])
    if origin is dict:
        return _options(name, value)
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    number = {int: numbers.Integral, float: numbers.Real}.get(kind)
    if number is not None and isinstance(value, number) and not isinstance(value, bool):
        return kind(value)
    if type(value) is not kind:
        raise TypeError(f"{name} must be {_WORDS[kind]}, got {value!r}.")
    return value


def nearest(name: object, known: Iterable[object]) -> str:
    """The end of an error message about a name that is not known.

    >>> nearest("epoch", ["epochs", "lr"]), nearest("x", ["epochs", "lr"])
    ("; did you mean 'epochs'?", '.')
    """
    close = difflib.get_close_matches(str(name), list(map(str, known)), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."


def _is_none_word(value: Any) -> bool:
    return isinstance(value, str) and value == NONE


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if value in choices:
        return value
    listed = ", ".join(map(str, choices))
    raise ValueError(f"{name} must be one of {listed}, got {value!r}{nearest(value, choices)}")


def _tuple(name: str, value: Any, item: Any) -> tuple[Any, ...]:
    if _is_none_word(value):
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(fitting(f"{name}[{index}]", each, item) for index, each in enumerate(value))
    raise TypeError(f"{name} must be a list, got {value!r}.")


def _options(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a table of options, got {value!r}.")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{name} must have texts for keys, got {key!r}.")
    return {key: _plain(f"{name}.{key}", each) for key, each in value.items()}


def _plain(name: str, value: Any) -> Any:
    """What a file can hold, so that a saved recipe is the recipe."""
    if isinstance(value, Mapping):
        return _options(name, value)
    if isinstance(value, (list, tuple)):
        return [_plain(f"{name}[{index}]", each) for index, each in enumerate(value)]
    if type(value) in _WORDS:
        return value
    raise TypeError(f"{name} must be a text, a number, true, false, a list or a table, got {value!r}.")
