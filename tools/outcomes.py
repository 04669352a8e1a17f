"""A pytest plugin: versions of the libraries, and how each test that is marked with one ended, as JSON lines.

    PYTHONPATH=tools pytest -p outcomes --outcomes FILE -m libraries

An edit that ended in a SeamError was refused, which users can act on; any other exception is a failure.
"""

import importlib.metadata
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from wellposed.errors import SeamError

LIBRARIES = ("timm", "transformers", "torchvision", "torch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", metavar="FILE", help="write how the tests of libraries ended")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("outcomes")
    if file and not hasattr(
        config, "workerinput"
    ):  # a worker of xdist hands its reports to the first process
        config.pluginmanager.register(Outcomes(Path(file)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    report = yield
    marker = item.get_closest_marker("libraries")
    report.library = marker.args[0] if marker else None
    report.is_refusal = call.excinfo is not None and call.excinfo.errisinstance(SeamError)
    return report


class Outcomes:
    """Writes a line a report, so that a run that is stopped leaves what it has done."""

    def __init__(self, file: Path) -> None:
        self.file = file
        versions = {name: importlib.metadata.version(name).partition("+")[0] for name in LIBRARIES}
        file.write_text(json.dumps(versions) + "\n", encoding="utf-8")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if getattr(report, "library", None) is None:
            return
        if report.failed:
            outcome = "refused" if report.is_refusal else "failed"
        elif report.passed and report.when == "call":
            outcome = "passed"
        else:
            return
        line = {"test": report.nodeid, "library": report.library, "outcome": outcome}
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
