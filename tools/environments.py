"""What pip would install, as data: names and versions out of its report."""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def project() -> dict[str, Any]:
    """What pyproject.toml says."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def build_requirements() -> list[str]:
    requires: list[str] = project()["build-system"]["requires"]
    return requires


def resolve(requirements: list[str], *options: str) -> dict[str, str]:
    """The packages that ``pip install`` would add to this environment or replace in it, with their versions.

    Args:
        requirements: as on pip's command line, the repository's root being the current folder.
        options: of ``pip install``; ``--ignore-installed`` resolves as in an empty environment.

    Returns:
        Names and public versions (2.15.0 of 2.15.0+cu130), without wellposed itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        asked = ["install", "-qq", "--dry-run", "--report", str(report), *options, *requirements]
        subprocess.run([sys.executable, "-m", "pip", *asked], cwd=ROOT, check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    packages = [package["metadata"] for package in found if not package["is_direct"]]
    return {package["name"]: package["version"].partition("+")[0] for package in packages}
