"""The edits of a recipe: calls of wellposed's functions, and the fields that older recipes had for them."""

import copy
import dataclasses
import inspect
import signal
import tomllib
from typing import get_args, get_type_hints

import pytest
import timm
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import wellposed as wp
from short_runs import TINY, assert_bitwise, run, signal_at, weights
from wellposed.calls import ARGUMENTS, CHOICES
from wellposed.cli import app
from wellposed.run_records import read_run
from wellposed.train import Recipe, open_run
from wellposed.train.edits import apply_edits, calls, parsed
from wellposed.train.model import build_model

NOT_OF_A_RECIPE = {"model", "example"}


def test_a_recipe_can_give_every_argument_of_every_edit() -> None:
    for name, arguments in ARGUMENTS.items():
        assert set(arguments) == set(inspect.signature(getattr(wp, name)).parameters) - NOT_OF_A_RECIPE


@pytest.mark.parametrize(
    ("short", "text"),
    [
        ({"graying": "dct", "eps": 0.9}, "gray_tokens eps=0.9 method=dct"),
        (
            {"graying": "svd", "eps": 0.5, "gray_where": "blocks", "gray_blocks": "0,1"},
            "gray_tokens eps=0.5 method=svd where=blocks blocks=0-1",
        ),
        ({"graying": "spectral", "target_kappa": 9.0}, "gray_tokens target_kappa=9.0"),
        ({"graying": "spectral", "gray_floor": 0.01}, "gray_tokens floor=0.01"),
        ({"broadcast": "cb_s", "broadcast_blocks": "1"}, "broadcast_context scaled=true blocks=1"),
        ({"broadcast": "cb", "broadcast_where": "attention.end"}, "broadcast_context where=attention.end"),
        ({"remove_skips": "ffn", "skip_blocks": "0"}, "remove_skips which=ffn blocks=0"),
        ({"uniform_heads": 2}, "uniform_heads heads=2"),
    ],
)
def test_the_fields_of_an_older_recipe_are_the_same_edit(short, text) -> None:
    made = []
    for fields in (short, {"edits": [text]}, {"edits": [parsed(text)]}):
        model = timm.create_model("test_vit", **TINY)
        made.append(apply_edits(model, Recipe.from_mapping(fields)))
    assert made[0] == made[1] == made[2]
    assert made[0]
    (short_call,), (call,) = calls(Recipe.from_mapping(short)), calls(Recipe(edits=[text]))
    assert short_call.code() == call.code()


@pytest.mark.parametrize(
    ("edits", "error", "says"),
    [
        (["gray_token eps=0.7"], ValueError, "no edit 'gray_token'; did you mean 'gray_tokens'?"),
        (["cb"], ValueError, "no edit 'cb'; expected one of gray_tokens, .*broadcast_context"),
        (["gray_tokens epss=0.7"], ValueError, "no 'epss' that a recipe can give; did you mean 'eps'?"),
        (["gray_tokens 0.7"], ValueError, "got '0.7'"),
        (["remove_skips blocks=3-1"], ValueError, "blocks must be indices"),
        (["gray_tokens eps_schedule=cosine"], ValueError, "add eps_end"),
        (["gray_tokens eps=0.5 eps_end=2.0"], ValueError, r"eps_end must be in \(0, 1\], got 2.0"),
        (["gray_tokens method=condition eps_end=0.5"], ValueError, "method=condition takes no eps_end"),
        (["gray_tokens method=condition eps=0.5"], ValueError, "method=condition takes no eps; leave"),
        (["gray_tokens target_kappa=9.0 eps=0.5"], ValueError, "target_kappa takes no eps; leave"),
        (["gray_tokens target_kappa=9.0 eps_end=0.5"], ValueError, "target_kappa takes no eps_end"),
        (["gray_tokens target_kappa=9.0 method=condition"], ValueError, "goes with method=spectral"),
        (["gray_tokens target_kappa=0.5"], ValueError, "target_kappa must be at least 1, got 0.5"),
        (["gray_tokens floor=0.0"], ValueError, r"floor must be in \(0, 1\], got 0.0"),
        (["gray_tokens eps=2.0"], ValueError, "got 2.0"),
        (["gray_tokens blocks=0"], ValueError, "blocks go with where=blocks"),
        (["gray_tokens method=dtc"], ValueError, "method must be one of .*; did you mean 'dct'"),
        (["remove_skips which=fnn"], ValueError, "did you mean 'ffn'"),
        (["uniform_heads heads=0"], ValueError, "heads must be at least 1, or a list .* got 0"),
        (["uniform_heads blocks=one"], ValueError, "blocks must be indices"),
        (["graying=dct"], ValueError, "expected an edit such as"),
        ([{"eps": 0.7}], TypeError, "must be such as"),
        ([{"edit": "gray_tokens", "eps": None}], TypeError, "must be a number, a word or indices"),
        ("gray_tokens eps=0.7", TypeError, "edits must be a list"),
    ],
)
def test_a_wrong_edit_is_one_sentence(edits, error, says) -> None:
    with pytest.raises(error, match=says):
        Recipe(edits=edits)


def test_the_words_of_a_choice_are_those_of_the_functions() -> None:
    for kind, choices in CHOICES.items():
        hints = get_type_hints(getattr(wp, kind))
        for name, words in choices.items():
            assert set(words) == set(get_args(hints[name])), (kind, name)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"eps": 0.5}, "eps does nothing without graying"),
        ({"skip_blocks": "0"}, "skip_blocks does nothing without remove_skips"),
        ({"graying": "dct", "gray_blocks": "0-2", "eps_per_block": [0.5]}, "must have 3 powers, got 1"),
    ],
)
def test_wrong_fields_of_an_older_recipe(fields, says) -> None:
    with pytest.raises(ValueError, match=says):
        Recipe.from_mapping(fields)


def test_skips_that_are_removed_and_stochastic_depth() -> None:
    with pytest.raises(ValueError, match="drop_path drops branches"):
        Recipe(edits=["remove_skips"], drop_path=0.1)
    Recipe(edits=["remove_skips allow_drop_path=true"], drop_path=0.1)


def test_on_the_command_line_and_in_a_file(tmp_path) -> None:
    def dry_run(*arguments: str) -> dict:
        result = CliRunner().invoke(app, ["train", *arguments, "--dry-run"])
        assert result.exit_code == 0, result.output
        return tomllib.loads(result.output)

    told = ["--edit", "gray_tokens eps=0.7 where=pixels", "--edit", "remove_skips which=ffn blocks=0-3"]
    expected = [
        {"edit": "gray_tokens", "eps": 0.7, "where": "pixels"},
        {"edit": "remove_skips", "which": "ffn", "blocks": "0-3"},
    ]
    assert dry_run(*told)["edits"] == expected
    file = tmp_path / "mine.toml"
    file.write_text('edits = ["gray_tokens eps=0.7 where=pixels", {edit = "uniform_heads"}]\n')
    assert dry_run(str(file))["edits"] == [expected[0], {"edit": "uniform_heads"}]
    assert dry_run(str(file), *told[2:])["edits"] == expected[1:]
    assert "edits" not in dry_run(str(file), "--edit", "none")


def test_a_run_is_bitwise_that_of_an_older_recipe(tmp_path) -> None:
    run(tmp_path / "short", graying="dct", eps=0.9, eps_end=1.0, broadcast="cb_s", uniform_heads=1)
    run(
        tmp_path / "list",
        edits=[
            "gray_tokens method=dct eps=0.9 eps_end=1.0",
            "broadcast_context scaled=true",
            "uniform_heads heads=1",
        ],
    )
    assert_bitwise(weights(tmp_path / "list"), weights(tmp_path / "short"))
    cards = [(tmp_path / name / "last" / "README.md").read_text() for name in ("list", "short")]
    said = [[line for line in card.splitlines() if line.startswith("wp.")] for card in cards]
    assert said[0] == said[1]
    assert said[0][0] == 'wp.gray_tokens(model, 1.0, "dct", where="embedding")'


def test_each_graying_has_a_schedule_of_its_own_and_goes_on_after_a_stop(tmp_path, monkeypatch) -> None:
    fields = {
        "edits": [
            "gray_tokens eps=0.5 eps_end=1.0 where=blocks blocks=0",
            "gray_tokens eps=0.9 method=dct where=blocks blocks=1",
            "gray_tokens eps=1.0 eps_end=0.8 eps_schedule=cosine where=pixels",
        ],
        "patch_size": 2,
    }
    run(tmp_path / "whole", **fields)
    signal_at(monkeypatch, 5, signal.SIGTERM)
    assert run(tmp_path / "stopped", **fields).status == "terminated"
    saved = tomllib.loads((tmp_path / "stopped" / "recipe.toml").read_text())["edits"]
    assert [call.get("floor") for call in saved] == [1e-6, None, 1e-6]
    assert run(tmp_path / "stopped", **fields).status == "finished"
    assert_bitwise(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))
    found = open_run(tmp_path / "whole", device="cpu").model("last")
    powers = {(edit.where, edit.block): edit.settings["eps"] for edit in wp.edits(found)}
    assert powers == {("blocks", 0): 1.0, ("blocks", 1): 0.9, ("pixels", None): pytest.approx(0.8)}
    with pytest.raises(ValueError, match="holds a run of another recipe"):
        run(tmp_path / "whole", edits=fields["edits"][:2], patch_size=2)


def test_a_floor_that_is_given_stays(tmp_path) -> None:
    run(tmp_path, edits=["gray_tokens eps=0.7 floor=0.01"], epochs=1)
    model = open_run(tmp_path, device="cpu").model("last")
    assert wp.edits(model)[0].settings["floor"] == 0.01


@pytest.mark.parametrize("strength", ["3", "exact"])
def test_edits_of_weights_are_trained_kept_and_opened_again(tmp_path, strength) -> None:
    edits = [f"condition_weights which=qv strength={strength}", "normalise_spectrum which=ffn init=identity"]
    run(tmp_path, edits=edits, epochs=1)
    opened = open_run(tmp_path)
    model = opened.model("last")
    assert {edit.kind for edit in wp.edits(model)} == {"condition_weights", "normalise_spectrum"}
    saved = load_file(tmp_path / "last" / "model.safetensors")
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in saved.items())
    assert saved.keys() == state.keys()
    assert any(name.endswith("weight_edit.correction") for name in saved) == (strength == "exact")
    gamma = saved["blocks.0.mlp.fc1.weight_edit.gamma"]
    # Trained, from the largest singular value of the weight at the start.
    plain = dataclasses.replace(opened.recipe, edits=())
    start = build_model(plain, classes=10, channels=1).model.blocks[0].mlp.fc1.weight
    assert abs(gamma.item() - torch.linalg.matrix_norm(start, 2).item()) > 1e-6
    folded = copy.deepcopy(model)
    wp.fold(folded)
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)
    assert "condition_weights" not in str(wp.edits(folded))


def test_alarms_are_in_the_records_of_a_run(tmp_path) -> None:
    run(tmp_path, edits=["remove_skips which=attention"], monitor_every=2, epochs=1)
    lines = read_run(tmp_path)
    alarms = [line for line in lines if line["event"] == "alarm" and line["name"] == "rank collapse"]
    assert alarms
    assert alarms[0]["blocks"] == [0, 1]
    assert alarms[0]["evidence"].startswith("from block 0 on")
    assert "wp.initialise(model, 'skipless')" in alarms[0]["remedy"]
    (at,) = (line for line in lines if line["event"] == "monitor" and line["update"] == alarms[0]["update"])
    assert at["alarm/rank_collapse"] == 2
