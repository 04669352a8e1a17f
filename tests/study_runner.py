"""Studies without training: a script in the place of ``wellposed train``, with accuracies of its own."""

import dataclasses
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from studies import report as reporting
from studies import runner
from studies.study import Report, Study
from wellposed import study_records
from wellposed.stats import Claim
from wellposed.study_records import RunRecord, sentence

SCRIPT = """
import json, sys, tomllib
from pathlib import Path

recipe, folder = tomllib.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[3])
with (folder / "calls.txt").open("a") as calls:
    calls.write("called\\n")
edits = {edit["edit"]: edit for edit in recipe.get("edits", [])}
removed = edits.get("remove_skips", {}).get("which")
if recipe.get("epochs") == 13 and removed == "ffn":
    sys.exit(1)
if recipe.get("start_from") and not (Path(recipe["start_from"]) / "result.json").exists():
    sys.exit(1)
points = 90.0 + 0.1 * recipe["seed"]
points -= {"attention": 20.0, "ffn": 2.0}.get(removed, 0.0)
points -= 5.0 * (recipe["init"] == "timm") + 1.0 * (recipe.get("lr") == 3e-4)
points += 1.0 * ("gray_tokens" in edits) + 2.0 * ("broadcast_context" in edits)
points += 3.0 * ("start_from" in recipe)
points -= 30.0 * (recipe["epochs"] == 5)
points += 0.5 * ("uniform_heads" in edits)
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


def after(folder: Path) -> list[dict[str, Any]]:
    """Records of two blocks with two heads, such as a diagnosis gives."""
    grayed = "gray_tokens" in (folder / "recipe.toml").read_text()
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


@dataclass
class Done:
    """What a call of a study left, and what it printed."""

    outcome: runner.Outcome
    report: Report
    claims: list[Claim]
    folder: Path
    text: str


def run(
    study: Study,
    tmp_path: Path,
    *,
    name: str = "any",
    draw: bool = False,
    report: bool = True,
    **options: Any,
) -> Done:
    """Run a study and write its report, without the figure unless it is asked for."""
    script = tmp_path / "runner.py"
    script.write_text(SCRIPT)
    console = Console(file=io.StringIO(), width=300)
    if study.after is not None:
        study = dataclasses.replace(study, after=after)
    usual: dict[str, Any] = {"scale": "small", "data": ["digits"], "seeds": [0, 1], "jobs": 4}
    usual |= {"out": tmp_path / "out", "pool": tmp_path / "pool"}
    given = usual | options
    command = [sys.executable, "-S", "-E", str(script)]
    outcome = runner.run(study, **given, command=command, console=console)
    found, claims = reporting.write_report(
        name,
        study,
        outcome.records,
        given["out"],
        data=given["data"],
        changes=given.get("changes"),
        has_worked=outcome.has_worked,
        draw=draw,
    )
    console.print("\n".join(map(sentence, claims)))
    return Done(outcome, found, claims, given["out"], console.file.getvalue())  # type: ignore[attr-defined]


def calls(pool: Path) -> dict[str, int]:
    """How often each run of a pool was started."""
    return {path.parent.name: len(path.read_text().splitlines()) for path in pool.glob("*/calls.txt")}


def runs_of(folder: Path) -> list[RunRecord]:
    ledger = study_records.read(folder)
    assert not ledger.strange
    assert not ledger.torn
    return ledger.runs
