"""The demo trains, measures what it prints, and writes a page of it."""

import io
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from wellposed import demo
from wellposed.cli import app
from wellposed.records import Record
from wellposed.report import read_data
from wellposed.train import open_run

FEW = (demo.PLAIN, demo.NO_ATTENTION)
TINY = {"limit": 128, "model_options": {"embed_dim": 12, "depth": 1, "num_heads": 3}, "eval_every": 1}


@pytest.fixture(scope="module", autouse=True)
def small():
    """Two variants of a tiny model on a few images."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "COMMON", {**demo.COMMON, **TINY})
        patch.setattr(demo, "VARIANTS", {name: demo.VARIANTS[name] for name in FEW})
        patch.setenv("COLUMNS", "120")
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """A demo by its command: where, what it printed, and its table."""
    out = tmp_path_factory.mktemp("here") / "demo"
    result = CliRunner().invoke(app, ["demo", "--epochs", "2", "--seeds", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    table = json.loads((out / demo.MARK).read_text())["table"]
    return out, result.output, table


def test_the_command_prints_a_table_and_says_what_it_wrote(made) -> None:
    out, output, table = made
    for row in table:
        assert f"{row['name']} " in output
        assert f"{row['accuracy']:.1%}" in output
    assert "128 training and 400 test images, 2 epochs" in output
    assert "Xavier" in output
    tables, _, _ = output.partition("written to")
    assert "one run each" in " ".join(tables.split())
    assert max(map(len, tables.splitlines()[-30:])) <= 80
    plain, removed = (row["accuracy"] for row in table)
    line = next(line for line in tables.splitlines() if "undecided: one run" in line)
    assert f" {100 * (removed - plain):+.1f} " in line
    assert (out / demo.PAGE).resolve().as_uri() in output


def test_the_same_seed_gives_the_same_table(made, tmp_path, monkeypatch) -> None:
    """In the folder of a demo that is done, which starts anew; with one variant, as each start takes long."""
    out, _, table = made
    shutil.copytree(out, tmp_path / "demo")
    monkeypatch.setattr(demo, "VARIANTS", {demo.NO_ATTENTION: demo.VARIANTS[demo.NO_ATTENTION]})
    again = demo.run(tmp_path / "demo", epochs=2, seeds=1, console=Console(file=io.StringIO()))
    assert again.exit_code == 0
    assert [demo._plain(row) for row in again.rows] == [
        row for row in table if row["name"] == demo.NO_ATTENTION
    ]
    assert [path.name for path in (tmp_path / "demo" / demo.RUNS).glob("*/run.jsonl")] == ["run.jsonl"]


def test_the_page_has_the_numbers_of_the_table(made) -> None:
    out, _, table = made
    page = read_data((out / demo.PAGE).read_text(encoding="utf-8"))
    shown = {row["name"]: row for row in page["runs"]}
    assert list(shown) == [f"{row['name']}-0" for row in table]
    for row in table:
        assert shown[f"{row['name']}-0"]["accuracy"] == pytest.approx(100 * row["accuracy"])
    assert {"conditioning", "density", "training", "provenance"} <= set(page)


def test_kappa_is_that_of_the_tokens_of_the_last_weights(made) -> None:
    out, _, table = made
    opened = open_run(out / demo.RUNS / f"{demo.PLAIN}-0", demo.PROBE_IMAGES)
    model = opened.model("last")
    caught: list[torch.Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda block, args: caught.append(args[0]))
    with torch.inference_mode():
        model(opened.images)
    expected = statistics.median(torch.linalg.cond(caught[0].double()).tolist())
    assert table[0]["kappa_in"]["median"] == pytest.approx(expected)


def test_a_run_that_fails_is_told_with_the_end_of_its_log(tmp_path: Path, monkeypatch) -> None:
    code = "import sys; print('no room here'); sys.exit(1)"
    monkeypatch.setattr(demo, "COMMAND", (sys.executable, "-c", code))
    result = CliRunner().invoke(app, ["demo", "--seeds", "1", "--out", str(tmp_path / "demo")])
    assert result.exit_code == 1
    assert f"{demo.PLAIN}-0 failed: exit code 1" in result.output
    assert "no room here" in result.output
    assert not (tmp_path / "demo" / demo.PAGE).exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "holds 'thesis.tex' and no demo.json; take another --out" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_interrupted_demo_goes_on_and_another_starts_anew(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    recipes = {"all-skips": {"epochs": 2}}
    demo._make_room(out, recipes)
    begun = out / demo.RUNS / "all-skips" / "run.jsonl"

    def begin() -> None:
        begun.parent.mkdir(exist_ok=True)
        begun.write_text("{}")

    begin()
    demo._make_room(out, recipes)
    assert begun.exists()
    demo._make_room(out, {"all-skips": {"epochs": 3}})
    assert not begun.exists()
    begin()
    mark = json.loads((out / demo.MARK).read_text())
    (out / demo.MARK).write_text(json.dumps(mark | {"finished": True}))
    demo._make_room(out, {"all-skips": {"epochs": 3}})
    assert not begun.exists()


def row(name: str, accuracy: float | dict[int, float], kappa: float, status: str = "ok") -> demo.Row:
    attention = Record(measure="kappa", value=kappa, status=status)
    other = Record(measure="entropy", value=0.9)
    by_seed = accuracy if isinstance(accuracy, dict) else {0: accuracy}
    return demo.Row(name, by_seed, other, attention, other, other, (other, attention))


def test_the_sentences_tell_what_was_measured() -> None:
    rows = [row(demo.PLAIN, 0.95, 2e3), row(demo.NO_FFN, 0.93, 2e4)]
    assert demo.closing(rows) == []
    rows.append(row(demo.NO_ATTENTION, 0.96, 9e6, "at least"))
    seen, following = demo.closing(rows)
    assert "attention's skips hold the conditioning" in seen
    assert "kappa ≥ 9e6 instead of 2,000" in seen
    assert "wellposed diagnose MODEL" in following
    rows[-1] = row(demo.NO_ATTENTION, 0.7, 1e3)
    assert "these runs do not show that attention's skips hold the conditioning" in demo.closing(rows)[0]
    rows[1:] = [row(demo.NO_FFN, 0.7, 8e6, "at least"), row(demo.NO_ATTENTION, 0.7, 9e6, "at least")]
    assert "do not show" in demo.closing(rows)[0]


def test_several_seeds_have_an_interval() -> None:
    plain = row(demo.PLAIN, {0: 0.90, 1: 0.92, 2: 0.94}, 2e3)
    worse = row(demo.NO_FFN, {0: 0.80, 1: 0.83, 2: 0.83}, 2e4)
    alike = row(demo.CB, {0: 0.91, 1: 0.92, 2: 0.92}, 2e4)
    single = row(demo.GRAYED, {0: 0.91}, 2e4)
    assert demo.differences_table([worse, alike]) is None
    table = demo.differences_table([plain, worse, alike, single])
    assert [list(column.cells) for column in table.columns] == [
        [demo.NO_FFN, demo.CB, demo.GRAYED],
        ["-10.0", "-0.3", "+1.0"],
        ["-12.5 to -7.5", "-4.1 to +3.5", "-"],
        ["lower", "undecided: zero is inside", "undecided: one run"],
    ]


def test_help_needs_no_torch() -> None:
    code = "import sys; import wellposed.cli, wellposed.demo; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_there() -> None:
    import wellposed as wp

    for name in wp.__all__:
        assert getattr(wp, name) is not None
    assert set(dir(wp)) == set(wp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'grey_tokens'"):
        _ = wp.grey_tokens
