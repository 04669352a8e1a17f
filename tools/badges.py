"""The badges of the README: versions and licence from pyproject.toml, tests from results/versions.json.

python tools/badges.py   writes docs/images/badges
"""

import json
from html import escape

from packaging.requirements import Requirement

from environments import ROOT, project

FOLDER = ROOT / "docs" / "images" / "badges"
GREY, TEAL, RED = "#57606a", "#0b6e6e", "#b3121d"
_CHARACTER, _ROOM = 7.0, 12


def badge(label: str, said: str, color: str = TEAL) -> str:
    """Two boxes with text in them, as an SVG that loads nothing.

    >>> badge("licence", "Apache-2.0").count("<text")
    2
    """
    left, right = (round(len(text) * _CHARACTER + _ROOM) for text in (label, said))
    style = 'fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{escape(label)}: {escape(said)}">'
        f'<clipPath id="round"><rect width="{left + right}" height="20" rx="3"/></clipPath>'
        f'<g clip-path="url(#round)"><rect width="{left}" height="20" fill="{GREY}"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{color}"/></g>'
        f'<text x="{left / 2}" y="14" {style}>{escape(label)}</text>'
        f'<text x="{left + right / 2}" y="14" {style}>{escape(said)}</text></svg>\n'
    )


def badges() -> dict[str, str]:
    """The name of each file and what is in it."""
    about = project()["project"]
    ranges = {each.name: each for each in map(Requirement, about["dependencies"])}
    oldest = {name: str(ranges[name].specifier).removeprefix(">=") for name in ("torch", "timm")}
    columns = json.loads((ROOT / "results" / "versions.json").read_text(encoding="utf-8"))["columns"]
    counts = [library for column in columns.values() for library in column.values()]
    passed, failed = (sum(count[name] for count in counts) for name in ("passed", "failed"))
    tests = f"{passed:,} passed" if not failed else f"{failed:,} of {passed + failed:,} failed"
    return {
        "python.svg": badge("python", f"{about['requires-python'].removeprefix('>=')}+"),
        **{f"{name}.svg": badge(name, f"{version}+") for name, version in oldest.items()},
        "licence.svg": badge("licence", about["license"].split()[0]),
        "tests.svg": badge("tests of models", tests, RED if failed else TEAL),
    }


def write() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in badges().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
