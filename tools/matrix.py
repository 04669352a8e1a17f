"""Which versions of the libraries work: the tests of their models, with the oldest and the newest versions.

    python tools/matrix.py                        both; writes results/versions.json and docs/versions.md
    python tools/matrix.py --newest --keep-torch  the newest alone, if there are newer ones; writes nothing

The environment of a column is this one with the packages of a folder in front of it: those that pip would
replace to have the column's versions.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import badges
from environments import ROOT, project, resolve
from outcomes import LIBRARIES

TESTS = ("tests/anatomy", "tests/surgery", "tests/probes")
OUTCOMES = ("passed", "refused", "failed")
RESULT = ROOT / "results" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
START, END = "<!-- versions: make matrix -->\n", "<!-- end of versions -->\n"

Column = dict[str, dict[str, Any]]


def oldest() -> dict[str, str]:
    """The lower bounds of pyproject.toml: of the libraries, and of accelerate, which they go with."""
    told = project()["project"]
    extras = told["optional-dependencies"]
    ranges = [Requirement(text) for text in told["dependencies"] + extras["transformers"] + extras["train"]]
    bounds = {
        range_.name: bound.version
        for range_ in ranges
        for bound in range_.specifier
        if bound.operator == ">="
    }
    return {name: bounds[name] for name in (*LIBRARIES, "accelerate")}


def replaced_for(column: str, keep_torch: bool = False) -> dict[str, str]:
    """What pip would replace in this environment for a column."""
    if column == "oldest":
        return resolve([".[test]", *(f"{name}=={version}" for name, version in oldest().items())])
    kept = {"torch", "torchvision"} if keep_torch else set()
    wanted = [f"{name}=={installed(name)}" if name in kept else name for name in (*LIBRARIES, "accelerate")]
    return resolve([".[test]", *wanted], "--upgrade")


def installed(name: str) -> str:
    return importlib.metadata.version(name).partition("+")[0]


def tested(column: str, replaced: dict[str, str]) -> Column:
    """Run the tests of the libraries' models with these packages replaced."""
    folder = ROOT / "build" / "matrix" / column
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcomes = folder.with_suffix(".jsonl")
    if replaced:
        packages = [f"{name}=={version}" for name, version in replaced.items()]
        install = ["-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder), *packages]
        subprocess.run([sys.executable, *install], check=True)
    paths = os.pathsep.join(map(str, (folder, ROOT / "src", ROOT / "tools")))
    pytest = ["-m", "pytest", "-n", "2", "--dist", "worksteal", "-p", "outcomes", "--outcomes", str(outcomes)]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *pytest, "-m", "libraries", "--tb", "line", *TESTS]
    ended = subprocess.run(command, cwd=ROOT, env=environment)
    shutil.rmtree(folder)
    if ended.returncode > 1:  # 1: some tests failed
        raise SystemExit(
            f"the tests with the {column} versions did not run to their end (pytest: {ended.returncode})."
        )
    return counted(outcomes)


def counted(outcomes: Path) -> Column:
    """How many tests of each library ended how; the last word on a test counts."""
    versions, *lines = [json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines()]
    last = {line["test"]: (line["library"], line["outcome"]) for line in lines}
    counts = Counter(last.values())
    return {
        name: {"version": versions[name], **{outcome: counts[name, outcome] for outcome in OUTCOMES}}
        for name in LIBRARIES
    }


def table(columns: dict[str, Column]) -> list[str]:
    """Rows of a table in Markdown."""
    rows = ["| library | | version | passed | refused | failed |", "| --- | --- | --- | --- | --- | --- |"]
    for name in LIBRARIES:
        for column, found in columns.items():
            numbers = " | ".join(f"{found[name][outcome]:,}" for outcome in OUTCOMES)
            rows.append(f"| {name} | {column} | {found[name]['version']} | {numbers} |")
    return rows


def page_section(result: dict[str, Any]) -> str:
    said = (
        "How tests of each library's models (of torch: `TransformerEncoderLayer`) ended with the oldest\n"
        "supported and the newest published versions. Refused: by an error at the edit that says why.\n"
        f"By `make matrix` on {result['date']}, with Python {result['python']}.\n"
    )
    return "\n".join([said, *table(result["columns"]), ""])


def with_section(page: str, section: str) -> str:
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{section}{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--newest", action="store_true", help="only the newest versions; writes nothing")
    parser.add_argument(
        "--keep-torch", action="store_true", help="the newest that go with the torch installed"
    )
    asked = parser.parse_args()
    if asked.newest:
        replaced = replaced_for("newest", asked.keep_torch)
        if not replaced:
            print(
                "No newer versions are published than those in constraints.txt, which make test has tested."
            )
            return
        columns = {"newest": tested("newest", replaced)}
    else:
        columns = {name: tested(name, replaced_for(name, asked.keep_torch)) for name in ("oldest", "newest")}
        result = {
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "columns": columns,
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_section(page, page_section(result)), encoding="utf-8")
        badges.write()
    print("\n".join(table(columns)))
    if any(row["failed"] or row["refused"] for column in columns.values() for row in column.values()):
        raise SystemExit("some tests with these versions failed or were refused.")


if __name__ == "__main__":
    main()
