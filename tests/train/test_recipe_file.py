"""Recipes as files."""

import os
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.train.recipe import Recipe, combine, read_recipe, recipe_text, write_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = sorted(RECIPES.rglob("*.toml"))

numbers = st.floats(allow_nan=False, allow_infinity=False)
shares = st.floats(0, 1, exclude_min=True)
plain = st.recursive(
    st.text() | st.integers() | numbers | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
recipes = st.builds(
    Recipe,
    data=st.text(),
    model=st.text(),
    model_options=st.dictionaries(st.text(), plain, max_size=4),
    start_from=st.none() | st.text(),
    edits=st.lists(
        st.fixed_dictionaries(
            {"edit": st.just("gray_tokens"), "where": st.just("blocks")},
            optional={
                "eps": shares,
                "method": st.sampled_from(["svd", "dct"]),
                "floor": shares,
                "blocks": st.lists(st.integers(0, 99), max_size=3),
            },
        ),
        max_size=3,
    ),
    lr=st.floats(0, exclude_min=True, allow_infinity=False),
    weight_decay=st.floats(0, allow_infinity=False),
    clip_grad=st.none() | shares,
    limit=st.none() | st.integers(min_value=1),
    compile=st.none() | st.booleans(),
    trackers=st.lists(st.text(), max_size=3),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=150, deadline=None)
@given(recipes)
def test_written_then_read_is_the_same_recipe(recipe: Recipe) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        write_recipe(recipe, path)
        assert combine(read_recipe(path), {}) == recipe
        assert [file.name for file in Path(folder).iterdir()] == ["recipe.toml"]
    assert Recipe.from_mapping(recipe.to_mapping()) == recipe


def test_text_has_the_groups_and_the_options_last() -> None:
    text = recipe_text(Recipe(model_options={"depth": 6}, lr=0.1))
    assert text.index("# Data") < text.index("# Optimizer") < text.index("\nlr = 0.1\n")
    assert text.endswith("\n[model_options]\ndepth = 6\n")
    assert "edits =" not in text


def test_an_empty_file_is_a_recipe(tmp_path) -> None:
    (tmp_path / "empty.toml").write_text("# nothing\n")
    assert read_recipe(tmp_path / "empty.toml") == {}


@pytest.mark.parametrize(
    ("name", "content", "error", "says"),
    [
        ("a.toml", "epoch = 3", ValueError, "unknown field 'epoch'; did you mean 'epochs'?"),
        ("a.toml", "lr = 'big'", TypeError, "lr must be a number, got 'big'."),
        ("a.toml", "lr = -1", ValueError, "lr must be positive, got -1.0."),
        ("a.toml", "[optimizer]\nlr = 1", TypeError, "optimizer must be a text, got {'lr': 1}"),
        ("a.toml", "data = 2024-01-01", TypeError, "data must be a text"),
        ("a.toml", "seed = 1\nlr = = 2", ValueError, "line 2"),
        ("a.toml", "seed = 1\nlr =", ValueError, "line 2"),
        ("a.toml", "seed = 1\nseed = 2\n", ValueError, "is not valid TOML"),
        ("a.json", "{}", ValueError, "must end in .toml, got"),
        ("a.yaml", "epochs: 3", ValueError, "recipes are TOML"),
        ("a.toml", b"data = 1\nmodel = '\xff'", ValueError, "in line 2"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, error, says) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(error) as caught:
        read_recipe(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_no_file(tmp_path) -> None:
    (tmp_path / "digits.toml").touch()
    with pytest.raises(FileNotFoundError, match=r"no recipe .*digit\.toml; did you mean 'digits\.toml'\?"):
        read_recipe(tmp_path / "digit.toml")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        read_recipe(tmp_path)


def test_flags_go_over_the_file() -> None:
    file = {"lr": 0.1, "layer_decay": 0.5, "model_options": {"depth": 6, "num_heads": 3}}
    recipe = combine(file, {"lr": 0.2, "layer_decay": None, "model_options": {"depth": 2}})
    assert (recipe.lr, recipe.layer_decay) == (0.2, None)
    assert recipe.model_options == {"depth": 2, "num_heads": 3}
    assert file["model_options"] == {"depth": 6, "num_heads": 3}


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "recipe.toml"
    write_recipe(Recipe(epochs=1), path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_recipe(Recipe(epochs=2), path)
    assert read_recipe(path)["epochs"] == 1
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="UTF-8"):
        write_recipe(Recipe(data="\udcff"), path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(RECIPES)))
def test_our_recipes_are_read_and_say_what_they_are(file) -> None:
    assert file.read_text().startswith("# ")
    recipe = combine(read_recipe(file), {"data": "cifar10:DIR"})
    assert (file.stem in ("baseline", "digits", "cifar10-vit-tiny")) == (recipe.edits == ())


def test_our_recipes() -> None:
    assert combine(read_recipe(RECIPES / "digits.toml"), {}) == Recipe()
    names = {str(file.relative_to(RECIPES).with_suffix("")) for file in FILES}
    ablations = {"skip-ablation/no-attention-skips", "skip-ablation/no-ffn-skips", "skip-ablation/baseline"}
    assert ablations <= names
    for folder in ("skip-ablation", "graying", "broadcasting"):
        # Within a folder nothing but the edit differs.
        files = [tomllib.loads(file.read_text()) for file in (RECIPES / folder).glob("*.toml")]
        assert len({str({k: v for k, v in values.items() if k != "edits"}) for values in files}) == 1
        assert len(files) == 3


def test_fields_that_went_are_read_as_they_always_are_now_or_refused(tmp_path) -> None:
    file = tmp_path / "old.toml"
    file.write_text("epochs = 3\nskip_unreadable = false")
    assert read_recipe(file) == {"epochs": 3}
    file.write_text("skip_unreadable = true")
    with pytest.raises(
        ValueError, match=r"old\.toml has 'skip_unreadable', .*wellposed pack --skip-unreadable"
    ):
        read_recipe(file)
    with pytest.raises(ValueError, match="on_nonfinite must be one of stop, skip, got 'rollback'"):
        Recipe.from_mapping({"on_nonfinite": "rollback"})
