"""The tables in results/ are what this version reads off the records beside them."""

import subprocess
import sys
from pathlib import Path

import pytest

from wellposed.study import catalogue
from wellposed.study.files import read_summary, write_table
from wellposed.study.session import Session

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "results" / "studies"
FOLDERS = sorted(path.parent for path in KEPT.glob("*/records.jsonl"))


def test_there_are_records_of_all_studies() -> None:
    assert {read_summary(folder)["study"] for folder in FOLDERS} == set(catalogue.expanded(["all"]))


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


def test_the_picture_of_all_effects_is_that_of_the_tables(tmp_path) -> None:
    script = [str(ROOT / "benchmarks" / "effects_picture.py"), "--studies", str(KEPT)]
    subprocess.run([sys.executable, *script, "--out", str(tmp_path / "effects")], check=True)
    assert (tmp_path / "effects.csv").read_text() == (ROOT / "results" / "effects.csv").read_text()
    assert (tmp_path / "effects.png").stat().st_size > 10_000
