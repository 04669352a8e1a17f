"""The edits of a recipe: calls of wellposed's own functions, with their arguments.

On the command line a call is a text, the function's name and its arguments; in a file it is a table::

    wellposed train --edit 'gray_tokens eps=0.7 where=pixels' --edit 'remove_skips which=ffn blocks=0-3'

    edits = [{edit = "gray_tokens", eps = 0.7, where = "pixels"}]

>>> parsed("gray_tokens eps=0.7 blocks=0,3 where=blocks")
{'edit': 'gray_tokens', 'eps': 0.7, 'blocks': '0,3', 'where': 'blocks'}
>>> parsed("gray_token eps=0.7")
Traceback (most recent call last):
ValueError: there is no edit 'gray_token'; did you mean 'gray_tokens'?
>>> from wellposed.train.recipe import Recipe
>>> [call.code() for call in calls(Recipe(edits=["remove_skips which=ffn blocks=0,2-3"]))]
['wp.remove_skips(model, "ffn", blocks=[0, 2, 3])']
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wellposed.calls import GRAY, EditCall, call_arguments, checked_call, defaults_of
from wellposed.files import parse_toml

if TYPE_CHECKING:
    from torch import nn

    from wellposed.surgery import Edit, Edits
    from wellposed.train.recipe import Recipe

_SCHEDULE = ("eps_end", "eps_schedule")
"""Of gray_tokens in training: the power at its end, and how it goes there."""
DEVICE_FLOORS = ("spectral", "condition")
"""Methods of graying whose floor depends on the device, unless it is given."""


def parsed(text: str) -> dict[str, Any]:
    """The call that a text means."""
    name, *pairs = text.split() or [""]
    if not name or "=" in name:
        raise ValueError(f"expected an edit such as 'gray_tokens eps=0.7', got {text!r}.")
    made: dict[str, Any] = {"edit": name}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"expected an edit such as 'gray_tokens eps=0.7', got {pair!r} in {text!r}.")
        made[key] = value if key == "blocks" else _value(value)
    return checked(made)


def checked(call: Any, name: str = "edits") -> dict[str, Any]:
    """A call of the right form, as a mapping; texts are parsed."""
    if isinstance(call, str):
        return parsed(call)
    is_gray = isinstance(call, Mapping) and call.get("edit") == GRAY
    made = checked_call(call, name, "a recipe", _SCHEDULE if is_gray else ())
    if is_gray:
        _check_graying(made)
    heads = made.get("heads", 1)
    is_count = type(heads) is int and heads >= 1
    is_choice = isinstance(heads, list | tuple) and heads and all(type(h) is int and h >= 0 for h in heads)
    if not (is_count or is_choice):
        raise ValueError(
            f"uniform_heads' heads must be at least 1, or a list of indices such as [0, 2], got {heads!r}."
        )
    return made


def _check_graying(call: Mapping[str, Any]) -> None:
    """What training would find out late: values out of range, and arguments that exclude one another."""
    for name in ("eps", "eps_end", "floor"):
        value = call.get(name, 1)
        if type(value) not in (int, float) or not 0 < value <= 1:
            raise ValueError(f"gray_tokens' {name} must be in (0, 1], got {value!r}.")
    target, method = call.get("target_kappa"), call.get("method", "spectral")
    if target is not None and (type(target) not in (int, float) or not target >= 1):
        raise ValueError(f"gray_tokens' target_kappa must be at least 1, got {target!r}.")
    if target is not None and method != "spectral":
        raise ValueError(f"target_kappa goes with method=spectral, got {method}; leave one of them out.")
    if "eps_schedule" in call and "eps_end" not in call:
        raise ValueError("eps_schedule does nothing alone; add eps_end, or leave it out.")
    if call.get("eps_schedule", "linear") not in ("linear", "cosine"):
        raise ValueError(f"eps_schedule must be one of linear, cosine, got {call['eps_schedule']!r}.")
    if "blocks" in call and call.get("where") != "blocks":
        raise ValueError("gray_tokens' blocks go with where=blocks; add it, or leave blocks out.")
    powers = [name for name in ("eps", "eps_end") if name in call]
    if powers and (method == "condition" or target is not None):
        instead = "method=condition" if method == "condition" else "target_kappa"
        raise ValueError(f"{instead} takes no {powers[0]}; leave one of them out.")


def _value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}")["value"]
    except (ValueError, KeyError):
        return text


def whole(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with the defaults of its function and indices as a list, whichever way it was written.

    >>> whole({"edit": "gray_tokens", "method": "dct", "where": "blocks", "blocks": "0-1"})["blocks"]
    [0, 1]
    """
    from wellposed.nn.graying import DEFAULT_EPS

    made = {"edit": call["edit"], **defaults_of(call["edit"]), **call_arguments(call)}
    if made["edit"] != GRAY or made["method"] not in DEFAULT_EPS or "target_kappa" in made:
        return made
    return {"eps": DEFAULT_EPS[made["method"]], **made}


@dataclass(frozen=True)
class RecipeCall(EditCall):
    """A call of a recipe.

    Args:
        eps_end, eps_schedule: of a graying whose power changes during training.
    """

    eps_end: float | None = None
    eps_schedule: str = "linear"


def calls(recipe: "Recipe") -> list[RecipeCall]:
    """All edits of a recipe."""
    made = []
    for call in recipe.edits:
        arguments = call_arguments(call, without=_SCHEDULE)
        if arguments.get("scaled") and "init" not in arguments:
            # Scales that go into a trained model start as if they were not there.
            is_trained = recipe.pretrained or recipe.start_from is not None
            arguments["init"] = "identity" if is_trained else "cb"
        change = call.get("eps_end"), call.get("eps_schedule", "linear")
        made.append(RecipeCall(call["edit"], arguments, *change))
    return made


def grayings(recipe: "Recipe") -> list[RecipeCall]:
    """Those that are Token Graying."""
    return [call for call in calls(recipe) if call.kind == GRAY]


def apply_edits(model: "nn.Module", recipe: "Recipe") -> "Edits":
    """Make the recipe's edits in a model. Each graying remembers its call, for its schedule."""
    from wellposed import surgery
    from wellposed.nn import TokenGraying

    for call in calls(recipe):
        before = {id(module) for module in model.modules()}
        call(model)
        for module in model.modules():
            if isinstance(module, TokenGraying) and id(module) not in before:
                module.recipe_call = call  # type: ignore[assignment]
    return surgery.edits(model)


def code_of(recipe: "Recipe", edits: Sequence["Edit"]) -> list[str]:
    """The recipe's edits as Python, one line a call, with the powers that the model's grayings have now."""
    grayed = [edit for edit in edits if edit.kind == GRAY]
    return [call.code(_eps_of(call, grayed)) if call.kind == GRAY else call.code() for call in calls(recipe)]


def _eps_of(call: RecipeCall, grayed: Iterable["Edit"]) -> float | None:
    """The power that the grayings of a call have, None where they have none."""
    if call.argument("method") == "condition" or call.argument("target_kappa") is not None:
        return None
    chosen = call.arguments.get("blocks")
    for edit in grayed:
        eps = edit.settings.get("eps")
        is_its = edit.where == call.argument("where") and (chosen is None or edit.block in chosen)
        if is_its and isinstance(eps, float):
            return eps
    raise ValueError(f"the recipe has {call.code()}, but the model's edits have no such graying.")
