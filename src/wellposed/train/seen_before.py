"""Whether a run tests on images that the weights it starts from were trained on."""

from pathlib import Path

from wellposed.train.data import ImageData
from wellposed.train.environment import without_secrets
from wellposed.train.recipe import Recipe
from wellposed.train.recipe_file import read_recipe
from wellposed.train.run_folder import RECIPE
from wellposed.train.start import weights_file


def seen_before(recipe: Recipe, data: ImageData) -> list[str]:
    """A sentence if so, for the notes of a run that starts from another one on the same data.

    Where the set has no test split, seed and holdout draw it. With the same seed a smaller holdout is a part
    of a larger one.
    """
    if recipe.start_from is None or not data.is_test_drawn:
        return []
    file = weights_file(recipe.start_from).parent / RECIPE  # every folder of weights of ours has one
    if not file.is_file():
        return []
    before = Recipe.from_mapping(read_recipe(file))
    if _place(before.data) != _place(without_secrets(recipe.data)):
        return []
    drawn_there, drawn_here = (
        f"seed {each.seed}" + ("" if data.name == "digits" else f" and holdout {each.holdout:g}")
        for each in (before, recipe)
    )
    is_part = before.seed == recipe.seed and (data.name == "digits" or recipe.holdout <= before.holdout)
    if is_part:
        return []
    return [
        f"some test images are not new to these weights: {drawn_there} drew those of {recipe.start_from}, "
        f"{drawn_here} draws others of the same {recipe.data}, so the accuracy is too good. Take the seed "
        "and the holdout of that run, or a set with a test split of its own."
    ]


def _place(data: str) -> Path:
    """The same for two ways to write one folder."""
    return Path(data.removeprefix("folder:")).expanduser().resolve()
