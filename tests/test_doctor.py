"""``wellposed doctor`` reports what is installed and what the machine can do."""

import importlib.metadata
import json

import pytest
import torch
from typer.testing import CliRunner

from wellposed.cli import app
from wellposed.commands import doctor


def test_doctor_shows_versions_devices_and_support() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert importlib.metadata.version("timm") in result.output
    assert "cpu, " in result.output
    for name in ("float64", "compile", "processes", "downloads", *doctor.EXTRAS):
        assert name in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_doctor_as_json() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert found["healthy"] is True
    versions = {each["name"]: each["found"] for each in found["packages"]}
    assert versions["timm"] == importlib.metadata.version("timm")
    assert {"torch", "numpy", "scipy", "typer"} <= set(versions)
    assert {each["name"] for each in found["extras"]} == set(doctor.EXTRAS)


@pytest.fixture
def requirements(monkeypatch):
    """Two packages that the machine does not have as wanted, and an extra that it lacks."""
    lines = ["timm>=99", "no-such-package>=1", "numpy>=1", 'neither-this>=2; extra == "plot"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    doctor._requirements.cache_clear()
    yield
    doctor._requirements.cache_clear()


@pytest.mark.usefixtures("requirements")
def test_a_missing_package_is_named_with_its_remedy() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "pip install 'timm>=99' 'no-such-package>=1'" in result.output
    assert "not installed" in result.output
    assert "pip install 'wellposed[plot]'" in result.output


def test_what_does_not_work_says_what_to_do(monkeypatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = {each.name: each for each in (doctor._compiling(False), doctor._processes(), doctor._offline())}
    assert not any(each.works for each in found.values())
    assert "C++ compiler" in found["compile"].says
    assert "one process" in found["processes"].says
    assert "cache" in found["downloads"].says
    assert "CPU" in doctor._float64(True).says
