"""A recipe's fields as options of a command, and their texts as values.

A command's function that takes ``flags`` gets the options that were given, as texts; nothing here imports
torch, so that ``--help`` is quick.

>>> values({"batch_size": "128", "compile": False, "trackers": "none", "model_option": ["depth=6"]})
{'batch_size': 128, 'compile': False, 'trackers': (), 'model_options': {'depth': 6}}
>>> assignments(["data=cifar10:DIR", "model_options.depth=6"])
{'data': 'cifar10:DIR', 'model_options': {'depth': 6}}

Options that take several values are given them after commas, by repeating the option, or both.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from wellposed.files import parse_toml
from wellposed.text import indices
from wellposed.train.recipe import NONE, Recipe, checked, field_types, kind_of, require_known

_OPTION, _EDIT = "model_option", "edit"
"""The flags of ``model_options`` and ``edits``, which give one of them and may be repeated."""

_HELP_ALL = "help_all"

_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}


def recipe_options(*, shown: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of the fields, and ``--help-all``.

    The function's parameter ``flags`` gets a dict of the options that were given, see :func:`values`.

    Args:
        shown: the fields whose options ``--help`` names; ``--help-all`` names the others too.
    """
    options = [_option(field, hidden=field.name not in shown) for field in dataclasses.fields(Recipe)]
    names = {option.name for option in options}
    options.append(_help_all())

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [each for each in inspect.signature(command).parameters.values() if each.name != "flags"]
        keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]

        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            given.pop(_HELP_ALL, None)
            flags = {name: given.pop(name) for name in list(given) if name in names}
            command(**given, flags={name: value for name, value in flags.items() if value not in (None, [])})

        signature = inspect.Signature([*keyword, *options])
        with_options.__signature__ = signature  # type: ignore[attr-defined]
        with_options.__annotations__ = {each.name: each.annotation for each in (*keyword, *options)}
        return with_options

    return decorate


def values(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the options that were given."""
    parsed = {}
    for name, text in flags.items():
        if name == _OPTION:
            parsed["model_options"] = model_options(text)
        elif name == _EDIT:
            parsed["edits"] = _edits(text)
        else:
            parsed[name] = parse(name, text) if isinstance(text, str) else text
    return parsed


def assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Values of texts such as ``lr=0.01`` or ``model_options.depth=6``."""
    flags: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ValueError(f"expected field=value, such as lr=0.01, got {text!r}.")
        if name == _EDIT:
            flags.setdefault(_EDIT, []).append(value.strip())
        elif name.startswith("model_options."):
            flags.setdefault(_OPTION, []).append(text.strip().partition(".")[2])
        elif name == "model_options":
            raise ValueError(f"expected one option, such as model_options.depth=6, got {text!r}.")
        else:
            require_known([name], repr(text))
            flags[name] = value.strip()
    return values(flags)


def _edits(texts: Sequence[str]) -> Any:
    """Edits of texts such as ``gray_tokens eps=0.7``; ``none`` for none."""
    return checked("edits", () if list(texts) == [NONE] else texts)


def edits(texts: Sequence[str]) -> dict[str, Any]:
    """The field of edits such as ``gray_tokens eps=0.7``; nothing if there are none.

    >>> edits(["gray_tokens eps=0.9 method=dct"])
    {'edits': ({'edit': 'gray_tokens', 'eps': 0.9, 'method': 'dct'},)}
    """
    return {"edits": _edits(texts)} if texts else {}


def parse(name: str, text: str) -> Any:
    """The value of a field of its text; ``none`` where the field may be None."""
    kind, may_be_none = kind_of(field_types()[name])
    if text == NONE and may_be_none:
        return None
    if get_origin(kind) is not tuple:
        return checked(name, _one(kind, text))
    return checked(name, [] if text in ("", NONE) else [part.strip() for part in text.split(",")])


def _one(kind: Any, text: str) -> Any:
    """A number or a boolean if the text is one, else the text, which the field's check will not take."""
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    return text


def model_options(texts: Iterable[str]) -> dict[str, Any]:
    """Values of texts such as ``depth=6``."""
    options = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name:
            raise ValueError(f"a model option must be key=value, such as depth=6, got {text!r}.")
        options[name] = _toml_value(name, value)
    return options


def _toml_value(name: str, text: str) -> Any:
    """A TOML value; a single word needs no quotes."""
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        parsed = {}
    if parsed.keys() == {"value"}:
        return parsed["value"]
    if re.fullmatch(r"[A-Za-z_][\w.-]*", text):
        return text
    raise ValueError(
        f"the model option {name} must be a value such as 6, 0.5, true, [2, 2], word or '\"a text\"', "
        f"got {text!r}."
    )


def _help_all() -> inspect.Parameter:
    """``--help-all``: the help with the options that ``--help`` hides."""

    def show(context: typer.Context, wanted: bool) -> None:
        if not wanted:
            return
        for parameter in context.command.params:
            if hasattr(parameter, "hidden"):
                parameter.hidden = False
        typer.echo(context.get_help())
        raise typer.Exit

    option = typer.Option("--help-all", callback=show, is_eager=True, help="Show all options, and exit.")
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(_HELP_ALL, keyword, default=False, annotation=Annotated[bool, option])


def _option(field: "dataclasses.Field[Any]", *, hidden: bool = False) -> inspect.Parameter:
    kind, _ = kind_of(field_types()[field.name])
    annotation: Any = str | None
    name, metavar = field.name, _METAVARS.get(kind)
    choices: list[str] = []
    if kind is bool:
        annotation = bool | None
    elif get_origin(kind) is dict:
        name, annotation, metavar = _OPTION, list[str] | None, "KEY=VALUE"
    elif field.name == "edits":
        name, annotation, metavar = _EDIT, list[str] | None, "'EDIT ARGUMENT=VALUE ...'"
    elif get_origin(kind) is tuple:
        metavar = f"{_METAVARS[get_args(kind)[0]]},..."
    elif get_origin(kind) is Literal:
        choices = list(map(str, get_args(kind)))
        metavar = f"[{'|'.join(choices)}]"

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    option = typer.Option(
        help=_help(field),
        rich_help_panel=field.metadata["group"],
        metavar=metavar,
        hidden=hidden,
        autocompletion=complete if choices else None,
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=Annotated[annotation, option])


def _help(field: "dataclasses.Field[Any]") -> str:
    """The field's text with its default; the option's own is None, to see what was given."""
    text = str(field.metadata["help"])
    default = field.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    elif isinstance(default, bool):
        default = str(default).lower()
    if default is not None and default is not dataclasses.MISSING and field.name != "edits":
        text += f" [default: {default}]"
    # Else Rich takes what stands in brackets for a style.
    return text.replace("[", "\\[")


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
