r"""Values as TOML text. Python reads TOML (``tomllib``) and does not write it.

>>> print(table({"lr": 1e-3, "trackers": ["tensorboard"], "data": 'a "b"', "compile": True}))
lr = 0.001
trackers = ["tensorboard"]
data = "a \"b\""
compile = true
"""

import re
from collections.abc import Mapping
from typing import Any

_ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def table(values: Mapping[str, Any]) -> str:
    """One line a value."""
    return "\n".join(f"{_key(name)} = {value_text(value)}" for name, value in values.items())


def value_text(value: Any) -> str:
    """The value so that a TOML reader gives the same value back, floats bit for bit."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(name)} = {value_text(each)}" for name, each in value.items())
        return f"{{{inside}}}"
    raise TypeError(f"TOML holds texts, numbers, true and false, lists and tables, got {value!r}.")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name)


def _string(text: str) -> str:
    return f'"{"".join(map(_character, text))}"'


def _character(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError(
            f"TOML is UTF-8 text, got the byte {code & 0xFF:#04x} that is none; rename the file."
        )
    return f"\\u{code:04x}" if code < 0x20 or code == 0x7F else character
