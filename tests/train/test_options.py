"""A recipe's fields as options of the command."""

import dataclasses
import tomllib

import pytest
from typer.testing import CliRunner

from wellposed.cli import app
from wellposed.commands.options import assignments, parse, values
from wellposed.train.recipe import Recipe, combine, recipe_text

FIELDS = [field for field in dataclasses.fields(Recipe) if field.name not in ("model_options", "edits")]


def as_text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def train(*arguments: object):
    return CliRunner().invoke(app, ["train", *map(str, arguments)], env={"COLUMNS": "400"})


def dry_run(*arguments: object) -> Recipe:
    result = train(*arguments, "--dry-run")
    assert result.exit_code == 0, result.output
    return combine(tomllib.loads(result.output), {})


def test_the_text_of_a_default_is_the_default() -> None:
    for field in FIELDS:
        assert parse(field.name, as_text(field.default)) == field.default, field.name


def test_help_shows_every_field_with_its_choices_and_default() -> None:
    help_text = train("--help-all").output
    lines = {line.split()[1]: line for line in help_text.splitlines() if line.startswith("│ --")}
    for field in FIELDS:
        line = lines["--" + field.name.replace("_", "-")]
        assert field.metadata["help"] in line
        if field.default is not None:
            assert f"[default: {as_text(field.default)}]" in line
        if isinstance(field.default, bool):
            assert "--no-" + field.name.replace("_", "-") in line
    assert "[classify|mae|probe]" in lines["--task"]
    assert "KEY=VALUE" in lines["--model-option"]
    assert "gray_tokens eps=0.7 where=pixels" in lines["--edit"]
    for group in {field.metadata["group"] for field in FIELDS}:
        assert f"─ {group} ─" in help_text


def test_every_kind_of_option() -> None:
    recipe = dry_run(
        *("--batch-size", 128, "--lr", "1e-4", "--data", "cifar10:DIR", "--task", "mae"),
        *("--edit", "gray_tokens eps=0.5 where=blocks blocks=0,2-3", "--edit", "uniform_heads"),
        *("--no-compile", "--no-norm-pixels", "--clip-grad", "none", "--trackers", "tensorboard,wandb"),
        *("--model-option", "depth=6", "--model-option", "global_pool=avg", "--model-option", "a='b c'"),
        *("--model-option", "depths=[2, 2]", "--model-option", "qk_norm = true"),
    )
    assert recipe == Recipe(
        batch_size=128,
        lr=1e-4,
        data="cifar10:DIR",
        task="mae",
        edits=[
            {"edit": "gray_tokens", "eps": 0.5, "where": "blocks", "blocks": "0,2-3"},
            {"edit": "uniform_heads"},
        ],
        compile=False,
        norm_pixels=False,
        clip_grad=None,
        trackers=("tensorboard", "wandb"),
        model_options={"depth": 6, "global_pool": "avg", "a": "b c", "depths": [2, 2], "qk_norm": True},
    )


def test_only_what_was_given_goes_over_the_file(tmp_path) -> None:
    file = tmp_path / "mine.toml"
    # Each value differs from the default, so that a flag's own default would show.
    own = Recipe(
        epochs=7,
        lr=0.5,
        compile=True,
        trackers=(),
        layer_decay=0.5,
        edits=["gray_tokens"],
        task="mae",
        model="vit_tiny_patch16_224",
        norm_pixels=False,
        model_options={"depth": 2},
    )
    file.write_text(recipe_text(own))
    assert dry_run(file) == own
    changed = dataclasses.replace(own, lr=0.25, layer_decay=None, edits=())
    assert dry_run(file, "--lr", 0.25, "--layer-decay", "none", "--edit", "none") == changed
    changed = dataclasses.replace(own, compile=False, model_options={"depth": 2, "num_heads": 4})
    assert dry_run(file, "--no-compile", "--model-option", "num_heads=4") == changed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--epochs", "many"], "epochs must be a whole number, got 'many'."),
        (["--epochs", "1.5"], "epochs must be a whole number, got '1.5'."),
        (["--lr", "-1"], "lr must be positive, got -1.0."),
        (["--min-lr", "none"], "--min-lr must be a number, got 'none'."),
        (["--task", "probes"], "did you mean 'probe'?"),
        (["--edit", "gray_tokens method=dtc"], "did you mean 'dct'?"),
        (["--edit", "graying=dct"], "expected an edit such as 'gray_tokens eps=0.7', got 'graying=dct'."),
        (["--model-option", "depth"], "must be key=value"),
        (["--model-option", "depth=6x 7"], "the model option depth must be a value such as 6"),
        (["--model-option", "depth=6\nwidth = 3"], "the model option depth must be a value such as 6"),
        (["no.toml"], "there is no recipe no.toml"),
    ],
)
def test_mistakes_are_one_message(arguments, says) -> None:
    result = train(*arguments, "--dry-run")
    assert result.exit_code == 1
    assert says in result.output
    assert "Traceback" not in result.output


def test_an_unknown_flag_is_told_with_the_nearest() -> None:
    result = train("--epoch", 3)
    assert result.exit_code == 2
    assert "--epochs" in result.output


def test_assignments() -> None:
    texts = ["lr=0.1", "compile=false", "trackers=none", "batch-size = 8", "data=a=b", "clip_grad=none"]
    assert assignments([*texts, "model_options.depth=6", "model_options.x='a.b=c'"]) == {
        "lr": 0.1,
        "compile": False,
        "trackers": (),
        "batch_size": 8,
        "data": "a=b",
        "clip_grad": None,
        "model_options": {"depth": 6, "x": "a.b=c"},
    }
    assert assignments([]) == {} == values({})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr", "expected field=value"),
        ("epoch=3", "'epoch=3' has an unknown field 'epoch'; did you mean 'epochs'?"),
        ("epochs=0", "at least 1"),
        ("compile=maybe", "compile must be true or false, got 'maybe'"),
        ("model_options=3", "such as model_options.depth=6"),
        ("graying=dct", "which is an argument of an edit now, such as edit='gray_tokens method=dct eps=0.9'"),
        ("model_options.=3", "must be key=value"),
    ],
)
def test_wrong_assignments(text, says) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        assignments([text])
    assert says in str(caught.value)
