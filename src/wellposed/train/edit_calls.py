"""The calls of wellposed that put a recipe's edits into a model, as Python text.

>>> from wellposed.train.recipe import Recipe
>>> edit_calls(Recipe(remove_skips="ffn", skip_blocks="0,2-3"), [])
['wp.remove_skips(model, "ffn", blocks=[0, 2, 3])']
"""

from collections.abc import Sequence

from wellposed.surgery.gray import KIND as GRAY
from wellposed.surgery.record import Edit
from wellposed.text import indices
from wellposed.train.recipe import Recipe


def edit_calls(recipe: Recipe, edits: Sequence[Edit]) -> list[str]:
    """One line of Python a call, for a model called ``model``.

    The power of the graying is that of the edits, since it may have changed during training.
    """
    calls = _gray_calls(recipe, [edit for edit in edits if edit.kind == GRAY]) if recipe.graying else []
    if recipe.broadcast is not None:
        scaled = ", scaled=True" if recipe.broadcast == "cb_s" else ""
        blocks = _blocks(recipe.broadcast_blocks)
        calls.append(f'wp.broadcast_context(model, "{recipe.broadcast_where}"{scaled}{blocks})')
    if recipe.remove_skips is not None:
        calls.append(f'wp.remove_skips(model, "{recipe.remove_skips}"{_blocks(recipe.skip_blocks)})')
    if recipe.uniform_heads:
        calls.append(f"wp.uniform_heads(model, {recipe.uniform_heads}{_blocks(recipe.uniform_blocks)})")
    return calls


def _gray_calls(recipe: Recipe, edits: Sequence[Edit]) -> list[str]:
    has_power = recipe.graying != "condition" and recipe.target_kappa is None
    of_eps: dict[float | None, list[int]] = {}
    for edit in edits:
        eps = _eps(edit) if has_power else None
        of_eps.setdefault(eps, []).extend([] if edit.block is None else [edit.block])
    if not of_eps:
        raise ValueError(f"the recipe has graying={recipe.graying}, but the model's edits have none.")
    blocks = _blocks(recipe.gray_blocks)
    rest = "" if recipe.target_kappa is None else f", target_kappa={recipe.target_kappa!r}"
    rest += "" if recipe.gray_floor is None else f", floor={recipe.gray_floor!r}"
    calls = []
    for eps, of_this_eps in of_eps.items():
        if len(of_eps) > 1:
            blocks = f", blocks={of_this_eps}"
        where = f'where="{recipe.gray_where}"{blocks}'
        calls.append(f'wp.gray_tokens(model, {eps}, "{recipe.graying}", {where}{rest})')
    return calls


def _eps(edit: Edit) -> float:
    eps = edit.settings.get("eps")
    if not isinstance(eps, float):
        raise ValueError(f"expected the eps of a graying in {edit}.")
    return eps


def _blocks(text: str | None) -> str:
    return "" if text is None else f", blocks={indices(text)}"
