"""The edits of a recipe: calls of wellposed's own functions, with their arguments.

A recipe's ``edits`` is a list of such calls. On the command line a call is a text, the function's name and
its arguments; in a file it is a table::

    wellposed train --edit 'gray_tokens eps=0.7 where=pixels' --edit 'remove_skips which=ffn blocks=0-3'

    edits = [{edit = "gray_tokens", eps = 0.7, where = "pixels"}]

>>> parsed("gray_tokens eps=0.7 blocks=0,3 where=blocks")
{'edit': 'gray_tokens', 'eps': 0.7, 'blocks': '0,3', 'where': 'blocks'}
>>> parsed("gray_token eps=0.7")
Traceback (most recent call last):
ValueError: there is no edit 'gray_token'; did you mean 'gray_tokens'?

The fields ``graying``, ``eps``, ``broadcast``, ``remove_skips`` and those that go with them are short forms
of one call each; :func:`calls` gives both kinds as one list, which is all that the rest of training reads.

>>> from wellposed.train.recipe import Recipe
>>> [call.code() for call in calls(Recipe(remove_skips="ffn", skip_blocks="0,2-3"))]
['wp.remove_skips(model, "ffn", blocks=[0, 2, 3])']
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wellposed.calls import GRAY, EditCall, call_arguments, checked_call
from wellposed.files import parse_toml
from wellposed.text import indices

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
    name, *pairs = text.split()
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
    _check_schedule(made)
    return made


def _check_schedule(call: Mapping[str, Any]) -> None:
    end, schedule = call.get("eps_end"), call.get("eps_schedule", "linear")
    if end is None and "eps_schedule" in call:
        raise ValueError("eps_schedule does nothing alone; add eps_end, or leave it out.")
    if end is None:
        return
    if isinstance(end, bool) or not isinstance(end, (int, float)) or not 0 < end <= 1:
        raise ValueError(f"eps_end must be in (0, 1], got {end!r}.")
    if schedule not in ("linear", "cosine"):
        raise ValueError(f"eps_schedule must be one of linear, cosine, got {schedule!r}.")
    if call.get("method") == "condition" or call.get("target_kappa") is not None:
        raise ValueError("eps_end is of a power, which this graying does not take; leave it out.")


def _value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}")["value"]
    except (ValueError, KeyError):
        return text


@dataclass(frozen=True)
class RecipeCall(EditCall):
    """A call of a recipe.

    Args:
        eps_end, eps_schedule: of a graying whose power changes during training.
    """

    eps_end: float | None = None
    eps_schedule: str = "linear"


def calls(recipe: "Recipe", blocks: int | None = None) -> list[RecipeCall]:
    """All edits of a recipe, the short forms first.

    Args:
        recipe: of the edits.
        blocks: how many the model has, for a power for each of all blocks (``eps_per_block``).
    """
    own = [_call(call, recipe) for call in recipe.edits]
    return [*_short_forms(recipe, blocks), *own]


def grayings(recipe: "Recipe") -> list[RecipeCall]:
    """Those that are Token Graying."""
    return [call for call in calls(recipe) if call.kind == GRAY]


def _call(call: Mapping[str, Any], recipe: "Recipe") -> RecipeCall:
    arguments = call_arguments(call, without=_SCHEDULE)
    if arguments.get("scaled") and "init" not in arguments:
        arguments["init"] = _scale_init(recipe)
    return RecipeCall(call["edit"], arguments, call.get("eps_end"), call.get("eps_schedule", "linear"))


def _short_forms(recipe: "Recipe", blocks: int | None) -> Iterator[RecipeCall]:
    if recipe.graying is not None:
        fixed = {"method": recipe.graying, "where": recipe.gray_where}
        fixed |= _given(target_kappa=recipe.target_kappa, floor=recipe.gray_floor)
        for eps, chosen in _powers(recipe, blocks):
            arguments = fixed | _given(eps=eps, blocks=chosen)
            yield RecipeCall(GRAY, arguments, recipe.eps_end, recipe.eps_schedule)
    if recipe.broadcast is not None:
        scaled = {"scaled": True, "init": _scale_init(recipe)} if recipe.broadcast == "cb_s" else {}
        where = {"where": recipe.broadcast_where, **scaled}
        yield RecipeCall("broadcast_context", where | _given(blocks=_chosen(recipe.broadcast_blocks)))
    if recipe.remove_skips is not None:
        which = {"which": recipe.remove_skips}
        yield RecipeCall("remove_skips", which | _given(blocks=_chosen(recipe.skip_blocks)))
    if recipe.uniform_heads:
        heads = {"heads": recipe.uniform_heads}
        yield RecipeCall("uniform_heads", heads | _given(blocks=_chosen(recipe.uniform_blocks)))


def _powers(recipe: "Recipe", count: int | None) -> list[tuple[float | None, list[int] | None]]:
    """Powers, and the blocks that each is for."""
    blocks = _chosen(recipe.gray_blocks)
    if recipe.eps_per_block is None:
        return [(recipe.eps, blocks)]
    if blocks is None:
        blocks = list(range(len(recipe.eps_per_block) if count is None else count))
    if len(blocks) != len(recipe.eps_per_block):
        raise ValueError(
            f"eps_per_block must have one value for each of the {len(blocks)} blocks that are grayed, "
            f"got {len(recipe.eps_per_block)}; gray_blocks= names fewer blocks."
        )
    return [(eps, [block]) for eps, block in zip(recipe.eps_per_block, blocks, strict=True)]


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _chosen(text: str | None) -> list[int] | None:
    """Block indices; None, as in the edits, is every block that can take the edit."""
    return None if text is None else indices(text)


def _scale_init(recipe: "Recipe") -> str:
    """Scales that go into a trained model start as if they were not there."""
    return "identity" if recipe.pretrained or recipe.start_from is not None else "cb"


def apply_edits(model: "nn.Module", recipe: "Recipe") -> "Edits":
    """Make the recipe's edits in a model. Each graying remembers its call, for its schedule."""
    from wellposed import anatomy, surgery
    from wellposed.nn import TokenGraying

    blocks = None if recipe.eps_per_block is None else len(anatomy.blocks(model))
    for call in calls(recipe, blocks):
        before = {id(module) for module in model.modules()}
        call(model)
        for module in model.modules():
            if isinstance(module, TokenGraying) and id(module) not in before:
                module.recipe_call = call  # type: ignore[assignment]
    return surgery.edits(model)


def code_of(recipe: "Recipe", edits: Sequence["Edit"]) -> list[str]:
    """The recipe's edits as Python, one line a call, with the powers that the model's grayings have now."""
    grayed = [edit for edit in edits if edit.kind == GRAY]
    return [
        call.code(_eps_of(call, grayed)) if call.kind == GRAY else call.code()
        for call in calls(recipe, _most_blocks(grayed))
    ]


def _most_blocks(grayed: Iterable["Edit"]) -> int:
    return len({edit.block for edit in grayed if edit.block is not None})


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
