"""What the folders of the studies hold follows from their records, and the records are as they were."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from studies import findings, runner
from studies import report as reporting
from studies.study import ROOT, Records, get
from wellposed import study_records
from wellposed.stats import judged
from wellposed.study_records import RECORDS, SUMMARY, RunRecord, claim_from_dict, claim_to_dict

FOLDERS = sorted(path.parent for path in ROOT.glob(f"*/*/{RECORDS}"))
DIGESTS = dict(line.split() for line in (Path(__file__).parent / "records.sha256").read_text().splitlines())
"""Of the records that were made before studies had folders; runs may have come to them since."""


def records_in(folder: Path) -> Records:
    ledger = study_records.read(folder)
    assert not ledger.torn
    assert not ledger.strange
    return Records(folder.name, ledger.runs, ledger.measured)  # type: ignore[arg-type]


def canonical(run: RunRecord) -> list[object]:
    result = [run.label, run.data, run.seed, run.recipe, run.state, run.result]
    return [*result, list(run.curve), list(run.measured), dict(run.chosen), run.role, run.run]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_tables_claims_and_page_are_those_of_the_records(folder: Path, tmp_path: Path) -> None:
    study, records = get(folder.parent.name), records_in(folder)
    report = study.report(records)
    claims = [claim_from_dict(claim_to_dict(claim)) for claim in judged(report.claims)]
    tables = {**report.tables, "claims": list(map(reporting.in_table, claims))}
    for name, rows in tables.items():
        reporting.write_table(tmp_path / f"{name}.csv", rows)
        assert (tmp_path / f"{name}.csv").read_text() == (folder / f"{name}.csv").read_text(), name
    summary = reporting.read_summary(folder)
    assert summary["claims"] == json.loads(json.dumps(list(map(claim_to_dict, claims))))
    assert summary["notes"] == list(report.notes)
    written = (folder.parent / "README.md").read_text()
    assert written == reporting.readme(summary["study"], study, folder.parent)
    # The recipes of the study are those that the results are of.
    for data, spec in summary["data"].items():
        runs = [run for run in records.runs if run.data == data and run.role in ("result", "start")]
        known = {(run.label, run.data, run.seed): run for run in runs}
        seeds = sorted({run.seed for run in runs})
        asked = runner.plan(study, records.scale, [spec], seeds, Path("runs"), summary["changes"])
        assert {each.key for each in asked} >= known.keys()
        runner.require_same(asked, known)


def test_the_records_are_those_that_were_measured() -> None:
    found = {}
    for line in DIGESTS:
        folder = ROOT / line
        if not folder.is_dir():
            continue
        records = records_in(folder)
        rows = sorted(json.dumps(canonical(run), sort_keys=True) for run in records.runs)
        rows += [json.dumps(row, sort_keys=True) for row in records.measured]
        found[line] = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    assert found == {line: DIGESTS[line] for line in found}
    assert found


def test_every_study_has_a_page_that_says_whether_it_was_run() -> None:
    for file, text in findings.pages().items():
        assert file.read_text() == text
        assert ("## Not run yet" in text) != bool(list(file.parent.glob(f"*/{SUMMARY}")))


def test_the_picture_of_all_effects_is_that_of_the_tables(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "studies.effects", "--out", str(tmp_path / "effects")]
    subprocess.run(command, check=True, cwd=ROOT.parent)
    kept = ROOT.parent / "results" / "effects.csv"
    assert (tmp_path / "effects.csv").read_text() == kept.read_text()
    assert (tmp_path / "effects.png").stat().st_size > 10_000


def test_the_findings_follow_the_records() -> None:
    page = findings.PAGE.read_text()
    assert findings.with_tables(page) == page
    words = [each for each in page.split() if any(letter.isalnum() for letter in each)]  # no bars of tables
    assert len(words) <= 1500
