"""The recipe as a value: types, ranges, fields that go together, and what messages say."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import wellposed as wp
from wellposed.train.model import build_model
from wellposed.train.recipe import RANGES, Recipe, field_types, kind_of


def test_every_field_has_a_default_a_help_and_a_group() -> None:
    fields = dataclasses.fields(Recipe)
    assert all(field.metadata["help"] and field.metadata["group"] for field in fields)
    # A group is one run of fields, so that a file and the help show it once.
    groups = [group for group, _ in itertools.groupby(field.metadata["group"] for field in fields)]
    assert len(groups) == len(set(groups))
    assert Recipe() == Recipe()


def test_every_number_has_a_range() -> None:
    numbers = {name for name, hint in field_types().items() if kind_of(hint)[0] in (int, float)}
    assert numbers == set(RANGES)


@pytest.mark.parametrize(
    ("field", "good", "bad", "words"),
    [
        ("epochs", 1, 0, "at least 1"),
        ("seed", 0, -1, "at least 0 and below 2**63"),
        ("flip", 1.0, 1.01, "in [0, 1]"),
        ("crop_scale", 1.0, 0.0, "in (0, 1]"),
        ("holdout", 0.99, 1.0, "in (0, 1)"),
        ("lr", 1e-9, 0.0, "positive"),
        ("lr", 1.0, float("inf"), "positive"),
        ("weight_decay", 0.0, float("nan"), "at least 0"),
    ],
)
def test_ranges(field, good, bad, words) -> None:
    assert getattr(Recipe(**{field: good}), field) == good
    with pytest.raises(ValueError, match=field) as caught:
        Recipe(**{field: bad})
    assert str(caught.value) == f"{field} must be {words}, got {bad}."


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"epochs": 2.5}, TypeError, "epochs must be a whole number, got 2.5."),
        ({"epochs": True}, TypeError, "epochs must be a whole number, got True."),
        ({"lr": "fast"}, TypeError, "lr must be a number, got 'fast'."),
        ({"min_lr": None}, TypeError, "min_lr must be a number, got None."),
        ({"compile": 1}, TypeError, "compile must be true or false, got 1."),
        ({"data": 3}, TypeError, "data must be a text, got 3."),
        ({"trackers": "wandb"}, TypeError, "trackers must be a list, got 'wandb'."),
        ({"trackers": ["wandb", 1]}, TypeError, "trackers[1] must be a text, got 1."),
        ({"model_options": 3}, TypeError, "model_options must be a table of options, got 3."),
        ({"model_options": {3: 3}}, TypeError, "texts for keys, got 3."),
        ({"model_options": {"norm": [None]}}, TypeError, "model_options.norm[0] must be"),
        ({"precision": "fp16"}, ValueError, "one of fp32, bf16, got 'fp16'; did you mean"),
    ],
)
def test_wrong_values(values, error, says) -> None:
    with pytest.raises(error) as caught:
        Recipe(**values)
    assert says in str(caught.value)


def test_a_probe_needs_weights() -> None:
    with pytest.raises(ValueError, match="add start_from"):
        Recipe(task="probe")
    Recipe(task="probe", start_from="runs/mae")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"task": "mae", "mixup": 0.2}, "no labels to mix"),
        ({"edits": ["remove_skips which=ffn"], "drop_path": 0.1}, "nothing of an image would be left"),
        ({"mixup": 0.0, "mix_probability": 0.5}, "mix_probability does nothing alone; add mixup or cutmix"),
        ({"batch_size": 10, "accumulate": 3}, "multiple of accumulate, got 10 and 3"),
        (
            {"epochs": 3, "warmup_epochs": 3.0},
            "must be less than epochs, got 3 and 3; lower it",
        ),
    ],
)
def test_fields_that_exclude_others(values, says) -> None:
    with pytest.raises(ValueError, match=says):
        Recipe(**values)


def test_values_take_the_fields_type() -> None:
    recipe = Recipe(
        lr=1, epochs=np.int64(3), data=Path("images"), trackers=["wandb"], model_options={"depths": (2, 2)}
    )
    assert (recipe.lr, type(recipe.lr)) == (1.0, float)
    assert (recipe.epochs, type(recipe.epochs)) == (3, int)
    assert (recipe.data, recipe.trackers) == ("images", ("wandb",))
    assert recipe.model_options == {"depths": [2, 2]}


def test_the_word_for_none() -> None:
    recipe = Recipe(clip_grad="none", ema="none", trackers="none")
    assert (recipe.clip_grad, recipe.ema, recipe.trackers) == (None, None, ())
    # The default of clip_grad is a number, so it must be said; that of ema need not.
    assert recipe.to_mapping()["clip_grad"] == "none"
    assert "ema" not in recipe.to_mapping()
    assert Recipe.from_mapping(recipe.to_mapping()) == recipe


def test_an_unknown_field_is_told_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="mine has an unknown field 'batchsize'; did you mean 'batch_size'"):
        Recipe.from_mapping({"batchsize": 3}, "mine")
    with pytest.raises(ValueError, match=r"unknown field 'qqq'\."):
        Recipe.from_mapping({"qqq": 3})


def test_recipes_do_not_share_their_options() -> None:
    given = {"depth": 3}
    recipe = Recipe(model_options=given)
    given["depth"] = 4
    assert recipe.model_options == {"depth": 3}
    assert Recipe().model_options is not Recipe().model_options
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.epochs = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"pretrained": True, "start_from": "runs/mae"}, "expected pretrained or start_from, got both"),
        ({"pretrained": True, "init": "xavier"}, "init=xavier would draw anew what pretrained loads"),
        ({"start_from": "runs/mae", "init": "xavier"}, "init=xavier would draw anew what start_from loads"),
    ],
)
def test_one_start_only(values, says) -> None:
    with pytest.raises(ValueError, match=says):
        Recipe(**values)
    Recipe(task="probe", pretrained=True)


@pytest.mark.parametrize("init", ["torch", "mimetic", "skipless"])
def test_initialisations_of_wellposed_are_those_of_its_function(init) -> None:
    options = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    recipe = Recipe(model="vit_tiny_patch16_224", model_options=options, image_size=8, patch_size=4, seed=3)
    plain = build_model(recipe, classes=3, channels=1).model
    wp.initialise(plain, init, seed=3)
    drawn = build_model(dataclasses.replace(recipe, init=init), classes=3, channels=1).model
    assert all(map(torch.equal, plain.state_dict().values(), drawn.state_dict().values()))
