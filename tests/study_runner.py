"""Studies without training: a script in the place of ``wellposed train``, with accuracies of its own."""

import dataclasses
import io
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from wellposed.study import ledger, running
from wellposed.study.plan import RunRecord, Study

SCRIPT = """
import json, sys, tomllib
from pathlib import Path

recipe, folder = tomllib.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[3])
with (folder / "calls.txt").open("a") as calls:
    calls.write("called\\n")
if recipe.get("epochs") == 13 and recipe.get("remove_skips") == "ffn":
    sys.exit(1)
if recipe.get("start_from") and not (Path(recipe["start_from"]) / "result.json").exists():
    sys.exit(1)
points = 90.0 + 0.1 * recipe["seed"]
points -= {"attention": 20.0, "ffn": 2.0}.get(recipe.get("remove_skips"), 0.0)
points -= 5.0 * (recipe["init"] == "timm") + 1.0 * (recipe.get("lr") == 3e-4)
points += 1.0 * ("graying" in recipe) + 2.0 * ("broadcast" in recipe) + 3.0 * ("start_from" in recipe)
points -= 30.0 * (recipe["epochs"] == 5)
points += 0.5 * recipe["uniform_heads"]
test = {"update": 2, "epoch": 2, "loss": 0.5}
if recipe["task"] != "mae":
    test["accuracy"] = points / 100
lines = [{"event": "train", "update": 1, "loss": 1.0}, {"event": "test", **test, "update": 1, "epoch": 1},
         {"event": "train", "update": 2, "loss": 0.5}, {"event": "test", **test}]
(folder / "run.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
(folder / "recipe.toml").write_text(Path(sys.argv[1]).read_text())
result = {"finished": recipe["epochs"] != 14, "nonfinite": int(recipe["epochs"] == 14), "test": test}
(folder / "result.json").write_text(json.dumps(result))
sys.exit(0 if result["finished"] else 3)
"""


def after(folder: Path, study: Path) -> list[dict[str, Any]]:
    """Records of two blocks with two heads, such as a diagnosis gives."""
    grayed = "graying" in (folder / "recipe.toml").read_text()
    rows: list[dict[str, Any]] = []
    for block in (0, 1):
        kappas = {"input": 50.0, "attention.branch": 400.0, "attention.skip": 30.0, "ffn.branch": 20.0}
        kappas |= {"ffn.skip": 30.0, "ffn.sum": 40.0}
        for position, kappa in kappas.items():
            value = kappa / 2 if grayed else kappa
            rows.append({"measure": "kappa", "block": block, "position": position, "value": value})
        for head in (None, 0, 1):
            where = {"block": block, **({} if head is None else {"head": head})}
            rows.append({"measure": "entropy", **where, "value": 0.5})
    return rows


def run(study: Study, tmp_path: Path, **options: Any) -> tuple[running.Outcome, str]:
    """The outcome and what was printed."""
    outcomes, text = run_all([study], tmp_path, **options)
    return outcomes[0], text


def without_figure(study: Study) -> Study:
    def report(records: Any) -> Any:
        return dataclasses.replace(study.report(records), draw=None)

    return dataclasses.replace(study, report=report)


def run_all(
    studies: list[Study], tmp_path: Path, *, draw: bool = False, **options: Any
) -> tuple[list[running.Outcome], str]:
    """Without the figures unless they are asked for: drawing takes longer than the rest."""
    script = tmp_path / "runner.py"
    script.write_text(SCRIPT)
    console = Console(file=io.StringIO(), width=300)
    measured = [
        study if study.after is None else dataclasses.replace(study, after=after) for study in studies
    ]
    measured = measured if draw else list(map(without_figure, measured))
    usual: dict[str, Any] = {"out": tmp_path / "out", "seeds": [0, 1], "jobs": 4}
    command = [sys.executable, "-S", "-E", str(script)]
    outcomes = running.run_all(measured, **usual | options, command=command, console=console)
    return outcomes, console.file.getvalue()  # type: ignore[attr-defined]


def calls(pool: Path) -> dict[str, int]:
    """How often each run of a pool was started."""
    return {path.parent.name: len(path.read_text().splitlines()) for path in pool.glob("*/calls.txt")}


def runs_of(folder: Path) -> list[RunRecord]:
    runs, _, strange = ledger.read(folder)
    assert not strange
    return runs
