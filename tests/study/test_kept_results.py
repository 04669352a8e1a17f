"""The tables in results/ are what this version reads off the records beside them."""

from pathlib import Path

import pytest

from wellposed.study import catalogue
from wellposed.study.files import read_summary, write_table
from wellposed.study.session import Session

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "results" / "studies"
FOLDERS = sorted(path.parent for path in KEPT.glob("*/records.jsonl"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tables_are_those_of_the_records(folder: Path, tmp_path) -> None:
    summary = read_summary(folder)
    session = Session(
        catalogue.get(summary["study"]),
        summary["scale"],
        data=(),
        seeds=(),
        folder=folder,
        pool=tmp_path,
        changes=summary["changes"],
    )
    assert not session.dropped
    report = session.study.report(session.records())
    assert (report.verdict, report.reason) == (summary["verdict"], summary["reason"])
    for name, rows in report.tables.items():
        write_table(tmp_path / f"{name}.csv", rows)
        assert (tmp_path / f"{name}.csv").read_text() == (folder / f"{name}.csv").read_text(), name
