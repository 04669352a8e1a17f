r"""Recipes as files: TOML is read and written. Python reads it (``tomllib``) and does not write it.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "mine.toml"
>>> _ = path.write_text("epoch = 3")
>>> read_recipe(path)
Traceback (most recent call last):
ValueError: ...mine.toml has an unknown field 'epoch'; did you mean 'epochs'?
>>> write_recipe(Recipe(epochs=3), path)
>>> combine(read_recipe(path), {"lr": 1e-4}).epochs
3
>>> print(table({"lr": 1e-3, "trackers": ["tensorboard"], "data": 'a "b"', "compile": True}))
lr = 0.001
trackers = ["tensorboard"]
data = "a \"b\""
compile = true
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wellposed.files import parse_toml, read_bytes, write_text
from wellposed.text import nearest
from wellposed.train.recipe import Recipe, checked, require_known

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


MOST_BYTES = 2**22
SUFFIX = ".toml"


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The fields that a file gives, each checked; an error names the file."""
    path = Path(path)
    text = _read_text(path)
    values = _parse_toml(text, path)
    require_known(values, str(path))
    return {name: _checked_in_file(name, value, path) for name, value in values.items()}


def combine(file_values: Mapping[str, Any], flag_values: Mapping[str, Any]) -> Recipe:
    """The recipe of a file with flags over it; single ``model_options`` too."""
    values = {**file_values, **flag_values}
    options = [each["model_options"] for each in (file_values, flag_values) if each.get("model_options")]
    if options:
        values["model_options"] = {name: value for each in options for name, value in each.items()}
    return Recipe.from_mapping(values)


def recipe_text(recipe: Recipe) -> str:
    """The recipe as TOML, under the groups of the fields."""
    values = recipe.to_mapping()
    options = values.pop("model_options")
    groups: dict[str, dict[str, Any]] = {}
    for field in dataclasses.fields(recipe):
        if field.name in values:
            groups.setdefault(field.metadata["group"], {})[field.name] = values[field.name]
    parts = [f"# {group}\n{table(fields)}" for group, fields in groups.items()]
    if options:
        parts.append(f"[model_options]\n{table(options)}")
    return "\n\n".join(parts) + "\n"


def write_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write the recipe as TOML; a kill at any moment leaves the old file or the new one."""
    write_text(path, recipe_text(recipe))


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, expected a recipe; `wellposed sweep` takes folders.")
    if path.suffix in (".yaml", ".yml"):
        raise ValueError(f"recipes are TOML, got {path}; write NAME = VALUE for NAME: VALUE in a .toml file.")
    if path.suffix != SUFFIX:
        raise ValueError(f"a recipe's name must end in {SUFFIX}, got {path}.")
    if not path.exists():
        beside = [other.name for other in path.parent.glob("*") if other.suffix == SUFFIX]
        raise FileNotFoundError(f"there is no recipe {path}{nearest(path.name, beside)}")
    try:
        return read_bytes(path, MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path} must be UTF-8 text, got a byte that is none in line {line}.") from error
    except ValueError as error:
        raise ValueError(f"expected a recipe in {path}, which cannot be read: {error}.") from error


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:
        said = str(error).replace("end of document", f"the end, line {text.count(chr(10)) + 1}")
        raise ValueError(f"{path} is not valid TOML: {said}") from error


def _checked_in_file(name: str, value: Any, path: Path) -> Any:
    try:
        return checked(name, value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}: {error}") from error
