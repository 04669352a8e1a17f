"""Every Python block of the README and the docs runs, and so do commands, on a few images where they train.

What downloads, needs many GPUs or takes hours is read by its own parser instead, with its recipe made.
"""

import csv
import json
import re
import shutil
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

import notebook
import own_model
from benchmarks.__main__ import app_of
from clean_tables import restored_tables
from docs_blocks import PAGES, ROOT, Block, all_blocks, commands, wellposed_words
from studies.__main__ import app as studies_app
from studies.study import get as get_study
from wellposed import Diagnosis
from wellposed.cli import app
from wellposed.models import build

_BLOCKS = all_blocks()
PYTHON = [pytest.param(block, id=block.name) for block in _BLOCKS if block.python]
RUN = [pytest.param(block, id=block.name) for block in _BLOCKS if block.runs]


def _lines(keep: Callable[[Block, list[str]], bool]) -> list[Any]:
    """The commands that are meant, each with its page and place."""
    return [
        pytest.param(words, id=f"{block.name}-{number}")
        for block in _BLOCKS
        for number, words in enumerate(commands(block))
        if keep(block, words)
    ]


LINES = _lines(lambda block, words: True)
WITH_COMMANDS = [pytest.param(block, id=block.name) for block in _BLOCKS if commands(block)]
TARGETS = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)

EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
)


TRAINING = (["wellposed", "train"], ["wellposed", "sweep"])
_FEW = {"epochs": 1, "warmup_epochs": 0, "limit": 8, "batch_size": 4, "trackers": "none", "monitor_every": 0}
SHORT = {
    "train": [part for name, value in _FEW.items() for part in (f"--{name.replace('_', '-')}", str(value))],
    "sweep": [part for name, value in _FEW.items() for part in ("--set", f"{name}={value}")],
}
"""What makes any training short; the last of two equal flags counts."""


def with_one_seed(line: list[str]) -> list[str]:
    """Seeds add up where the option is repeated, so that those of the line are taken out."""
    if "--seeds" in line:
        at = line.index("--seeds")
        line = line[:at] + line[at + 2 :]
    return [*line, "--seeds", "0"]


@pytest.fixture
def my_model(monkeypatch):
    """The docs import the reader's own model by this name."""
    own_model.MyBlock, own_model.MyModel = own_model.OwnBlock, own_model.OwnModel
    own_model.MyPatches = own_model.OwnPatches
    monkeypatch.setitem(sys.modules, "my_model", own_model)
    with restored_tables():
        yield


@pytest.fixture
def readers_folder(tmp_path: Path, monkeypatch) -> Path:
    """What the reader has: images in DIR, a recipe, a file of weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "recipe.toml").write_text((ROOT / "recipes" / "digits.toml").read_text())
    generator = np.random.default_rng(0)
    for index in range(16):
        folder = tmp_path / "DIR" / f"class{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path


@pytest.mark.usefixtures("my_model")
@pytest.mark.parametrize("block", PYTHON)
def test_block_runs(block: Block, tmp_path, monkeypatch) -> None:
    if block.needs is not None:
        pytest.importorskip(block.needs)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = types.ModuleType("documentation")
    monkeypatch.setitem(sys.modules, "documentation", module)
    exec(compile(block.python, block.name, "exec"), module.__dict__)


@pytest.mark.parametrize("block", RUN)
def test_marked_commands_run(block: Block, readers_folder: Path) -> None:
    if any("mine.safetensors" in words for words in commands(block)):
        options = {"img_size": 64, "depth": 3, "num_classes": 10}
        save_file(build("vit_tiny_patch16_224", **options).state_dict(), "mine.safetensors")
    lines = [wellposed_words(words) for words in commands(block)]
    assert lines
    for line in lines:
        assert line is not None, "only wellposed commands can be run"
        result = CliRunner().invoke(app, line, catch_exceptions=False)
        assert result.exit_code == 0, f"wellposed {' '.join(line)}\n{result.output}"


@pytest.mark.usefixtures("readers_folder")
@pytest.mark.parametrize("block", WITH_COMMANDS)
def test_command_exists_as_written(block: Block) -> None:
    for words in commands(block):
        try:
            check_command(words)
        except BaseException as error:
            error.add_note(f"the command is: {' '.join(words)}")
            raise


def check_command(words: list[str]) -> None:
    """Raise unless the command, its flags and the files of the repository that it names exist."""
    line = wellposed_words(words)
    if line is not None:
        _parse(line)
    elif words[0] == "make":
        assert set(words[1:]) <= set(TARGETS), words
    elif words[0] == "pip":
        wanted = {name for word in words for name in re.findall(r"(?<=[\[,])\w+(?=[\],])", word)}
        assert wanted <= EXTRAS, f"{wanted - EXTRAS} of pyproject.toml"
    elif words[:3] == ["python", "-m", "benchmarks"]:
        typer.main.get_command(app_of(words[3])).make_context(words[3], words[4:])
    elif words[:3] == ["python", "-m", "studies"]:
        context = typer.main.get_command(studies_app).make_context("studies", words[3:])
        for name in context.params["name"] or ():
            assert name in ("all", "NAME") or get_study(name)
    for word in words[1:]:
        if re.match(r"(examples|benchmarks|recipes)/", word):
            assert (ROOT / word).exists(), f"there is no {word}"


def without_out(words: list[str]) -> tuple[str, ...]:
    at = words.index("--out") if "--out" in words else len(words)
    return *words[:at], *words[at + 2 :]


def _trainings() -> list[Any]:
    """The commands of each block that train, but for those that stand on an earlier page too."""
    seen, found = set(), []
    for block in _BLOCKS:
        trainings = [words for words in commands(block) if words[:2] in TRAINING and "--engine" not in words]
        lines = [] if block.runs else trainings  # a cluster has a test of its own
        # A later command of its block may read the folder, so that all of a block are run, or none.
        if not {without_out(words) for words in lines} <= seen:
            found.append(pytest.param(lines, id=block.name))
        seen |= {without_out(words) for words in lines}
    return found


TRAINS = _trainings()


@pytest.mark.parametrize("lines", TRAINS)
def test_training_commands_run_on_a_few_images(lines: list[list[str]], readers_folder: Path) -> None:
    """One after the other as the reader would; one epoch each."""
    for words in lines:
        line = [word.replace("cifar10:DIR", "folder:DIR") for word in words[1:]]
        line = with_one_seed(line) if line[0] == "sweep" else line
        result = CliRunner().invoke(app, [*line, *SHORT[line[0]]], catch_exceptions=False)
        assert result.exit_code == 0, f"{' '.join(words)}\n{result.output}"


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs and a diagnosis of one, which a block may take as its reader's own."""
    folder = tmp_path_factory.mktemp("two")
    for line in (
        ["train", *SHORT["train"], "--out", str(folder / "plain")],
        ["train", *SHORT["train"], "--edit", "gray_tokens method=dct", "--out", str(folder / "grayed")],
        ["diagnose", str(folder / "plain"), "--out", str(folder / "diagnosed")],
    ):
        assert CliRunner().invoke(app, line, catch_exceptions=False).exit_code == 0
    return folder


DOWNLOADS = {"--pretrained", "hf:FOLDER_OR_NAME"}
DIAGNOSES = _lines(
    lambda block, words: not block.runs and words[1:2] == ["diagnose"] and not DOWNLOADS & {*words}
)


@pytest.mark.parametrize("words", DIAGNOSES)
def test_diagnose_commands_run_on_a_smaller_model(
    words: list[str], two_runs: Path, readers_folder: Path
) -> None:
    """As they are written, but for the size of the model, a ViT of three blocks."""
    size = {"img_size": 64, "depth": 3, "num_classes": 10}
    for name in ("mine.safetensors", "FILE.safetensors"):
        save_file(build("vit_tiny_patch16_224", **size).state_dict(), name)
    line = [word.replace("vit_base", "vit_tiny").replace("0,11", "0,2") for word in words[1:]]
    if line[1] == "runs/first":
        shutil.copytree(two_runs / "plain", "runs/first")
        shutil.copytree(two_runs / "grayed", "runs/second")
    elif "--model-option" not in line:
        line += [part for name, value in size.items() for part in ("--model-option", f"{name}={value}")]
    if "--compare" in line and line[line.index("--compare") + 1] == "report":
        shutil.copytree(two_runs / "diagnosed", "report")
    result = CliRunner().invoke(app, line, catch_exceptions=False)
    assert result.exit_code == 0, f"{' '.join(words)}\n{result.output}"
    if "--out" in line:
        assert (Path(line[line.index("--out") + 1]) / "diagnosis.json").exists()


_LISTED = ["python", "-m", "studies"]
REPORTS = _lines(
    lambda block, words: (
        (words[:2] == ["wellposed", "report"] or "--report-only" in words or words == _LISTED)
        and not block.runs
    )
)


@pytest.mark.parametrize("words", REPORTS)
def test_report_commands_run(words: list[str], two_runs: Path, readers_folder: Path) -> None:
    """On two runs of one epoch, a diagnosis, and the records of a study that are in the repository."""
    for folder in ("try/skips", "studies/skip_ablation/small"):
        shutil.copytree(ROOT / "studies" / "skip_ablation" / "small", folder)
    if any(word in words for word in ("runs/plain", "RUN_OR_DIAGNOSIS...")):
        for name in ("plain", "grayed"):
            shutil.copytree(two_runs / name, Path("runs") / name)
        shutil.copytree(two_runs / "diagnosed", "diagnosed")
    line = [word.replace("RUN_OR_DIAGNOSIS...", "runs/plain") for word in words]
    result = invoked(line)
    assert result.exit_code == 0, f"{' '.join(words)}\n{result.output}"


def invoked(words: list[str]) -> Any:
    """A line of wellposed's, or of the studies'."""
    if words[:3] == _LISTED:
        return CliRunner().invoke(studies_app, words[3:], catch_exceptions=False)
    return CliRunner().invoke(app, words[1:], catch_exceptions=False)


# The other studies are run in tests/studies; what they train here would take hours.
STUDIES = _lines(lambda block, words: words[:3] == _LISTED and {"density", "digits"} <= {*words})
STUDIES_OF_ONE_SEED = {tuple(with_one_seed(each.values[0])) for each in STUDIES}


@pytest.mark.parametrize("words", sorted(STUDIES_OF_ONE_SEED), ids=" ".join)
def test_study_commands_run_on_a_few_images(words: tuple[str, ...], readers_folder: Path) -> None:
    line = [*words, "--out", "records"]
    for name, value in {**_FEW, "limit": 64, "batch_size": 32}.items():
        line += ["--set", f"{name}={value}"]
    result = invoked(line)
    assert result.exit_code == 0, f"{' '.join(words)}\n{result.output}"
    assert Path("records/table.csv").is_file()


def _parse(line: list[str]) -> None:
    """The command line as typer reads it; a recipe is also made, without training."""
    command = typer.main.get_command(app)
    if line[0] == "train":
        result = CliRunner().invoke(app, [*line, "--dry-run"])
        assert result.exit_code == 0, f"wellposed {' '.join(line)}\n{result.output}"
        return
    context = command.make_context("wellposed", list(line), resilient_parsing=False)
    while hasattr(command, "commands"):
        name, command, line = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, line, parent=context)


def test_the_checks_can_fail(readers_folder: Path) -> None:
    for wrong in (
        "wellposed diagnoze vit_base_patch16_224 --images DIR",
        "wellposed diagnose vit_base_patch16_224 --pictures DIR",
        "wellposed train --edits gray_tokens",
        "torchrun --nproc-per-node 8 -m wellposed train --epoch 3",
        "python -m benchmarks graying --token 3",
        "python -m studies densiti",
        "python examples/none.py",
        "make cake",
        "pip install .[transformer,datasets]",
    ):
        with pytest.raises(BaseException):  # noqa: B017, PT011 typer's own errors are of several kinds
            check_command(wrong.split())


def test_blocks_and_commands_are_found() -> None:
    assert len(PYTHON) > 15
    assert len(LINES) > 30
    assert len(RUN) >= 2
    assert min(len(TRAINS), len(DIAGNOSES), len(REPORTS)) >= 4
    assert STUDIES
    sample = Block(ROOT / "x.md", 0, "", "wellposed a [--b c] \\\n   --d  # why\nsome output\n", "")
    assert commands(sample) == [["wellposed", "a", "--b", "c", "--d"]]


def test_the_numbers_of_the_ideas_are_those_measured() -> None:
    text = (ROOT / "docs" / "ideas.md").read_text(encoding="utf-8")
    lines = (ROOT / "results" / "ideas.csv").read_text(encoding="utf-8").splitlines()[1:]
    rows = list(csv.DictReader(lines))
    after = {row["series"]: float(row["y"]) for row in rows if row["picture"] == "skip" and row["x"] == "10"}
    plain, skipped = after["linear attention, no skip"], after["linear attention + skip"]
    assert f"the linear attention gives {plain:.0f}, with its skip {skipped:.1f}" in text
    assert f"({after['softmax attention, no skip']:,.0f} at kappa 10)" in text
    values = {row["series"]: [] for row in rows if row["picture"] == "graying"}
    for row in rows:
        if row["picture"] == "graying":
            values[row["series"]].append(float(row["y"]))
    before, grayed = (s[0] / s[-1] for s in (values["eps 1"], values["eps 0.7"]))
    assert f"from {before:.1f} to {grayed:.1f} at eps 0.7" in text.replace("\n", " ")


def test_the_home_page_shows_what_was_measured() -> None:
    diagnosis = Diagnosis.from_json(ROOT / "results" / "deit-tiny-imagenet.json")
    (shown,) = (
        block.text for block in _BLOCKS if block.page.name == "README.md" and block.language == "text"
    )
    assert shown == f"{diagnosis}\n"
    picture = (ROOT / "docs" / "images" / "edits.svg").read_text(encoding="utf-8")
    for record in diagnosis.select("kappa", block=0):
        if not record.position.endswith(".skip"):
            said = rf">{re.escape(record.position)}</text><text [^>]*>{re.escape(record.text())}</text>"
            assert re.search(said, picture), record.position
    (entropy,) = diagnosis.select("entropy", block=0)
    assert f">entropy {entropy.value:.2f}</text>" in picture


def test_the_tutorial_runs(monkeypatch, tmp_path: Path) -> None:
    tutorial = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    printed = notebook.run(tutorial)
    kept = ["".join(line for each in cell["outputs"] for line in each["text"]) for cell in _code(tutorial)]
    lines = [[len(text.splitlines()) for text in texts[:-1]] for texts in (printed, kept)]
    assert lines[0] == lines[1], "python tools/notebook.py docs/tutorial.ipynb"
    trained, _, edited, tuned, decided = printed
    assert float(re.search(r"accuracy ([\d.]+)", trained)[1]) > 50
    before, after = re.search(r"block 0 input +([\d,]+) +([\d,]+)", edited).groups()
    assert float(after.replace(",", "")) < float(before.replace(",", "")) / 2
    gain = re.search(r"\[([-+.\d]+), ([-+.\d]+)\]", tuned)
    low, high = map(float, gain.groups())
    assert decided.startswith("keep it" if low > 0 else "restore:" if high < 0 else "undecided")


def _code(tutorial: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in tutorial["cells"] if cell["cell_type"] == "code"]


def test_the_home_page_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 700
    assert len(text.splitlines()) <= 90


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
